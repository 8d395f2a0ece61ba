"""The making of process groups ends, whatever happens to the other members."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from orchestray.platform.comm.process_groups import ended_if_late
from support.patience import PATIENCE_S

WAITS = """
import ctypes
from orchestray.platform.comm.process_groups import ended_if_late

with ended_if_late(0.2):
    ctypes.PyDLL(None).pause()  # for good, with Python's lock held, as a call of NCCL may
"""


def test_a_process_ends_whose_communicator_is_not_made_in_time() -> None:
    command = [sys.executable, "-c", WAITS]
    ended = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE_S)
    assert ended.returncode == 1
    assert "<module>" in ended.stderr, "its stacks"


def test_a_process_goes_on_whose_communicator_is_made_or_refused_in_time() -> None:
    before = threading.active_count()
    with ended_if_late(PATIENCE_S):
        pass
    with pytest.raises(RuntimeError, match="refused"), ended_if_late(PATIENCE_S):
        raise RuntimeError("refused")
    assert threading.active_count() == before
