"""Files that were written for version 0.1 find what they import, with a notice of where it is now."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from orchestray.moved import MOVED
from support.layers import FILES
from support.patience import PATIENCE_S


def test_every_old_name_is_gone_and_every_new_one_is_there() -> None:
    for old, new in MOVED.items():
        assert old.removeprefix("orchestray.") not in FILES
        assert new.removeprefix("orchestray.") in FILES


def test_an_old_import_gives_the_same_class_with_a_warning_that_names_the_new_module() -> None:
    program = (
        "import warnings\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    from orchestray.search.spaces.choices import ComposedSpace\n"
        "    from orchestray.trainers.tensor.branches import Branches\n"
        "from orchestray.search.spaces.architectures import choices\n"
        "from orchestray.trainers.parallel.tensor import branches\n"
        "assert ComposedSpace is choices.ComposedSpace and Branches is branches.Branches\n"
        "print(*[warning.message for warning in caught], sep='\\n')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "orchestray.search.spaces.choices is now orchestray.search.spaces.architectures.choices" in done.stdout
    assert "orchestray.trainers.tensor.branches is now" in done.stdout


def test_what_the_package_no_longer_has_is_told_with_the_place_where_it_is() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"it is benchmarks/lab/tabular in the repository"):
        importlib.import_module("orchestray.search.tabular")


def test_a_name_that_never_was_is_not_found() -> None:
    program = "import orchestray.trainers.nothing"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert "No module named 'orchestray.trainers.nothing'" in done.stderr
