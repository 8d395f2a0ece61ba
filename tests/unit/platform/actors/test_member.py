"""Exceptions of a member as data."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, cast

import pytest

from orchestray.platform.actors.member import Failure, as_data
from orchestray.platform.errors import DataError
from orchestray.platform.terminal.format import duration


def test_an_error_of_the_users_code_says_where(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import json\n\n\ndef load():\n    return json.loads('{')\n")
    code: dict[str, object] = {}
    exec(compile(file.read_text(), str(file), "exec"), code)  # noqa: S102 - as the user's file is
    load = code["load"]
    assert callable(load)
    failure = as_data(load)
    assert isinstance(failure, Failure)
    assert str(failure.error).startswith("JSONDecodeError: Expecting property name")
    assert str(failure.error).endswith(f"({file}, line 5, in load)")
    assert "in load" in failure.traceback


def test_an_error_of_our_own_code_names_no_place() -> None:
    failure = as_data(functools.partial(duration, cast(Any, "long")))
    assert isinstance(failure, Failure)
    assert str(failure.error).startswith("TypeError: ")
    assert "line" not in str(failure.error)


def test_an_exit_of_the_users_code_is_a_failure_with_its_words_and_place(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("import sys\n\n\ndef load():\n    sys.exit('giving up')\n")
    code: dict[str, Any] = {}
    exec(compile(file.read_text(), str(file), "exec"), code)  # noqa: S102 - as the user's file is
    failure = as_data(code["load"])
    assert isinstance(failure, Failure)
    assert str(failure.error) == f"The task ended its process: sys.exit('giving up') ({file}, line 5, in load)"


def test_an_interrupt_of_the_users_code_is_a_failure_too() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    failure = as_data(interrupt)
    assert isinstance(failure, Failure)
    assert str(failure.error).startswith("KeyboardInterrupt: ")


def test_a_sentence_for_the_user_stays_as_it_is() -> None:
    def read() -> None:
        raise DataError("There is no column b.")

    failure = as_data(read)
    assert isinstance(failure, Failure)
    assert str(failure.error) == "There is no column b."


def test_what_is_returned_is_handed_on_and_a_lack_of_memory_is_not_caught() -> None:
    def fill() -> None:
        raise MemoryError

    assert as_data(lambda: json.loads("3")) == 3
    with pytest.raises(MemoryError):
        as_data(fill)
