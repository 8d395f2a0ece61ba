"""The search configs that come along."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestray.search.config.load import load_search_config
from orchestray.search.registry.check import check_method
from orchestray.search.registry.methods import METHODS

ROOT = Path(__file__).resolve().parents[4]
CONFIGS = sorted((ROOT / "configs" / "search").glob("*.yaml"))


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_a_config_is_right_named_after_its_file_and_begins_with_the_command_that_runs_it(file: Path) -> None:
    config = load_search_config(file)
    check_method(config)
    assert config.name == file.stem
    assert file.read_text().startswith(f"# orchestray search configs/search/{file.name}\n# ")


def test_every_method_has_a_config() -> None:
    assert {load_search_config(file).search.method.type for file in CONFIGS} == set(METHODS)
