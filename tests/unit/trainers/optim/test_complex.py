"""Complex parameters: trained and saved as in plain PyTorch, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.data.tensors import to_tensor
from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good
from orchestray.trainers.loop.checkpoint_source import Loaded
from support.central_run import central_settings, train_central
from support.layouts import LaidOut, layout_settings, train_laid_out
from support.plain import train_plainly
from support.training import same_bits

STEPS = 4
WHOLE: dict[str, Any] = {"microbatches": None}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {"network": WHOLE},
    "data 3, accumulate 2": {"network": {"data": 3, **WHOLE}, "accumulate": 2},
    "ring": {"network": {"data": 2, **WHOLE}, "exchange": {"algorithm": "ring"}},
    "ZeRO-1": {"network": {"data": 2, **WHOLE}, "exchange": {"shard": "optimizer"}},
    "ZeRO-2": {"network": {"data": 3, **WHOLE}, "exchange": {"shard": "gradients"}},
    "pipeline 2": {"network": {"pipeline": 2}},
    "tensor 2": {"network": {"tensor": 2}},
}
OPTIMIZERS: dict[str, tuple[dict[str, Any], Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": ({"type": "sgd", "lr": 0.1}, lambda p: torch.optim.SGD(p, lr=0.1)),
    "momentum": (
        {"type": "sgd", "lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    ),
    "nesterov": (
        {"type": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True},
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    ),
    "adam": ({"type": "adam", "lr": 0.01}, lambda p: torch.optim.Adam(p, lr=0.01)),
    "adamw": ({"type": "adamw", "lr": 0.01}, lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.01)),
    "adagrad": ({"type": "adagrad", "lr": 0.01}, lambda p: torch.optim.Adagrad(p, lr=0.01)),
    "rmsprop": ({"type": "rmsprop", "lr": 0.01}, lambda p: torch.optim.RMSprop(p, lr=0.01)),
    "torch's own": ({"type": "torch.optim:Adamax", "lr": 0.01}, lambda p: torch.optim.Adamax(p, lr=0.01)),
}


class Spectral(nn.Module):
    """A Fourier layer, as in neural operators, with a complex scalar beside its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(1, 4)
        self.weight = nn.Parameter(0.1 * torch.randn(4, 4, 6, dtype=torch.cfloat))
        self.scale = nn.Parameter(torch.tensor(1.0 + 0.5j))
        self.hidden = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
        self.drop = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        lifted = self.lift(x[:, :, None]).movedim(2, 1)
        modes = torch.fft.rfft(lifted)[:, :, :6] * self.scale
        mixed = torch.fft.irfft(torch.einsum("nim,iom->nom", modes, self.weight), n=16).movedim(1, 2)
        found: Tensor = self.drop(self.hidden(mixed))
        return found[:, :, 0]


class Operator:
    def build_model(self) -> nn.Module:
        return Spectral()

    def dataset(self, split: str) -> pa.Table:
        rows = np.random.default_rng(len(split)).normal(size=(40, 16)).astype("float32")
        return pa.table({"x": pa.array(list(rows))})

    def to_batch(self, columns: pa.Table) -> dict[str, Tensor]:
        return {"inputs": to_tensor(columns["x"])}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (outputs - torch.roll(batch["inputs"], 1, 1)).square().mean()

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {}


def trained(*, network: Any = None, exchange: Any = None, files: Any = None, load: Any = None, **train: Any) -> LaidOut:
    settings = layout_settings(network, exchange, **{"batch_size": 8, "steps": STEPS, **train})
    return train_laid_out(Operator, settings, checkpoints=files, load=load)


def apart(found: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    assert {name: value.dtype for name, value in found.items()} == {name: value.dtype for name, value in right.items()}
    return max(float((found[name] - value).abs().max()) for name, value in right.items())


def plain(optimizer: str, clip: float | None = None) -> LaidOut:
    return train_plainly(Operator(), OPTIMIZERS[optimizer][1], batch_size=8, steps=STEPS, grad_clip=clip)


@pytest.mark.parametrize(
    ("layout", "optimizer", "clip"),
    [
        *((layout, "adam", None) for layout in LAYOUTS),
        *(("one", optimizer, None) for optimizer in OPTIMIZERS if optimizer != "adam"),
        *((layout, "sgd", 0.05) for layout in ("one", "data 3, accumulate 2", "ZeRO-2", "pipeline 2")),
    ],
)
def test_complex_parameters_train_as_in_plain_pytorch(layout: str, optimizer: str, clip: float | None) -> None:
    right = plain(optimizer, clip)
    found = trained(optimizer=OPTIMIZERS[optimizer][0], grad_clip=clip, **LAYOUTS[layout])
    assert found.losses == pytest.approx(right.losses, rel=0, abs=1e-10)
    assert apart(found.weights, right.weights) <= 1e-10


def test_replicas_of_a_stream_sum_complex_gradients() -> None:
    network = {"pipeline": 2, "split": "equal", "schedule": "pipedream", "microbatches": 1}
    alone, both = (trained(network={**network, "data": data}, optimizer=OPTIMIZERS["sgd"][0]) for data in (1, 2))
    assert apart(both.weights, alone.weights) <= 1e-10


REFUSED: dict[str, dict[str, Any]] = {
    "averaging": {"exchange": {"type": "averaging", "every": 2}},
    "gossip": {"exchange": {"type": "gossip"}},
    "sufficient factors": {"exchange": {"factors": "always"}},
    "shared trunk": {"exchange": {"type": "independent", "trunk": 1}},
}


@pytest.mark.parametrize("scheme", REFUSED)
def test_exchanges_that_complex_parameters_cannot_have_are_refused_by_name(scheme: str) -> None:
    with pytest.raises(ConfigError, match=r"strategy\.exchange\.type: the parameter '\w+' is of complex numbers"):
        trained(network={"data": 2, **WHOLE}, **REFUSED[scheme])


def test_optimizers_and_servers_that_complex_parameters_cannot_have_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.optimizer\.type: .*complex numbers, for which yellowfin"):
        trained(network=WHOLE, optimizer={"type": "yellowfin", "lr": 1.0})
    with pytest.raises(TrainingError, match=r"real numbers, and 'weight' is torch\.complex128"):
        train_central(Operator, central_settings(1, steps=2), tmp_path)
    with pytest.raises(TrainingError, match=r"must be of one dtype.*shard the gradients only"):
        trained(network={"data": 2, **WHOLE}, exchange={"shard": "parameters"})


class Rotated(nn.Module):
    """A model of complex numbers alone."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 70, dtype=torch.cfloat)
        self.second = nn.Linear(70, 16, dtype=torch.cfloat)

    def forward(self, x: Tensor) -> Tensor:
        turned = torch.view_as_real(self.first(x.to(self.first.weight.dtype)))
        return self.second(torch.view_as_complex(turned.tanh())).real


class Turns(Operator):
    def build_model(self) -> nn.Module:
        return Rotated()


def test_complex_parameters_alone_are_sharded_as_others() -> None:
    right = train_plainly(Turns(), OPTIMIZERS["adam"][1], batch_size=8, steps=STEPS)
    settings = layout_settings(
        {"data": 2, **WHOLE}, {"shard": "parameters"}, batch_size=8, steps=STEPS, optimizer=OPTIMIZERS["adam"][0]
    )
    assert apart(train_laid_out(Turns, settings).weights, right.weights) <= 1e-10


@pytest.mark.parametrize("precision", ["float32", "float64"])
@pytest.mark.parametrize("layout", ["one", "ZeRO-2"])
def test_a_run_resumes_from_complex_numbers_to_the_same_bits(layout: str, precision: str, tmp_path: Path) -> None:
    own = {**LAYOUTS[layout], "optimizer": OPTIMIZERS["adam"][0], "precision": precision, "average": {"type": "ema"}}
    whole = trained(**own)
    trained(**own, steps=2, files=lambda: CheckpointWriter(str(tmp_path), keep=2))
    found, _ = latest_good(str(tmp_path))
    assert found is not None
    assert found.step == 2
    assert same_bits(trained(**own, load=lambda: Loaded(found)).weights, whole.weights)
    assert whole.weights["weight"].dtype == {"float32": torch.complex64, "float64": torch.complex128}[precision]
