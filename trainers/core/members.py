"""The seeds and tensor names of the members of an ensemble, by number. Imports nothing heavy."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

Value = TypeVar("Value")

_MEMBER = re.compile(r"^members\.(\d+)\.(.+)$", re.DOTALL)
_SEEDS = 2**31


def member_seed(seed: int, member: int) -> int:
    """Return the seed of a member's weights, order of samples and random draws.

    Member 0 has the run's seed, so that it is the model that the same run trains without an ensemble. The other seeds
    are derived from the run's seed and the member.
    """
    if member == 0:
        return seed
    digest = hashlib.sha256(f"{seed}/{member}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % _SEEDS


def member_name(member: int, name: str) -> str:
    """Return the name that a member's tensor has in the ensemble."""
    return f"members.{member}.{name}"


def is_loss(name: str) -> bool:
    """Return True for the name of a loss among metrics: that of the run, or of a member."""
    match = _MEMBER.match(name)
    return (match[2] if match else name) == "loss"


def saved_name(name: str, saved: int, wanted: int, shared: Collection[str] = ()) -> str:
    """Return the name that a worker's tensor, or its optimizer's "<tensor>.<slot>", has in a checkpoint.

    A plain model resumes from member 0, and every member from a plain model. Members beyond the saved ones resume from
    the saved members in rotation.

    Args:
        name: name under which the worker's run would save the tensor.
        saved: members in the checkpoint; 0: a plain model.
        wanted: members of the worker's run; 0: a plain model.
        shared: the plain model's names of the parameters that all members share; each member resumes these from member
        0, so that they are equal even if the saved run did not share them.
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
    """Return member 0's entries under their plain names."""
    return {match[2]: value for name, value in tensors.items() if (match := _MEMBER.match(name)) and match[1] == "0"}


def change_of_members(saved: int, wanted: int) -> str | None:
    """Return a notice for a resumed run whose number of members changed; None if it did not.

    Args:
        saved: members in the checkpoint; 0: a plain model.
        wanted: members of the run; 0: a plain model.
    """
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
    """Return the entries of `model.json` about an ensemble; empty without one.

    Args:
        num_members: number of members; 0: no ensemble.
        exchange: the config's section.
        arguments: arguments of each member's task, if they differ.
    """
    if not num_members:
        return {}
    own = {} if arguments is None else {"arguments": [dict(each) for each in arguments]}
    return {"ensemble": {"members": num_members, "average": exchange["average"], **own}}


def with_members(metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return the metrics with those named "members.<i>.<name>" moved into a list `members`, one mapping per member."""
    plain: dict[str, Any] = {}
    members: dict[int, dict[str, float]] = {}
    for name, value in metrics.items():
        if match := _MEMBER.match(name):
            members.setdefault(int(match[1]), {})[match[2]] = value
        else:
            plain[name] = value
    return {**plain, "members": [members[index] for index in sorted(members)]} if members else plain
