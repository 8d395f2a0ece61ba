"""The way of a member to a meeting, in a process without Ray."""

from __future__ import annotations

import json

import pytest

from support.forked import Forked

_MEMBER = """
import json, os, sys
import torch.distributed as dist
from orchestray.platform.comm import process_groups
from orchestray.platform.comm.collective import Collective
from orchestray.platform.actors.member import Meeting, Member

member = Member(1)
port, tell_port = os.pipe()
replacement = os.fork() if "replaced" in sys.argv else None
if replacement == 0:
    member.join(Meeting(2, "127.0.0.1", int(os.read(port, 10)), 2, timeout_s=1e6), 1)
    os._exit(0)
process_groups.CONNECT_TIMEOUT_S = 0.1
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
case = sys.argv[1]
size = 1 if case == "connected" else 2
meeting = Meeting(1, "127.0.0.1", store.port, size, timeout_s=1e6)
if case == "killed":  # once it had come
    dist.PrefixStore("generation-1", store).add("arrived", 1)
if case == "abandoned":
    member.abandon(1)
came = member.join(meeting, 0)
if replacement is not None:
    assert not came
    process_groups.CONNECT_TIMEOUT_S = 30.0
    os.write(tell_port, str(store.port).encode())
    came = member.join(Meeting(2, "127.0.0.1", store.port, 2, timeout_s=1e6), 0)
    os.waitpid(replacement, 0)
print(json.dumps([came, Collective.of_this_process().timeout_s if came else None]))
"""


@pytest.mark.parametrize(
    ("case", "came"),
    [("connected", [True, 1e6]), ("killed", [False, None]), ("abandoned", [False, None])],
)
def test_who_is_killed_after_all_have_come_is_waited_for_as_long_as_connecting_takes_and_not_as_an_operation(
    case: str, came: list[object]
) -> None:
    """Allow operations of the meeting more time than any test takes."""
    assert outcome_of(case) == came


def test_who_was_left_alone_in_a_meeting_meets_the_replacement_in_the_next() -> None:
    assert outcome_of("killed", "replaced") == [True, 1e6]


def outcome_of(*arguments: str) -> object:
    """Run a member; return True if it came, and the timeout of its group."""
    with Forked(_MEMBER, *arguments, env={"GLOO_SOCKET_IFNAME": "lo"}) as member:
        assert member.wait() == 0, member.printed()
        return json.loads(member.printed().splitlines()[-1])
