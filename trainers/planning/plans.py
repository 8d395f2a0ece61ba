"""A plan: a scheme for a config, with what a step of it is predicted to cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from orchestray.trainers.planning.correction import Correction, Traits
    from orchestray.trainers.planning.goodput import Goodput


@dataclass(frozen=True)
class Parts:
    """The parts of a step's time, in seconds, on the worker that is the last to finish."""

    compute_s: float = 0.0
    """Forward and backward passes."""
    exchange_s: float = 0.0
    """Exchange that the worker waits for, with packing, encoding and decoding."""
    bubble_s: float = 0.0
    """Waiting for other stages of a pipeline, or for a parameter server's turn."""
    optimizer_s: float = 0.0
    """The update of the weights."""
    loop_s: float = 0.0
    """All else of a step: reading samples, recording, deciding what is due."""
    hidden_s: float = 0.0
    """Exchange behind computation, which takes no time of its own; not in the total."""

    @property
    def total_s(self) -> float:
        return self.compute_s + self.exchange_s + self.bubble_s + self.optimizer_s + self.loop_s

    def scaled(self, factor: float) -> Parts:
        """Return the parts, each times a factor."""
        return Parts(**{name: value * factor for name, value in asdict(self).items()})

    def towards(self, other: Parts, part: float) -> Parts:
        """Return the parts at a point of the line to other ones: these at 0, the others at 1."""
        ends = ((name, value, getattr(other, name)) for name, value in asdict(self).items())
        return Parts(**{name: value + part * (there - value) for name, value, there in ends})


@dataclass(frozen=True)
class Memory:
    """The memory of the worker that needs most, in bytes, by kind; `process` is that of a server if that needs more."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    """Most bytes kept for the backward pass at once."""
    process: int = 0
    """All else: Python, torch, data, buffers."""

    @property
    def resident(self) -> int:
        """Resident set of the process."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.process

    def to_json(self) -> dict[str, int]:
        return {**asdict(self), "resident": self.resident}


@dataclass(frozen=True)
class Plan:
    """A scheme for a config, and its predicted costs.

    Args:
        name: short name of the scheme.
        traits: what the errors of its prediction may have in common with those of others.
        changes: dotted keys of the config that it sets; empty: the config as it stands.
        config: the whole config, as plain data, which runs as it is.
        num_workers: workers, without servers.
        num_servers: parameter servers.
        num_steps: steps of the whole run; 0: unknown.
        steps_per_epoch: steps of an epoch, or their mean; 0: unknown.
        samples: samples of a step, over all workers; of a run whose batches grow, the mean over its steps.
        parts: parts of the time of a step.
        memory: memory of a worker.
        num_bytes: bytes that all workers send in a step, by link (`data`, `tensor`, `pipeline`, `server`).
        staleness: mean number of updates between reading weights and adding the gradient to them.
        keeps_result: True if the run ends with the weights of a single process, up to rounding.
        interval_s: seconds of a step between which 80 % of the runs are expected to be; None: not corrected yet.
        start_s: seconds from the call to the first step.
        price: price of the whole run, or None.
        tried_s: median seconds of a step where the plan was tried; None: it was not.
        goodput: part of the time that failures leave, with the best checkpoints; None: no rate of failures was given.
        notes: what a reader has to know, each a sentence without its full stop.
    """

    name: str
    traits: Traits
    changes: Mapping[str, Any]
    config: Mapping[str, Any]
    num_workers: int
    samples: float
    parts: Parts
    memory: Memory = Memory()
    num_bytes: Mapping[str, int] = field(default_factory=dict)
    num_servers: int = 0
    num_steps: int = 0
    steps_per_epoch: int = 0
    staleness: float = 0.0
    keeps_result: bool = True
    interval_s: tuple[float, float] | None = None
    start_s: float = 0.0
    price: float | None = None
    tried_s: float | None = None
    goodput: Goodput | None = None
    notes: tuple[str, ...] = ()

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.parts.total_s

    @property
    def epoch_s(self) -> float:
        """Seconds of an epoch, as its number of steps times a step; 0: unknown."""
        return self.steps_per_epoch * self.step_s

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.step_s if self.step_s else 0.0

    def corrected(self, correction: Correction) -> Plan:
        """Return the plan with times that the record of errors corrects."""
        parts = self.parts.scaled(correction.factor)
        low, high = correction.interval
        return replace(self, parts=parts, interval_s=(parts.total_s * low, parts.total_s * high))

    def to_json(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        return {
            "name": self.name,
            "family": self.traits.family,
            "changes": dict(self.changes),
            "step_s": self.step_s,
            "interval_s": None if self.interval_s is None else list(self.interval_s),
            "epoch_s": self.epoch_s,
            "samples": self.samples,
            "samples_per_s": self.samples_per_s,
            "parts": asdict(self.parts),
            "memory_bytes": self.memory.to_json(),
            "bytes": dict(self.num_bytes),
            "staleness": self.staleness,
            "keeps_result": self.keeps_result,
            "workers": self.num_workers,
            "servers": self.num_servers,
            "start_s": self.start_s,
            "price": self.price,
            "tried_s": self.tried_s,
            "goodput": None if self.goodput is None else self.goodput.to_json(),
            "notes": list(self.notes),
            "config": dict(self.config),
        }
