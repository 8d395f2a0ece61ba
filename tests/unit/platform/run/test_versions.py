"""The versions of what ran."""

from __future__ import annotations

import platform

import ray
import torch

from orchestray.platform.run.versions import WHAT_RAN, installed_versions


def test_the_versions_are_those_that_the_packages_say_of_themselves() -> None:
    found = installed_versions(*WHAT_RAN)
    assert found.keys() == {"python", *WHAT_RAN}
    assert (found["python"], found["ray"]) == (platform.python_version(), ray.__version__)
    assert torch.__version__.startswith(found["torch"])  # its package may leave out the "+cu130" of a build


def test_a_package_that_is_missing_has_no_version() -> None:
    assert installed_versions("no-such-package").keys() == {"python"}
