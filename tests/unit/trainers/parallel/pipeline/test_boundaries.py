"""Values that cross from stage to stage, and random draws of stages, are those of one process."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.trainers.core import rng
from support.pipelines import (
    Stage,
    mlp,
    one_process,
    pipelined,
    points,
    same_gradients,
    share_of,
)

torch.set_num_threads(1)

SCHEDULES = ["naive", "gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zbv", "dual_pipe_v"]
STAGES = {"interleaved_1f1b": 2, "zbv": 2, "dual_pipe_v": 2}
CLOSE: Any = {"atol": 1e-12, "rtol": 1e-12}


class Noise(nn.Module):
    """Dropout whose generator is its thread's own: threads that share torch's would disturb each other."""

    draws_random = True

    def __init__(self, generators: threading.local) -> None:
        super().__init__()
        self.generators = generators

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = torch.empty_like(x).bernoulli_(0.5, generator=self.generators.own)
        return x * kept * 2

    def __deepcopy__(self, _memo: Any) -> Noise:
        return Noise(self.generators)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_dropout_in_any_stage_draws_what_one_process_would(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generators = threading.local()

    def seed(value: int, _device: torch.device) -> None:
        if not hasattr(generators, "own"):  # a thread's first call
            generators.own = torch.Generator()
        generators.own.manual_seed(value)

    monkeypatch.setattr(rng, "_seed", seed)
    layers = [layer for _ in range(5) for layer in (nn.Linear(5, 5), Noise(generators))]
    model, shares = nn.Sequential(*layers).double(), [share_of([2, 2, 1, 1], points(5))] * 2
    plain = one_process(model, shares, seed=3)
    results = pipelined(model, shares, schedule, 2, STAGES.get(schedule, 1), seed=3)
    assert results[0].losses == plain.losses or results[1].losses == plain.losses
    assert same_gradients(results, plain)
    assert plain.losses[0] != plain.losses[1], "each step draws anew"
    assert plain.losses != one_process(model, shares, seed=4).losses


def test_modules_of_torch_draw_what_one_process_would() -> None:
    # By this schedule one thread at a time draws from the generator that all share.
    model = nn.Sequential(
        nn.Linear(5, 5), nn.Dropout(0.4), nn.Tanh(), nn.Linear(5, 5), nn.Dropout(0.4), nn.Linear(5, 5)
    )
    shares = [share_of([2, 2, 1], points(5))] * 2
    plain = one_process(model.double(), shares)
    assert same_gradients(pipelined(model.double(), shares, "naive", 3), plain)


def test_layers_that_work_in_place_may_begin_a_stage() -> None:
    layers = [nn.Linear(5, 5), nn.ReLU(inplace=True), nn.Linear(5, 5), nn.ReLU(inplace=True), nn.Linear(5, 5)]
    model, shares = nn.Sequential(*layers).double(), [share_of([2, 2, 1], points(5))]
    plain = one_process(model, shares)

    def cut(model: Any, _num: int) -> dict[int, nn.Module]:
        named = list(model.named_children())
        bounds = [(0, 1), (1, 3), (3, 5)]
        return {k: Stage(OrderedDict(named[a:b])) for k, (a, b) in enumerate(bounds)}

    assert same_gradients(pipelined(model, shares, "1f1b", 3, cut=cut), plain)


class Tokens:
    """A task that predicts a token; the loss wants integers."""

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch["targets"])

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"accuracy": (outputs.argmax(1) == batch["targets"]).double().mean()}


def tokens(num_samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randint(7, (num_samples,), generator=generator) for name in ("inputs", "targets")}


class Begin(nn.Module):
    """A first stage that gives the tokens themselves, a mask and a vector each: only the last has a gradient."""

    def __init__(self, embedding: nn.Module) -> None:
        super().__init__()
        self.add_module("0", embedding)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return x, x > 2, self.get_submodule("0")(x)


class Middle(nn.Module):
    """A middle stage that lets the integers through."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.add_module("1", layer)

    def forward(self, x: Tensor, mask: Tensor, vectors: Tensor) -> tuple[Tensor, ...]:
        return x, mask, self.get_submodule("1")(vectors)


class End(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.add_module("2", layer)

    def forward(self, x: Tensor, mask: Tensor, vectors: Tensor) -> tuple[Tensor, ...]:
        return (self.get_submodule("2")(vectors * mask.unsqueeze(1)) + x.unsqueeze(1),)


class Masked(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self[2](self[1](self[0](x)) * (x > 2).unsqueeze(1)) + x.unsqueeze(1)
        return outputs


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_integers_and_masks_cross_stages_and_only_what_needs_a_gradient_gets_one(schedule: str) -> None:
    torch.manual_seed(0)
    model = Masked(nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7)).double()
    shares = [share_of([3, 2, 2], tokens)]
    plain = one_process(model, shares, Tokens())

    def cut(model: Any, _num: int) -> dict[int, nn.Module]:
        return {0: Begin(model[0]), 1: Middle(model[1]), 2: End(model[2])}

    results = pipelined(model, shares, schedule, 3, task=Tokens(), cut=cut)
    assert same_gradients(results, plain)
    assert [result.metrics for result in results if result.metrics] == [plain.metrics]
    forward = 7 * (8 + 1 + 5 * 8)
    by_link = results[1].network.usage().bytes_by_link
    assert by_link["stage 1 -> stage 0"] == 7 * 5 * 8
    # Once for training, once for validation.
    assert by_link["stage 1 -> stage 2"] == 2 * forward


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "zbv"])
def test_nothing_is_sent_back_to_frozen_stages(schedule: str) -> None:
    model, shares = mlp(8), [share_of([2, 2, 1], points(5))]
    for layer in list(model)[:4]:
        layer.requires_grad_(False)
    plain = one_process(model, shares)
    results = pipelined(model, shares, schedule, 2, STAGES.get(schedule, 1))
    assert same_gradients(results, plain)
    assert plain.gradients[0]["0.weight"] is None
    sent = [link for result in results for link in result.network.usage().bytes_by_link]
    assert "stage 1 -> stage 0" not in sent


def test_tensors_arrive_with_the_strides_they_were_sent_with() -> None:
    seen: dict[int, list[tuple[int, ...]]] = {}

    class Look(nn.Module):
        def __init__(self, place: int) -> None:
            super().__init__()
            self.place = place

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                seen.setdefault(self.place, []).append(x.stride())
                if x.requires_grad:
                    x.register_hook(lambda gradient: seen[-self.place].append(gradient.stride()))
            return x

    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 4, 3), Look(1), Look(2), nn.Conv2d(4, 3, 3), nn.Flatten(), nn.Linear(48, 5)]
    model = nn.Sequential(*layers).double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def images(num_samples: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(num_samples, 3, 8, 8, generator=generator, dtype=torch.float64)
        targets = torch.randn(num_samples, 5, generator=generator, dtype=torch.float64)
        return {"inputs": inputs.contiguous(memory_format=torch.channels_last), "targets": targets}

    def cut(model: Any, _num: int) -> dict[int, nn.Module]:
        named = list(model.named_children())
        return {0: Stage(OrderedDict(named[:2])), 1: Stage(OrderedDict(named[2:]))}

    seen.update({-1: [], -2: []})
    shares = [share_of([2, 2], images)]
    plain = one_process(model, shares)
    in_one = {place: list(strides) for place, strides in seen.items()}
    for strides in seen.values():
        strides.clear()
    results = pipelined(model, shares, "1f1b", 2, cut=cut)
    assert seen == in_one
    assert in_one[2][0][1] == 1, "channels are last"
    assert same_gradients(results, plain)
