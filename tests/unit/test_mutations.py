"""The mutations of the table of systems can be applied: each changes one place of the code, for a system that works."""

from __future__ import annotations

import re

import pytest

from mutations import FOLDER, ROOT, Mutation, chosen, load_mutations, verdict
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


@pytest.mark.parametrize("new", ["x = (", "return 1", "def f(a, a): ..."])
def test_a_mutation_that_does_not_compile_is_an_error(new: str) -> None:
    mutation = Mutation("a system", "file.py", "x = 1", new)
    with pytest.raises(ValueError, match=r"file\.py does not compile any more"):
        mutation.applied("x = 1\n")


def test_only_a_failure_that_is_no_broken_code_kills_a_mutation() -> None:
    failed = "E   assert 1 == 2\n1 failed, 3 passed in 0.1s\n"
    assert verdict(1, failed) == "killed"
    assert verdict(0, "4 passed in 0.1s\n") == "SURVIVED"
    assert verdict(1, f"E   NameError: name 'y' is not defined\n{failed}") == (
        "it breaks the code: NameError: name 'y' is not defined"
    )
    assert verdict(2, "1 error in 0.1s\n").startswith("its tests could not run")


def test_parts_of_the_mutations_are_chosen_by_group_and_by_name() -> None:
    group_of = {system.name: system.group for system in load_systems()}
    assert chosen((), ()) == load_mutations()
    assert {group_of[one.system] for one in chosen((), "AF")} == {"A", "F"}
    assert [one.system for one in chosen(["Krum", "Adam"], ())] == ["Adam", "Krum"]
    with pytest.raises(ValueError, match="no mutation is known of Kram, Z"):
        chosen(["Kram"], ["Z"])
