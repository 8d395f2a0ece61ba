"""Fixtures of every test without Ray."""

from __future__ import annotations

import ctypes
import os
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Limit torch to one thread: tensors here are small, and replicas are threads that would wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _no_name_server() -> Iterator[None]:
    """Keep torch from asking a name server for every address it connects to: a dropped question costs 5 seconds.

    With glibc this process looks names up in /etc/hosts alone, and those it starts ask again after a second.
    """
    choose = getattr(ctypes.CDLL(None), "__nss_configure_lookup", None)
    if choose is not None:
        choose(b"hosts", b"files")
    before = os.environ.get("RES_OPTIONS")
    os.environ["RES_OPTIONS"] = "timeout:1"
    yield
    if before is None:
        del os.environ["RES_OPTIONS"]
    else:
        os.environ["RES_OPTIONS"] = before
