"""A kept profile is read again on the machine and the torch it was measured with, and nowhere else unasked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestray.platform.errors import ConfigError
from orchestray.trainers.machine import kept
from support.profiles import profile


def test_what_was_saved_is_loaded_and_its_folder_is_made(tmp_path: Path) -> None:
    file = tmp_path / "new" / "machine.json"
    kept.save(profile(), file)
    assert kept.load(file).to_json() == profile().to_json()


def test_the_place_is_that_of_the_users_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept.default_file() == tmp_path / "orchestray" / "machine.json"
    kept.save(profile(), kept.default_file())
    assert kept.load().name == profile().name
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert kept.default_file() == tmp_path / ".cache" / "orchestray" / "machine.json"


@pytest.mark.parametrize(
    ("changes", "difference"),
    [
        ({"versions": {"torch": "1.0"}}, "with torch 1.0, and this is"),
        ({"cores": 4096}, "on another machine, .* with 4096 cores"),
        ({"processor": "8086"}, "on another machine, 8086"),
    ],
)
def test_a_profile_of_elsewhere_is_refused_unless_it_is_asked_for(
    changes: dict[str, Any], difference: str, tmp_path: Path
) -> None:
    file = tmp_path / "machine.json"
    kept.save(profile(**changes), file)
    with pytest.raises(ConfigError, match=f"{difference}.*: run `orchestray calibrate`"):
        kept.load(file)
    assert kept.load(file, of_any_machine=True).to_json() == profile(**changes).to_json()


@pytest.mark.parametrize("content", [None, "", "{", "[]", "{}", '{"format": 99}'])
def test_no_profile_or_one_that_cannot_be_read_says_what_to_do(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "machine.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ConfigError, match=r"machine\.json.*run `orchestray calibrate`"):
        kept.load(file)
