"""The members of an ensemble by number: their seeds, and the names of their tensors. Imports nothing heavy."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

Value = TypeVar("Value")

_MEMBER = re.compile(r"^members\.(\d+)\.(.+)$", re.DOTALL)
_SEEDS = 2**31


def member_seed(seed: int, member: int) -> int:
    """The seed of a member's weights, order of samples and draws: the run's own for member 0, else derived from both.

    So member 0 is the model that the same run trains without an ensemble.
    """
    if member == 0:
        return seed
    digest = hashlib.sha256(f"{seed}/{member}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % _SEEDS


def member_name(member: int, name: str) -> str:
    """Of a tensor of a member's, in the ensemble."""
    return f"members.{member}.{name}"


def saved_name(name: str, saved: int, wanted: int, shared: Collection[str] = ()) -> str:
    """Under which name a checkpoint has a tensor, or an optimizer's "<tensor>.<slot>", that a worker wants.

    A plain model goes on from member 0, every member from a plain model, and members beyond those that were saved from
    the saved ones over again.

    Args:
        name: as the worker's run would save it.
        saved: members in the checkpoint; 0: a plain model.
        wanted: members of the worker's run; 0: a plain model.
        shared: the plain model's names of what all members have in common: that of member 0 is everybody's, so that it
            is the same also where it was not shared before.
    """
    if not wanted:
        return member_name(0, name) if saved else name
    match = _MEMBER.match(name)
    assert match is not None
    plain = match[2]
    if not saved:
        return plain
    is_shared = plain in shared or plain.rpartition(".")[0] in shared
    return member_name(0 if is_shared else int(match[1]) % saved, plain)


def first_member(tensors: Mapping[str, Value]) -> dict[str, Value]:
    """What member 0 of an ensemble has, under its plain names."""
    return {match[2]: value for name, value in tensors.items() if (match := _MEMBER.match(name)) and match[1] == "0"}


def change_of_members(saved: int, wanted: int) -> str | None:
    """What a run that goes on should be told; None if nothing changes. 0 members: a plain model."""
    if saved == wanted:
        return None
    if wanted == 0:
        return f"the checkpoint holds an ensemble of {saved}; the run goes on from its member 0, the others are dropped"
    if saved == 0:
        return (
            f"the checkpoint holds one model; all {wanted} members go on from it, and differ from now on only by the "
            "order of their samples"
        )
    if wanted < saved:
        return f"the checkpoint holds {saved} members; the run goes on with the first {wanted}, the others are dropped"
    return (
        f"the checkpoint holds {saved} members; the members from {saved} to {wanted - 1} go on from copies of them, "
        "and differ from now on only by the order of their samples"
    )


def describe_members(
    num_members: int, exchange: Mapping[str, Any], arguments: Sequence[Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """What `model.json` says of an ensemble: nothing where there is none.

    Args:
        num_members: its members.
        exchange: the config's section.
        arguments: of each member's task, where they differ.
    """
    if not num_members:
        return {}
    own = {} if arguments is None else {"arguments": [dict(each) for each in arguments]}
    return {"ensemble": {"members": num_members, "average": exchange["average"], **own}}


def with_members(metrics: Mapping[str, float]) -> dict[str, Any]:
    """Metrics with those named "members.<i>.<name>" taken together as `members`, a mapping a member."""
    plain: dict[str, Any] = {}
    members: dict[int, dict[str, float]] = {}
    for name, value in metrics.items():
        if match := _MEMBER.match(name):
            members.setdefault(int(match[1]), {})[match[2]] = value
        else:
            plain[name] = value
    return {**plain, "members": [members[index] for index in sorted(members)]} if members else plain
