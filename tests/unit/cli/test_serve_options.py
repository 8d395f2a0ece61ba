"""Options of `orchestray serve` that each ask for something else."""

from __future__ import annotations

import pytest

from support.cli import orchestray_here


@pytest.mark.parametrize(
    "options",
    [("--update", "--replace", "model-1"), ("--manifest", "--update"), ("--manifest", "--replace", "model-1")],
)
def test_of_options_that_do_different_things_none_is_left_out_in_silence(options: tuple[str, ...]) -> None:
    done = orchestray_here("serve", "no-such-run", *options)
    assert done.returncode == 2
    first, second = (option for option in options if option.startswith("--"))
    assert {first, second} <= {word.strip(":;") for word in done.stderr.split()}
