"""The step of a scheme of collectives: what a dry run has measured, and the times of its operations on a network.

Operations of a step are replayed in virtual time. One begins when the dry run began it, or when the bytes of the one
before it on the same network have been sent; who waits for one is late by what is left of it, and so is all that
follows. Behind an operation a worker computes on. Its latency costs the worker nothing then, but its bytes and the
computation share the cores of a machine (`MachineProfile.overlap`).
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from orchestray.trainers.planning.plans import Memory, Parts

if TYPE_CHECKING:
    from orchestray.trainers.layout.degrees import Layout
    from orchestray.trainers.planning.found import DryRun, DryStep, NotedCall

CallTime = Callable[[str, int, int], float]
"""Function from the kind of an operation, the size of its group and its bytes to its seconds."""


@dataclass(frozen=True)
class Waits:
    """The waits of a step for its operations, in seconds."""

    shown_s: float
    """Seconds that the step takes longer."""
    hidden_s: float
    """Seconds of operations behind computation."""


def waits(calls: Sequence[NotedCall], time_of: CallTime, overlap: float) -> Waits:
    """Replay the operations of a step.

    Args:
        calls: operations, in the order of their begin.
        time_of: time of an operation.
        overlap: part of the time for an operation's bytes that computation of the same length hides, 0 to 1.
    """
    late_s = free_s = hidden_s = 0.0
    events = [(call.began_s, 0, number) for number, call in enumerate(calls)]
    events += [(call.waited_s, 1, number) for number, call in enumerate(calls) if call.waited_s is not None]
    done_s: dict[int, tuple[float, float, float]] = {}
    for at_s, is_wait, number in sorted(events):
        call = calls[number]
        if not is_wait:
            # A send counts with the receive beside it: both directions are used at once.
            is_counted = call.kind == "send" and any(_is_beside(call, other) for other in calls)
            length_s = 0.0 if is_counted else _length_s(call, call.num_bytes, time_of)
            busy_s = max(0.0, length_s - _length_s(call, 0, time_of))
            begin_s = max(at_s + late_s, free_s)
            free_s = begin_s + busy_s
            done_s[number] = (begin_s + length_s, length_s, busy_s)
            continue
        end_s, length_s, busy_s = done_s[number]
        shown_s = min(length_s, max(0.0, end_s - (at_s + late_s)))
        behind_s = length_s - shown_s
        shared_s = (1 - overlap) * behind_s * busy_s / length_s if length_s > 0 else 0.0
        late_s += max(0.0, end_s - (at_s + late_s)) + shared_s
        hidden_s += behind_s - shared_s
    return Waits(late_s, hidden_s)


def _is_beside(send: NotedCall, other: NotedCall) -> bool:
    return other.kind == "receive" and other.num_bytes == send.num_bytes


def _length_s(call: NotedCall, num_bytes: int, time_of: CallTime) -> float:
    """Return the time of an operation, if it is on `num_bytes`: with none, its latency."""
    return operation_s(call.kind, call.size, num_bytes, time_of)


def operation_s(kind: str, size: int, num_bytes: int, time_of: CallTime) -> float:
    """Return the time of an operation of any kind that a dry run notes, from those that are measured."""
    if kind in ("send", "receive"):
        return time_of("exchange", 2, num_bytes)
    if kind == "barrier":
        return time_of("all_reduce", size, 4)
    return time_of(kind, size, num_bytes)


def step_parts(runs: Sequence[DryRun], time_of: CallTime, overlap: float) -> Parts:
    """Return the parts of a step of workers that exchange by collectives, as an average over the steps.

    Args:
        runs: dry runs of workers that computed at the same time.
        time_of: time of an operation.
        overlap: see `waits`.
    """
    every = runs[0].every
    exchanging = _of_slowest(runs, [run.exchanging for run in runs], time_of, overlap)
    if every == 1 or runs[0].plain is None:
        return exchanging
    plain = _of_slowest(runs, [run.plain for run in runs if run.plain is not None], time_of, overlap)
    part = 1 / every
    mixed = {
        name: part * getattr(exchanging, name) + (1 - part) * getattr(plain, name)
        for name in ("compute_s", "exchange_s", "bubble_s", "optimizer_s", "loop_s", "hidden_s")
    }
    return Parts(**mixed)


def _of_slowest(runs: Sequence[DryRun], steps: Sequence[DryStep], time_of: CallTime, overlap: float) -> Parts:
    """Return the parts of the median step, and as waiting what the slower of the workers takes longer by chance."""
    step = sorted(steps, key=lambda each: each.step_s)[len(steps) // 2]
    waited = waits(step.calls, time_of, overlap)
    loop_s = max(0.0, step.step_s - step.backward_s - step.exchange_s - step.optimizer_s)
    return Parts(
        compute_s=step.backward_s,
        exchange_s=step.exchange_s + waited.shown_s,
        bubble_s=chance_s(runs),
        optimizer_s=step.optimizer_s,
        loop_s=loop_s,
        hidden_s=waited.hidden_s,
    )


def chance_s(runs: Sequence[DryRun]) -> float:
    """Return how much longer the slowest of the workers takes in a step than the median one takes: they wait for it."""
    if len(runs) == 1:
        return 0.0
    slowest = [max(times) for times in zip(*(run.step_times_s for run in runs), strict=False)]
    middle = statistics.median(time_s for run in runs for time_s in run.step_times_s)
    return max(0.0, float(statistics.median(slowest) - middle))


def sent_bytes(run: DryRun, layout: Layout, agreed: float = 0.0) -> dict[str, int]:
    """Return the bytes that all workers send in a step, by the axis of the layout, as runs count them.

    A ring's: an all-reduce sends 2 (P - 1) / P of the tensor from each of P members, and so on (see
    `Collective.bytes_sent`). Those of an exchange every H steps count as a part of each.

    Args:
        run: dry run of a worker.
        layout: layout of all workers.
        agreed: bytes of a step that they agree by, where no dry run sees that.
    """
    total = defaultdict[str, float](float, {"world": agreed})
    for step, weight in ((run.exchanging, 1 / run.every), (run.plain, 1 - 1 / run.every)):
        if step is not None and weight > 0:
            for call in step.calls:
                if not _is_exchanged(call, layout):
                    total[call.axis] += weight * layout.size * _sent(call)
            total["tensor"] += weight * layout.size / layout.tensor * _exchanged(step.calls, layout)
            total["data"] += weight * layout.model_size * step.bytes_beyond
    return by_axis(total, layout)


def by_axis(num_bytes: Mapping[str, float], layout: Layout) -> dict[str, int]:
    """Return whole bytes by the axes of a layout, of which a group of all workers may lie along one; none if 0."""
    total = defaultdict[str, float](float)
    for axis, each in num_bytes.items():
        total[axis_of(axis, layout)] += each
    return {axis: round(each) for axis, each in total.items() if round(each)}


def _is_exchanged(call: NotedCall, layout: Layout) -> bool:
    return call.kind in ("send", "receive") and axis_of(call.axis, layout) == "tensor"


def _exchanged(calls: Sequence[NotedCall], layout: Layout) -> float:
    """Return the bytes that all members of a tensor group send in exchanges of which the first sees its own part.

    A member sends either to its neighbours in a row, of which the first has one, or to all others.
    """
    exchanges: list[list[NotedCall]] = []
    for call in calls:
        if _is_exchanged(call, layout):
            if not exchanges or (call.kind == "receive" and exchanges[-1][-1].kind == "send"):  # receives come first
                exchanges.append([])
            exchanges[-1].append(call)
    total, others = 0.0, layout.tensor - 1
    for exchange in exchanges:
        sent, received = (sum(call.num_bytes for call in exchange if call.kind == kind) for kind in ("send", "receive"))
        total += others * received + (others if len(exchange) <= 2 else 1) * sent
    return total


def axis_of(axis: str, layout: Layout) -> str:
    """Return the axis that a group of all workers lies along, where there is one only."""
    degrees: Mapping[str, int] = {"data": layout.data, "tensor": layout.tensor, "pipeline": layout.pipeline}
    wide = [name for name, degree in degrees.items() if degree > 1]
    return wide[0] if axis in ("world", "model") and len(wide) == 1 else axis


def _sent(call: NotedCall) -> float:
    """Return the mean bytes that a member of the group sends."""
    if call.kind == "all_reduce":
        return float(-(-2 * (call.size - 1) * call.num_bytes // call.size))
    if call.kind in ("all_gather", "reduce_scatter", "broadcast"):
        return (call.size - 1) / call.size * call.num_bytes
    return float(call.num_bytes) if call.kind == "send" else 0.0


def memory_of(run: DryRun, process_bytes: int, *, grown_bytes: int = 0) -> Memory:
    """Return the memory of a worker by kind.

    Args:
        run: its dry run.
        process_bytes: memory of a worker's process that has built nothing yet.
        grown_bytes: what its process grows by, where another run has measured that; 0: what the dry run's grew by.
    """
    known = run.parameter_bytes + run.gradient_bytes + run.optimizer_bytes + run.activation_bytes
    return Memory(
        run.parameter_bytes,
        run.gradient_bytes,
        run.optimizer_bytes,
        run.activation_bytes,
        max(0, process_bytes + (grown_bytes or run.grown_bytes) - known),
    )
