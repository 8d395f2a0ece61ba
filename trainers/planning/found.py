"""Results of measurements for predictions, as plain values: of a dry run of a worker, of the layers of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class NotedCall:
    """An operation of the exchange in a step.

    Args:
        kind: see `platform.comm.dry.Call`.
        axis: axis of the layout that its group lies along: `data`, `tensor`, `model` or `world`.
        size: number of members.
        num_bytes: bytes of the whole tensor.
        began_s: seconds from the begin of the step to its start.
        waited_s: seconds from the begin of the step to the wait for its result; None: nothing waits for it.
    """

    kind: str
    axis: str
    size: int
    num_bytes: int
    began_s: float
    waited_s: float | None


@dataclass(frozen=True)
class DryStep:
    """A kind of step of a dry run, by the medians of all steps of that kind.

    Args:
        step_s: seconds of the whole step.
        backward_s: seconds of forward and backward passes.
        exchange_s: seconds of this worker's own work for the exchange: packing, encoding, decoding.
        optimizer_s: seconds of the update.
        calls: operations of the exchange.
        bytes_beyond: bytes that all replicas sent beyond their number times what this one sent.
    """

    step_s: float
    backward_s: float
    exchange_s: float
    optimizer_s: float
    calls: tuple[NotedCall, ...]
    bytes_beyond: int = 0


@dataclass(frozen=True)
class DryRun:
    """The result of a dry run of one worker.

    Args:
        every: the steps between two exchanges, as the config has them; 1: each step exchanges.
        plain: a step without an exchange of the parameters; None: there is none.
        exchanging: a step with its exchange.
        parameter_bytes: bytes of the parameters that this worker holds between steps.
        gradient_bytes: bytes of the gradients that it updates from.
        optimizer_bytes: bytes of the optimizer's state.
        activation_bytes: most bytes kept for the backward pass.
        grown_bytes: most memory of the process, beyond what it had before anything was built.
        num_samples: samples of an epoch.
        step_times_s: seconds of each measured step with its exchange.
    """

    every: int
    plain: DryStep | None
    exchanging: DryStep
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    grown_bytes: int
    num_samples: int
    step_times_s: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> DryRun:
        def step(given: dict[str, Any] | None) -> DryStep | None:
            if given is None:
                return None
            return DryStep(**{**given, "calls": tuple(NotedCall(**call) for call in given["calls"])})

        exchanging = step(data["exchanging"])
        assert exchanging is not None
        known = {**data, "plain": step(data["plain"]), "exchanging": exchanging}
        return cls(**{**known, "step_times_s": tuple(data["step_times_s"])})


@dataclass(frozen=True)
class CountedStep:
    """The traffic of a worker in a step: a mean, where it agreed with the others after several.

    Args:
        num_steps: the steps.
        num_bytes: bytes that it sent in groups along each axis.
        bytes_beyond: see `DryStep`.
        calls: operations among the replicas in all the steps: kind, size of the group and bytes.
    """

    num_steps: int
    num_bytes: Mapping[str, float]
    bytes_beyond: int
    calls: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class CountedWorker:
    """The memory and traffic of a worker of a pipeline.

    Args:
        parameter_bytes: bytes of the parameters that it holds between steps.
        gradient_bytes: bytes of the gradients that it updates from.
        optimizer_bytes: bytes of the optimizer's state.
        steps: steps, as many as there are kinds of them.
    """

    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    steps: tuple[CountedStep, ...]

    @property
    def held_bytes(self) -> tuple[int, int, int]:
        """Bytes of the parameters, the gradients and the optimizer's state."""
        return self.parameter_bytes, self.gradient_bytes, self.optimizer_bytes

    def mean(self, of: Callable[[CountedStep], float], every: int) -> float:
        """Return a value of the steps as a mean over the steps of a run, of which one in `every` exchanges."""
        values = [of(step) for step in self.steps]
        least = min(values)
        return least + (sum(values) - len(values) * least) / every


@dataclass(frozen=True)
class CountedRun:
    """The memory and traffic of the workers of a layout with a pipeline, but for what they agree by.

    Args:
        every: see `DryRun`.
        replicas: number of replicas, all like the first.
        workers: workers of the first replica.
    """

    every: int
    replicas: int
    workers: tuple[CountedWorker, ...]

    def num_bytes(self, axis: str) -> float:
        """Return the bytes that all workers send along an axis in a step."""
        beyond = axis == "data"

        def of(step: CountedStep) -> float:
            return self.replicas * step.num_bytes.get(axis, 0.0) + beyond * step.bytes_beyond

        return sum(worker.mean(of, self.every) for worker in self.workers)

    def exchange_s(self, time_of: Callable[[str, int, int], float]) -> float:
        """Return the seconds of a step's operations among replicas, of the worker whose operations take longest.

        Args:
            time_of: time of an operation.
        """

        def of(step: CountedStep) -> float:
            return sum(time_of(*call) for call in step.calls) / step.num_steps

        return max(worker.mean(of, self.every) for worker in self.workers)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> CountedRun:
        def step(given: dict[str, Any]) -> CountedStep:
            return CountedStep(**{**given, "calls": tuple((kind, size, num) for kind, size, num in given["calls"])})

        def worker(given: dict[str, Any]) -> CountedWorker:
            return CountedWorker(**{**given, "steps": tuple(step(each) for each in given["steps"])})

        return cls(data["every"], data["replicas"], tuple(worker(each) for each in data["workers"]))


@dataclass(frozen=True)
class ServedRun:
    """One worker of parameter servers, measured with its servers; nobody else waits for these.

    Args:
        compute_s: seconds in which the worker reads a share and computes its gradient.
        round_s: seconds that a share takes beyond that: a push, the server's work, the parameters on their way back.
        service_s: seconds of that in which the busiest server applies the push, one at a time.
        worker_cpu_s: CPU seconds of the worker for a share.
        server_cpu_s: CPU seconds of all servers for a share.
        share_bytes: bytes between the worker and all servers for a share, both ways.
        grown_bytes: most memory of the worker's process, beyond what it had before anything was built.
        server_grown_bytes: the same of the server that grows most.
    """

    compute_s: float
    round_s: float
    service_s: float
    worker_cpu_s: float
    server_cpu_s: float
    share_bytes: float
    grown_bytes: int
    server_grown_bytes: int

    @classmethod
    def of(cls, worker: Mapping[str, Any], servers: Sequence[Mapping[str, Any]]) -> ServedRun:
        """Return the result from what the processes have measured, see `served.work` and `served.serve`."""
        shares = max(1, worker["shares"])
        compute_s = worker["busy_s"] / shares
        return cls(
            compute_s=compute_s,
            round_s=max(0.0, (servers[0]["step_s"] or compute_s) - compute_s),
            service_s=max(server["applied_s"] * server["num_pushes"] for server in servers) / shares,
            worker_cpu_s=worker["cpu_s"] / shares,
            server_cpu_s=sum(server["cpu_s"] for server in servers) / shares,
            share_bytes=sum(server["bytes"] for server in servers),
            grown_bytes=worker["grown_bytes"],
            server_grown_bytes=max(server["grown_bytes"] for server in servers),
        )


@dataclass(frozen=True)
class LayerProfile:
    """The measured layers of a pipeline's model, for one micro-batch.

    Args:
        names: name of each layer.
        forward_s: seconds of each forward pass.
        backward_s: seconds of each backward pass.
        parameter_bytes: bytes of the parameters of each.
        activation_bytes: bytes that each is the first to keep for the backward pass.
        received_bytes: bytes that each keeps and an earlier one does too.
        loss_bytes: bytes that the loss keeps.
        boundary_bytes: bytes that cross a cut after each.
        forbidden_cuts: layers that must not begin a stage.
        micro_batch_samples: samples of the micro-batch.
        num_parameters: number of the parameters of each, as tensors.
    """

    names: tuple[str, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    parameter_bytes: tuple[int, ...]
    activation_bytes: tuple[int, ...]
    received_bytes: tuple[int, ...]
    loss_bytes: int
    boundary_bytes: tuple[int, ...]
    forbidden_cuts: tuple[int, ...]
    micro_batch_samples: int
    num_parameters: tuple[int, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> LayerProfile:
        known: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in data.items()
        }
        return cls(**known)
