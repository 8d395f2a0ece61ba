"""How a member comes to a meeting, in a process without Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from support.patience import PATIENCE_S

_MEMBER = """
import json, sys
import torch.distributed as dist
from orchestray.platform import process_groups
from orchestray.platform.collective import Collective
from orchestray.platform.gang.member import Meeting, Member

process_groups.CONNECT_TIMEOUT_S = 1.0
member = Member(1)
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
case = sys.argv[1]
size = 1 if case == "connected" else 2
meeting = Meeting(1, "127.0.0.1", store.port, size, timeout_s=1e6)
if case == "killed":  # once it had come
    dist.PrefixStore("generation-1", store).add("arrived", 1)
if case == "abandoned":
    member.abandon(1)
came = member.join(meeting, 0)
print(json.dumps([came, Collective.of_this_process().timeout_s if came else None]))
"""


@pytest.mark.parametrize(
    ("case", "came"),
    [("connected", [True, 1e6]), ("killed", [False, None]), ("abandoned", [False, None])],
)
def test_who_is_killed_after_all_have_come_is_waited_for_as_long_as_connecting_takes_and_not_as_an_operation(
    case: str, came: list[object]
) -> None:
    """An operation of the meeting may take longer than any test."""
    told = subprocess.run(
        [sys.executable, "-c", _MEMBER, case],
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    ).stdout
    assert json.loads(told) == came
