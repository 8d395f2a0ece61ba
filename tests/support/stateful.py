"""Modules with state beside parameters, a task with one of them, and runs in which a worker is lost."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations

from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.platform.comm.solo import SoloCollective
from orchestray.platform.run.recorder import Recorder
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.core.buffer_kinds import transient
from orchestray.trainers.loop.replica import Replica
from support.threads import run_replicas
from support.training import Rows, State, stream_of

WIDTH = 4


class Scale(nn.Module):
    """A running size, the same on every worker, by which it divides; changed in place."""

    size: Tensor

    def __init__(self, *, is_saved: bool = True) -> None:
        super().__init__()
        self.register_buffer("size", torch.ones(()), persistent=is_saved)
        self.register_buffer("mask", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.update(x)
        return x / self.size

    def update(self, x: Tensor) -> None:
        self.size.mul_(0.9).add_(0.3)


class Assigned(Scale):
    """The same, as another tensor each time."""

    def update(self, x: Tensor) -> None:
        self.size = 0.9 * self.size + 0.3


class Late(nn.Module):
    """A buffer that the first forward pass registers."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            if not hasattr(self, "seen"):
                self.register_buffer("seen", torch.zeros((), dtype=x.dtype))
            self.seen = self.seen + 1
        return x * (1 + 0.01 * self.seen) if hasattr(self, "seen") else x


class Memory(nn.Module):
    """A buffer that gets a row in each pass: the mean of the samples."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        shifted = x + (0.01 * self.kept.mean(0) if len(self.kept) else 0.0)
        if self.training:
            self.update(torch.cat([self.kept, x.detach().mean(0, keepdim=True)]))
        return shifted

    def update(self, rows: Tensor) -> None:
        self.kept = rows


class Resized(Memory):
    """The same, resized in place as observers of torch.ao are."""

    def update(self, rows: Tensor) -> None:
        self.kept.resize_(rows.shape).copy_(rows)


class RunningMean(nn.Module):
    """A running mean of the samples, which depends on a worker's share; `.data` hides the change from torch."""

    mean: Tensor

    def __init__(self, *, is_saved: bool = True) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH), persistent=is_saved)
        self.register_buffer("table", torch.arange(6.0))  # never changes

    def forward(self, x: Tensor) -> Tensor:
        centred = x - self.mean
        if self.training:
            self.mean.data.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return centred


class Calls(nn.Module):
    """A count of the passes, in a buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count += 1
        return x * (1 + 0.01 * self.count)


class Extra(nn.Module):
    """A count of the passes beside the tensors, and a table of what was seen."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.sizes = 0, [torch.zeros(1)]

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.sizes.append(torch.full((1,), float(self.calls)))
        return x * (1 + 0.01 * self.calls)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "sizes": self.sizes, "kind": ("counter", None)}

    def set_extra_state(self, state: Any) -> None:
        self.calls, self.sizes = state["calls"], list(state["sizes"])


class Flagged(nn.Module):
    """A scale that is set in the first pass, unless one was loaded; that it was is noted in no tensor."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.zeros(()))
        self.is_set = False

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            if not self.is_set:
                self.scale.fill_(1.0)
            self.is_set = True
            self.scale.mul_(1.01)
        return x * self.scale

    def _load_from_state_dict(self, *arguments: Any) -> None:
        super()._load_from_state_dict(*arguments)
        self.is_set = True


class Halved(nn.Linear):
    """A layer whose state has its weights in half precision."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name in ("weight", "bias"):
            destination[prefix + name] = destination[prefix + name].half()

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        for name in ("weight", "bias"):
            getattr(self, name).data.copy_(state_dict.pop(prefix + name))


class Packed(nn.Linear):
    """A layer that saves weights and bias as one tensor under another name."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "packed"] = torch.cat([self.weight.detach(), self.bias.detach()[:, None]], 1)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *rest: Any) -> None:
        packed = state_dict.pop(prefix + "packed")
        self.weight = nn.Parameter(packed[:, :-1].clone())  # another object, as some modules do
        self.bias = nn.Parameter(packed[:, -1].clone())


class Hooked(nn.Linear):
    """A layer that a hook saves under other names."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self._register_state_dict_hook(_renamed)
        self.register_load_state_dict_pre_hook(_named_back)


def _renamed(module: nn.Module, state: Any, prefix: str, _metadata: Any) -> None:
    state[prefix + "kernel"] = state.pop(prefix + "weight")


def _named_back(module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
    state[prefix + "weight"] = state.pop(prefix + "kernel")


class Nested(nn.Sequential):
    """A model whose `state_dict` is not a flat mapping of tensors."""

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        return OrderedDict(net=super().state_dict(*arguments, **options), version=3)

    def load_state_dict(self, state_dict: Mapping[str, Any], *arguments: Any, **options: Any) -> Any:
        assert state_dict["version"] == 3
        return super().load_state_dict(state_dict["net"], *arguments, **options)


class Counting(nn.Module):
    """A layer that counts its passes, to be scripted."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count = self.count + 1  # type: ignore[operator]
        scaled: Tensor = self.layer(x) * (1 + 0.01 * self.count)  # type: ignore[operator]
        return scaled


def scripted() -> nn.Module:
    with _no_warnings():
        compiled: nn.Module = torch.jit.script(Counting())
        return compiled


def quantised() -> nn.Module:
    """Return layers prepared for quantisation, whose observers get their sizes in the first pass."""
    from torch.ao import quantization

    with _no_warnings():
        layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH))
        layers.qconfig = quantization.get_default_qat_qconfig("x86")  # type: ignore[assignment]
        return quantization.prepare_qat(layers)


def _no_warnings() -> Any:
    import warnings

    return warnings.catch_warnings(action="ignore")


KINDS: dict[str, Callable[[], nn.Module]] = {
    "in_place": Scale,
    "assigned": Assigned,
    "not_saved": lambda: Scale(is_saved=False),
    "late": Late,
    "grows": Memory,
    "resized": Resized,
    "running_mean": RunningMean,
    "running_mean_not_saved": lambda: RunningMean(is_saved=False),
    "calls": Calls,
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "scripted": scripted,
    "flagged": Flagged,
    "extra": Extra,
    "halved": lambda: Halved(WIDTH, WIDTH),
    "packed": lambda: Packed(WIDTH, WIDTH),
    "hooked": lambda: Hooked(WIDTH, WIDTH),
    "quantised": quantised,
}
"""Modules of `WIDTH` features with state that is kept in different ways."""


class StatefulTask(Rows):
    """A task whose model has a module of a kind."""

    def __init__(self, kind: str, num_samples: int = 40, dtype: str = "float64") -> None:
        rng = np.random.default_rng(7)
        inputs = (rng.normal(size=(num_samples, WIDTH)) + 1.0).astype(dtype)

        def build() -> nn.Module:
            if kind == "nested":
                return Nested(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 1))
            return nn.Sequential(KINDS[kind](), nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 1))

        super().__init__(inputs, inputs.sum(1), build)


def task_of(kind: str, *, num_samples: int = 40) -> Rows:
    """Return a task whose model has a module of that kind."""
    dtype = "float32" if kind == "quantised" else "float64"  # its operations take no doubles
    return StatefulTask(kind, num_samples, dtype)


class Noisy(nn.Module):
    """A module that draws by a function, which a traced pipeline opens."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return functional.dropout(self.inside(x), 0.5, training=self.training)


def fine_tuned() -> nn.Module:
    """Return a frozen backbone in evaluation mode under a new head."""
    backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 8), nn.BatchNorm1d(8))
    backbone.append(Noisy())
    for norm in (backbone[1], backbone[4]):
        nn.init.uniform_(norm.running_var, 0.5, 2.0)  # type: ignore[arg-type]
    backbone.requires_grad_(False).eval()
    return nn.Sequential(backbone, nn.ReLU(), nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def fine_tuning() -> Rows:
    """Return the task of a model that is fine-tuned."""
    rng = np.random.default_rng(3)
    inputs = rng.normal(size=(60, 8)) * 2 + 1
    return Rows(inputs, (np.abs(inputs[:, 0]) % 3).astype("int64"), fine_tuned)


def whole_state(replica: Replica) -> State:
    """Return all that a run is to keep of a model: its state, buffers that are not saved, extra state."""
    model = replica.model
    saved: Any = Nested.__base__.state_dict(model) if isinstance(model, Nested) else model.state_dict()  # type: ignore[union-attr]
    state = {name: _here(value) for name, value in saved.items() if isinstance(value, Tensor)}
    state |= {f"held {name}": _here(value) for name, value in model.named_parameters()}
    state |= {f"beside {name}": value.clone() for name, value in transient(model).items()}
    for name, module in model.named_modules():
        if isinstance(module, Extra):
            state[f"calls {name}"] = torch.tensor(module.calls)
            state[f"sizes {name}"] = torch.cat(module.sizes)
    return state


def _here(tensor: Any) -> Tensor:
    """Return a copy of a tensor, or of the shard of it that is here."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach().clone()


def built(task: Any, settings: ReplicaSettings) -> list[Replica]:
    """Return a replica for each worker, one built after the other: threads share torch's generator."""
    recorders = [Recorder() for _ in range(settings.layout.size)]
    return [Replica(task, settings, stream_of(task, settings), recorder=recorder) for recorder in recorders]


def trained(task: Any, settings: ReplicaSettings) -> list[Replica]:
    """Train undisturbed, workers as threads; return their replicas."""
    replicas = built(task, settings)

    def run(world: Collective) -> None:
        replicas[world.rank].connect(world)
        replicas[world.rank].run(time.time())

    if len(replicas) == 1:
        run(SoloCollective())
    else:
        run_replicas(len(replicas), run)
    return replicas


class _KilledError(Exception):
    """A worker ends."""


def trained_with_a_loss(task: Any, settings: ReplicaSettings, *, lost: int, at_step: int) -> list[Replica]:
    """Train while the worker of rank `lost` ends in a step and is replaced; return the replicas that finished."""
    replicas = built(task, settings)

    def until_loss(world: Collective) -> None:
        replica = replicas[world.rank]
        replica.connect(world)
        passes = replica.passes

        def passes_or_end(step: int) -> AbstractContextManager[object]:
            if world.rank == lost and step == at_step:
                world.abort()
                raise _KilledError
            return passes(step)

        replica.passes = passes_or_end  # type: ignore[method-assign]
        try:
            replica.run(time.time())
        except (PeerLostError, _KilledError):
            replica.passes = passes  # type: ignore[method-assign]
            return
        raise AssertionError("no worker was lost")

    run_replicas(len(replicas), until_loss)
    replicas[lost] = built(task, settings)[0]

    def go_on(world: Collective) -> None:
        assert replicas[world.rank].connect(world) == at_step - 1
        replicas[world.rank].run(time.time())

    run_replicas(len(replicas), go_on)
    return replicas
