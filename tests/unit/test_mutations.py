"""The mutations of the table of systems can be applied: each changes one place of the code, for a system that works."""

from __future__ import annotations

import re

import pytest

from mutations import FOLDER, ROOT, Mutation, load_mutations
from orchestray.cli.systems_table import load_systems


@pytest.mark.parametrize("mutation", load_mutations(), ids=lambda mutation: mutation.system)
def test_a_mutation_changes_one_place_of_a_file(mutation: Mutation) -> None:
    text = (ROOT / mutation.file).read_text(encoding="utf-8")
    assert mutation.applied(text) != text


def test_each_is_of_a_system_that_works_and_no_system_is_there_twice() -> None:
    names = [one.system for one in load_mutations()]
    assert set(names) <= {system.name for system in load_systems() if system.tests}
    text = "".join(file.read_text(encoding="utf-8") for file in FOLDER.glob("*.yaml"))
    assert len(re.findall(r"^\S.*:$", text, re.MULTILINE)) == len(set(names)) == len(names)
