"""A dry run of one worker: the product's own loop for a few steps, with the other workers imagined.

What is measured is what a run does: reading a share, the model at the shapes of this worker, the code of the scheme,
the optimizer. What the exchange would take is added later, from the noted operations (`trainers.planning.pricing`).
"""

from __future__ import annotations

import gc
import re
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from orchestray.platform.actors.member import give_back_freed_memory
from orchestray.platform.comm.dry import Call, DryCollective, imagine_the_others
from orchestray.platform.comm.thread_group import run_members
from orchestray.platform.run.staging import Staging
from orchestray.trainers.core.forward import Forward
from orchestray.trainers.core.inputs import inputs_of
from orchestray.trainers.core.process_memory import peak_memory_bytes
from orchestray.trainers.core.task_calls import loss_of
from orchestray.trainers.core.unread import read_together
from orchestray.trainers.loop.host import ReplicaHost
from orchestray.trainers.loop.task_host import TaskHost
from orchestray.trainers.parallel.assemble import Assembler
from orchestray.trainers.parallel.pipeline.assemble import PipelineAssembler, first_micro_batch
from orchestray.trainers.parallel.pipeline.profile import profile_layers
from orchestray.trainers.planning.found import DryRun, DryStep, LayerProfile, NotedCall

if TYPE_CHECKING:
    from torch import Tensor

    from orchestray.platform.data.stream import SampleStream
    from orchestray.platform.task import Task
    from orchestray.trainers.config.settings import ReplicaSettings
    from orchestray.trainers.loop.replica import Replica

    Finish = Callable[[Sequence[float | Tensor]], list[float]]

WARM_UP_STEPS = 4
_LEAST_STEPS, _MOST_STEPS = 8, 200
_STILL = 1e-9
"""Factor of the learning rates of a dry run."""
_AIM_S = 0.6
"""Seconds that the measured steps take together, so that the workers that measure at once do so most of the time."""
_LAYER_REPEATS = 7
ENDLESS = 1_000_000_000
_PERIOD = 4
"""Steps between two averages in a dry run, whatever the config says: both kinds of steps are to be seen."""


def dry_run(settings: ReplicaSettings, start: Callable[[], None] = lambda: None) -> DryRun:
    """Run the first worker for a few steps on its own. Its share of a batch is the largest.

    Args:
        settings: settings of the run; its scheme works by collectives (no parameter server, no pipeline).
        start: called once all is built, before the first step; it may wait for other dry runs.

    Raises:
        OrchestrayError: the config does not fit the task, or the task's code failed.
    """
    before = resident_memory()
    every, settings = settings_to_measure(settings)
    calls: list[Call] = []
    replica = _connected(settings, calls)
    staging = _staging(replica)
    watch = _Watch(replica, calls)
    start()
    resident_memory()
    with watch.watching():
        replica.run(time.time())
    grown = peak_memory() - before
    del staging
    steps = watch.steps[WARM_UP_STEPS:]
    plain, exchanging = ([], steps) if every == 1 else _kinds(steps)
    times = [step.step_s for step in exchanging]
    parameter_bytes, gradient_bytes, optimizer_bytes = held_bytes(replica)
    return DryRun(
        every=every,
        plain=_median_of(plain) if plain else None,
        exchanging=_median_of(exchanging),
        parameter_bytes=parameter_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=optimizer_bytes,
        activation_bytes=replica.meter.peak_bytes,
        grown_bytes=max(0, grown),
        num_samples=replica.stream("train").num_samples,
        step_times_s=tuple(times),
    )


def profile(settings: ReplicaSettings, start: Callable[[], None] = lambda: None) -> LayerProfile:
    """Measure the layers of a pipeline's model with a micro-batch of its config.

    Args:
        settings: settings of the run.
        start: called once all is built; it may wait for other measurements.

    Raises:
        OrchestrayError: the config does not fit the task, the model cannot be cut, or the task's code failed.
    """
    host = _StreamHost(without_ends(settings))
    stream, task = host.share(), host.task
    assembler = Assembler(task, settings, lambda _split, _replica: stream, host.device)
    model, cutter = assembler.plain_model, PipelineAssembler(task, settings, assembler.draw, host.device)
    layers = cutter.layers(model, inputs_of(stream.one_sample()))
    micro_batch = first_micro_batch(stream)
    forward = Forward(task, model, settings.precision, host.device)
    batch = forward.place(micro_batch.batch)
    start()
    with forward.precision():
        costs = profile_layers(
            layers, batch["inputs"], lambda outputs: loss_of(task, outputs, batch), repeats=_LAYER_REPEATS, warm_up=2
        )
    return LayerProfile(
        names=tuple(layers.names),
        forward_s=tuple(cost.forward_s for cost in costs),
        backward_s=tuple(cost.backward_s for cost in costs),
        parameter_bytes=tuple(cost.parameter_bytes for cost in costs),
        activation_bytes=tuple(cost.activation_bytes for cost in costs),
        received_bytes=tuple(cost.received_bytes for cost in costs),
        loss_bytes=costs[-1].loss_bytes,
        boundary_bytes=tuple(cost.boundary_bytes for cost in costs),
        forbidden_cuts=tuple(sorted(layers.forbidden_cuts)),
        micro_batch_samples=micro_batch.num_samples,
        num_parameters=tuple(cost.num_parameters for cost in costs),
    )


def _connected(settings: ReplicaSettings, calls: list[Call]) -> Replica:
    """Return the first replica, whose peers are imagined.

    A split over a tensor group is tried on a sample when it is built, which takes all its members: they are threads of
    this process, until all is built.
    """
    size = settings.layout.size
    if settings.layout.tensor == 1:
        replica = WatchedHost(settings).replica
        replica.connect(DryCollective(0, size, calls))
        return replica

    # One after the other: models that are built at the same time would share torch's random numbers.
    replicas = [WatchedHost(settings).replica for _ in range(size)]
    run_members(size, lambda world: replicas[world.rank].connect(world))
    first = replicas[0]
    imagine_the_others(first.world, calls)
    replicas.clear()
    gc.collect()
    give_back_freed_memory()  # of the others, which no worker has
    return first


def _staging(replica: Replica) -> list[Staging]:
    """Return the memory into which the first worker copies what it saves, as it has it from its first step on."""
    if not replica.settings.is_replicated:
        return []  # tensors are saved one at a time
    held = [Staging(tensors) for tensors in (replica.state().tensors, replica.optimizer.state_tensors())]
    for each in held:
        each.prefault()
    return held


class WatchedHost(ReplicaHost):
    """A host whose replica can be watched."""

    @property
    def replica(self) -> Replica:
        return self._replica


class _StreamHost(TaskHost):
    """A host of a task and the first replica's samples."""

    @property
    def task(self) -> Task:
        return self._task

    @property
    def device(self) -> torch.device:
        return self._device

    def share(self) -> SampleStream:
        return self._stream("train", 0, self._settings.num_replicas)


def without_ends(settings: ReplicaSettings) -> ReplicaSettings:
    """Return the settings of a run with batches of one size that goes on until it is stopped, and keeps nothing."""
    return replace(
        settings,
        epochs=None,
        steps=ENDLESS,
        batch_schedule=None,
        checkpoint_storage=None,
        model_directory=None,
        faults=(),
        until=None,
        early_stop=None,
        best=None,
        time_limit_s=None,
        pause_at=None,
        validate_every_steps=ENDLESS,
    )


def _still(settings: ReplicaSettings) -> ReplicaSettings:
    """Return settings whose steps hardly move the weights: by what others are imagined to send they might diverge."""
    optimizer = settings.optimizer
    if not optimizer:
        return settings
    groups = [{**each, "lr": _STILL * each["lr"]} if "lr" in each else each for each in optimizer.get("groups", ())]
    return replace(settings, optimizer={**optimizer, "lr": _STILL * optimizer["lr"], "groups": tuple(groups)})


def settings_to_measure(settings: ReplicaSettings) -> tuple[int, ReplicaSettings]:
    """Return the steps between two exchanges, and settings of an endless run that has few of them and stays put."""
    settings = _still(without_ends(settings))
    every = settings.exchange.get("every", 1)
    if every == "end":
        return ENDLESS, settings
    if settings.exchange.get("unit") == "samples":
        every = max(1, round(int(every) / settings.batch_size))
        settings = replace(settings, exchange={**settings.exchange, "every": every, "unit": "steps"})
    if int(every) <= _PERIOD:
        return int(every), settings
    return int(every), replace(settings, exchange={**settings.exchange, "every": _PERIOD})


class _Watch:
    """A stopwatch on the parts of a replica's steps. It stops the replica when it has seen enough."""

    def __init__(self, replica: Replica, calls: list[Call]) -> None:
        self.steps: list[DryStep] = []
        self._replica, self._calls = replica, calls
        self._began_s: float | None = None
        self._seconds = dict.fromkeys(("backward", "exchange", "optimizer"), 0.0)
        self._first_s = 0.0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch the steps of a run inside."""
        replica = self._replica
        exchange, network, optimizer = replica.exchange, replica.network, replica.optimizer
        self._calls.clear()
        patched = [
            (exchange, "before_step", self._beginning(exchange.before_step)),
            (network, "backward", self._timed("backward", network.backward)),
            (exchange, "finish", self._timed("exchange", _alone(exchange.finish))),
            (exchange, "after_step", self._timed("exchange", exchange.after_step)),
            (optimizer, "step", self._timed("optimizer", optimizer.step)),
        ]
        for owner, name, watched in patched:
            setattr(owner, name, watched)
        try:
            yield
        finally:
            for owner, name, _ in patched:
                delattr(owner, name)

    def _timed(self, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            began_s = time.perf_counter()
            try:
                return method(*args, **options)
            finally:
                self._seconds[part] += time.perf_counter() - began_s

        return timed

    def _beginning(self, before_step: Callable[[int], None]) -> Callable[[int], None]:
        def begin(step: int) -> None:
            now_s = time.perf_counter()
            if self._began_s is not None:
                self._end_step(self._began_s, now_s)
            if len(self.steps) == WARM_UP_STEPS:
                self._first_s = now_s
            measured = len(self.steps) - WARM_UP_STEPS
            is_long = measured >= _LEAST_STEPS and now_s - self._first_s > _AIM_S
            self._replica.stop_requested = is_long or measured >= _MOST_STEPS
            self._seconds = dict.fromkeys(self._seconds, 0.0)
            self._calls.clear()
            self._began_s = time.perf_counter()
            before_step(step)

        return begin

    def _end_step(self, began_s: float, now_s: float) -> None:
        calls = tuple(
            NotedCall(
                call.kind,
                axis_of_group(call.group),
                call.size,
                call.num_bytes,
                call.began_s - began_s,
                None if call.waited_s is None else call.waited_s - began_s,
            )
            for call in self._calls
        )
        seconds = self._seconds
        self.steps.append(
            DryStep(
                now_s - began_s,
                seconds["backward"],
                seconds["exchange"],
                seconds["optimizer"],
                calls,
                self._replica.exchange.bytes_beyond,
            )
        )


def _alone(finish: Finish) -> Finish:
    """Return a function that finishes the exchange, and returns this worker's own extras: the others have no votes."""

    def finished(extras: Sequence[float | Tensor]) -> list[float]:
        finish(extras)
        return read_together(extras)

    return finished


def axis_of_group(path: str) -> str:
    """Return the axis of a group by the path of its collective, such as `group/data-0/sums`."""
    found = re.search(r"/(data|tensor|pipeline|model)-\d+", path)
    return found[1] if found else "world"


def _kinds(steps: Sequence[DryStep]) -> tuple[list[DryStep], list[DryStep]]:
    """Split steps into those without and those with an exchange of the parameters, by the bytes that they send."""
    sent = [sum(call.num_bytes for call in step.calls) for step in steps]
    bound = max(sent, default=0) / 2
    plain = [step for step, num_bytes in zip(steps, sent, strict=True) if num_bytes < bound]
    return plain, [step for step, num_bytes in zip(steps, sent, strict=True) if num_bytes >= bound]


def _median_of(steps: Sequence[DryStep]) -> DryStep:
    """Return a step of the usual operations, with the medians of the parts' times over all steps."""
    sent = [sum(call.num_bytes for call in step.calls) for step in steps]
    usual = statistics.mode(sent)
    alike = [step for step, num_bytes in zip(steps, sent, strict=True) if num_bytes == usual]
    middle = sorted(alike, key=lambda step: step.step_s)[len(alike) // 2]
    parts = {
        name: statistics.median(getattr(step, name) for step in steps)
        for name in ("step_s", "backward_s", "exchange_s", "optimizer_s")
    }
    return replace(middle, **parts)


def held_bytes(replica: Replica) -> tuple[int, int, int]:
    """Return the bytes of the parameters that a worker holds, of the gradients, and of its optimizer's state."""
    names = {name for name, _ in replica.model.named_parameters()}
    parameters = [held.tensor for name, held in replica.exchange.held().items() if name in names]
    if replica.network.streams:  # each stage moves its parameters by itself
        gradients = parameters
    else:
        gradients = [each for each in replica.exchange.gradients() if each is not None]
    return _num_bytes(parameters), _num_bytes(gradients), _num_bytes(replica.optimizer.state_tensors().values())


def _num_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def resident_memory() -> int:
    """Return the resident set of this process, in bytes, and have the kernel forget its peak (Linux, proc(5))."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return peak_memory()


def peak_memory() -> int:
    """Return the largest resident set of this process since `resident_memory`, in bytes."""
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return peak_memory_bytes(torch.device("cpu"))
