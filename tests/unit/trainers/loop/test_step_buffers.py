"""Buffers of replicas in step: the same after each step as in one process, and after a loss as without it."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.loop.replica import Replica
from support.layouts import layout_settings, train_laid_out
from support.stateful import KINDS, WIDTH, Calls, RunningMean, task_of, trained, trained_with_a_loss, whole_state
from support.training import Rows, furthest, same_bits, train

SAME_ON_ALL = ("in_place", "assigned", "not_saved", "late", "calls", "spectral_norm")
"""Kinds of modules that every worker changes in the same way."""
OF_A_SHARE = ("grows", "resized", "running_mean", "running_mean_not_saved")
"""Kinds of modules whose state is a mean over the samples."""


def settings(data: int = 1, exchange: Any = None, **train: Any) -> ReplicaSettings:
    chosen = {"batch_size": 8, "steps": 7, "optimizer": {"type": "adam", "lr": 0.01}, **train}
    return layout_settings({"data": data, "microbatches": None}, exchange, **chosen)


def warnings_of(replica: Replica) -> list[str]:
    return [line["text"] for line in replica.recorder.since(-1) if line.get("event") == "warning"]


@pytest.mark.parametrize("kind", [*SAME_ON_ALL, *OF_A_SHARE])
def test_buffers_are_those_of_one_process_and_the_same_bits_on_every_replica(kind: str) -> None:
    task = task_of(kind, num_samples=37)  # the last batch has 5 samples, of which shares are unequal
    (single,) = trained(task, settings())
    replicas = trained(task, settings(3))
    for replica in replicas:
        assert furthest(whole_state(replica), whole_state(single)) <= 1e-12
        assert same_bits(whole_state(replica), whole_state(replicas[0]))
    assert len(warnings_of(replicas[0])) == (kind in OF_A_SHARE)


@pytest.mark.parametrize(
    ("kind", "lost"), [*((kind, 0) for kind in KINDS if kind != "quantised"), ("running_mean", 1), ("extra", 1)]
)
def test_a_run_that_loses_a_worker_has_the_bits_of_one_that_does_not(kind: str, lost: int) -> None:
    task, chosen = task_of(kind), settings(2, steps=4)
    expected = whole_state(trained(task, chosen)[0])
    for replica in trained_with_a_loss(task, chosen, lost=lost, at_step=3):
        assert same_bits(whole_state(replica), expected)


@pytest.mark.parametrize("kind", ["calls", "spectral_norm"])
@pytest.mark.parametrize("exchange", [{}, {"shard": "gradients"}, {"shard": "parameters"}])
def test_a_replica_without_samples_makes_its_pass(kind: str, exchange: Any) -> None:
    task = task_of(kind, num_samples=9)  # the second batch of each epoch has one sample
    (single,) = trained(task, settings(steps=6))
    replicas = trained(task, settings(3, exchange, steps=6))
    expected = dict(single.model.named_buffers())
    for replica in replicas:
        assert furthest(dict(replica.model.named_buffers()), expected) <= 1e-12


@pytest.mark.parametrize("kind", ["calls", "spectral_norm", "running_mean"])
def test_a_replica_of_a_pipeline_makes_its_pass_in_every_stage(kind: str) -> None:
    task = task_of(kind, num_samples=9)
    network = {"data": 2, "pipeline": 2, "microbatches": 1, "split": "equal"}
    (single,) = trained(task, settings(steps=4))
    replicas = trained(task, layout_settings(network, batch_size=8, steps=4, optimizer={"type": "adam", "lr": 0.01}))
    expected = dict(single.model.named_buffers())
    for replica in replicas:
        held = dict(replica.model.named_buffers())
        assert furthest(held, {name: expected[name] for name in held}) <= 1e-12 if held else True
    assert len({text for replica in replicas for text in warnings_of(replica)}) == (kind == "running_mean")


def test_batch_normalisation_in_one_stage_needs_every_replica_in_all() -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 1))

    network = {"data": 3, "pipeline": 2, "microbatches": 1, "split": "equal"}
    (single,) = trained(rows_of(build, 20), settings(steps=4, optimizer=SGD, batch_size=9))
    chosen = layout_settings(network, batch_size=9, steps=4, optimizer=SGD)
    found = train_laid_out(lambda: rows_of(build, 20), chosen).weights
    assert found.keys() == single.model.state_dict().keys()
    assert furthest(found, dict(single.model.state_dict())) <= 1e-12


def test_a_pass_without_samples_counts_nowhere_else() -> None:
    task = task_of("running_mean", num_samples=9)
    (single,) = trained(task, settings(steps=6))
    for replica in trained(task, settings(3, steps=6)):
        assert furthest(whole_state(replica), whole_state(single)) <= 1e-12


@pytest.mark.parametrize("accumulate", [1, 2])
def test_counts_are_those_of_one_process_with_micro_batches(accumulate: int) -> None:
    for data in (1, 2):
        replicas = trained(task_of("calls"), settings(data, accumulate=accumulate, steps=3))
        assert [int(replica.model[0].count) for replica in replicas] == [3 * accumulate] * data  # type: ignore[index]


def test_the_first_replicas_buffers_are_taken_where_they_are_broadcast() -> None:
    task = task_of("running_mean")
    first, second = trained(task, settings(2, steps=1, buffers="broadcast"))
    assert same_bits(whole_state(first), whole_state(second))
    batch = first.stream("train")
    with batch.epoch(0) as shares:
        seen = next(iter(shares)).micro_batches[0].batch["inputs"]
    torch.testing.assert_close(first.model[0].mean, 0.1 * seen.mean(0))  # type: ignore[index]
    assert warnings_of(first) == []


def test_a_warning_names_buffers_that_differ_once_and_says_what_to_do() -> None:
    [text] = warnings_of(trained(task_of("running_mean"), settings(2))[0])
    assert "the buffers '0.mean' depend on the samples of a worker's share" in text
    assert "train.buffers: average" in text
    assert warnings_of(trained(task_of("running_mean"), settings(2, buffers="average"))[0]) == []


def test_buffers_that_differ_end_the_run_where_that_is_wanted() -> None:
    with pytest.raises(TrainingError, match=r"The buffers '0\.mean' .* train\.buffers: error ends the run"):
        trained(task_of("running_mean"), settings(2, buffers="error"))
    assert warnings_of(trained(task_of("in_place"), settings(2, buffers="error"))[0]) == []


class Queue(nn.Module):
    """The last samples, whose number depends on the share."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.kept = torch.cat([self.kept, x.detach()])[-12:]
        return x


class Branch(nn.Module):
    """A buffer that only a replica with a certain sample registers."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and float(x[:, 0].max()) > 2.0:
            self.register_buffer("largest", x.detach().max(0).values)
        return x


class Momentum(nn.Module):
    """A layer and a slow copy of it, a parameter without gradients that the forward pass moves."""

    def __init__(self) -> None:
        super().__init__()
        self.fast, self.slow = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            for slow, fast in zip(self.slow.parameters(), self.fast.parameters(), strict=True):
                slow.data = 0.9 * slow.data + 0.1 * fast.data
        return self.fast(x) + self.slow(x)


class Codebook(nn.Module):
    """A parameter without gradients that follows the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        codes = self.codes.clone()
        if self.training:
            self.codes.data.lerp_(x.detach().mean(0), 0.1)
        return x - codes


class Replaced(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.codes = nn.Parameter(self.codes.detach() + 1)
        return x - self.codes.detach()


class CountsAlways(Calls):
    """A count of the passes of validation as well."""

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return x * (1 + 0.01 * self.count)


class Seen(RunningMean):
    """A running mean that follows the samples of a validation, too."""

    def forward(self, x: Tensor) -> Tensor:
        centred = x - self.mean
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return centred


def rows_with(module: type[nn.Module], num_samples: int = 40) -> Rows:
    inputs = np.random.default_rng(7).normal(size=(num_samples, WIDTH)) + 1.0
    return Rows(inputs, inputs.sum(1), lambda: nn.Sequential(module(), nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, 1)))


@pytest.mark.parametrize("module", [Queue, Branch])
def test_buffers_of_different_shapes_become_those_of_the_first_replica_that_has_them(module: type[nn.Module]) -> None:
    replicas = trained(rows_with(module, num_samples=37), settings(3))
    assert len(list(replicas[0].model.buffers())) == 1
    assert all(same_bits(whole_state(replica), whole_state(replicas[0])) for replica in replicas)


@pytest.mark.parametrize("module", [Momentum, Codebook])
def test_parameters_without_gradients_that_a_pass_changes_are_like_buffers(module: type[nn.Module]) -> None:
    task = rows_with(module)
    (single,) = trained(task, settings())
    replicas = trained(task, settings(2))
    for replica in replicas:
        assert furthest(whole_state(replica), whole_state(single)) <= 1e-12
        assert same_bits(whole_state(replica), whole_state(replicas[0]))
    for replica in trained_with_a_loss(task, settings(2), lost=0, at_step=6):
        assert same_bits(whole_state(replica), whole_state(replicas[0]))


def test_a_parameter_that_is_replaced_is_refused_where_others_cannot_know_it() -> None:
    with pytest.raises(TrainingError, match=r"a new tensor to the parameter 'codes' of a Replaced.*register_buffer"):
        trained(rows_with(Replaced), settings(2))
    trained(rows_with(Replaced), settings(1))


@pytest.mark.parametrize("module", [CountsAlways, Seen])
def test_what_validation_changes_is_that_of_one_process(module: type[nn.Module]) -> None:
    task, chosen = rows_with(module, num_samples=30), {"batch_size": 12, "validate_every_steps": 2}
    (single,) = trained(task, settings(**chosen))
    for replica in trained(task, settings(3, **chosen)):
        assert furthest(whole_state(replica), whole_state(single)) <= 1e-12


@pytest.mark.parametrize("kind", ["weight_norm", "in_place"])
def test_nothing_is_sent_for_a_model_whose_buffers_agree(kind: str) -> None:
    task, calls = task_of(kind), {}
    for steps in (2, 5):
        calls[steps] = [
            name for name, _ in train(task, 2, batch_size=8, steps=steps, validate_every_steps=steps)[0].calls
        ]
    assert calls[5].count("all_reduce") == calls[2].count("all_reduce") + 3  # one a step
    assert calls[5].count("all_gather") == calls[2].count("all_gather")


def test_replicas_with_weights_of_their_own_refuse_a_buffer_that_grows() -> None:
    averaging = {"type": "averaging", "every": 2}
    with pytest.raises(TrainingError, match=r"The buffer '0\.kept' has another shape now"):
        trained(task_of("grows"), settings(2, averaging))
    assigned, in_place = (trained(task_of(kind), settings(2, averaging)) for kind in ("assigned", "in_place"))
    for one, other in zip(assigned, in_place, strict=True):
        assert furthest(whole_state(one), whole_state(other)) <= 1e-15


def test_a_scheme_that_does_not_agree_in_each_step_refuses_the_setting() -> None:
    for exchange in ({"type": "averaging", "every": 2}, {"type": "parameter_server"}):
        with pytest.raises(ConfigError, match=r"train\.buffers: .*use allreduce, or take it out"):
            settings(2, exchange, buffers="broadcast")


class Seen(nn.Module):
    """The largest number seen, as extra state."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0.0

    def get_extra_state(self) -> dict[str, float]:
        return {"largest": self.largest}

    def set_extra_state(self, state: dict[str, float]) -> None:
        self.largest = state["largest"]

    def forward(self, x: Tensor) -> Tensor:
        self.largest = max(self.largest, float(x.max())) if self.training else self.largest
        return x


def test_extra_state_of_samples_is_the_first_replicas_with_a_warning_or_ends_the_run() -> None:
    task = rows_of(lambda: nn.Sequential(Seen(), nn.Linear(WIDTH, 1)))
    replicas = trained(task, settings(2, steps=3))
    first, second = (replica.model[0].largest for replica in replicas)  # type: ignore[index]
    assert first == second > 0
    [text] = warnings_of(replicas[0])
    assert "'extra state'" in text
    with pytest.raises(TrainingError, match="The buffers 'extra state' depend on the samples"):
        trained(task, settings(2, buffers="error"))


def rows_of(build: Any, num_samples: int = 40) -> Rows:
    inputs = np.random.default_rng(0).normal(size=(num_samples, WIDTH)) + 1
    return Rows(inputs, inputs.sum(1), build)


class Renormalised(nn.Linear):
    """A layer that writes to its weights, as `nn.Embedding(max_norm=...)` does."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.div_(self.weight.norm(dim=1, keepdim=True))
        return super().forward(x)


LAYOUTS: dict[str, tuple[Any, Any]] = {
    "data": ({"data": 2, "microbatches": 1}, {}),
    "zero3": ({"data": 2, "microbatches": 1}, {"shard": "parameters"}),
    "pipeline": ({"pipeline": 2, "microbatches": 2, "split": "equal"}, {}),
    "tensor": ({"tensor": 2, "microbatches": 1}, {}),
}


def laid_out(layout: str, **train: Any) -> ReplicaSettings:
    return layout_settings(*LAYOUTS[layout], **{"batch_size": 8, "steps": 5, **train})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_forward_pass_that_writes_to_a_trained_parameter_needs_one_worker(layout: str) -> None:
    task = rows_of(lambda: nn.Sequential(Renormalised(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1)))
    with pytest.raises(TrainingError, match=r"changes its parameter '.*weight' itself"):
        trained(task, laid_out(layout))
    trained(task, settings(steps=2))


class Codebook(nn.Module):
    """A parameter without gradients that the passes from a certain one on change."""

    def __init__(self, first: int, *, by_samples: bool) -> None:
        super().__init__()
        self.first, self.by_samples, self.passes = first, by_samples, 0
        self.code = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        code = self.code.clone()
        if self.training and self.passes >= self.first:
            with torch.no_grad():
                self.code.mul_(0.9).add_(0.1 * x.mean(0) if self.by_samples else 0.03)
        return x * code


def test_a_parameter_without_gradients_that_moves_later_is_the_same_on_all_replicas() -> None:
    replicas = trained(rows_of(lambda: nn.Sequential(Codebook(3, by_samples=True), nn.Linear(WIDTH, 1))), settings(2))
    assert same_bits(whole_state(replicas[0]), whole_state(replicas[1]))
    assert len(warnings_of(replicas[0])) == 1


@pytest.mark.parametrize("layout", ["data", "pipeline", "tensor"])
def test_passes_before_the_first_step_do_not_move_a_parameter_without_gradients(layout: str) -> None:
    class Plain(Codebook):
        def forward(self, x: Tensor) -> Tensor:
            code = self.code.clone()
            if self.training:
                with torch.no_grad():
                    self.code.mul_(0.9).add_(0.03)
            return x * code

    def build() -> nn.Module:
        return nn.Sequential(Plain(0, by_samples=False), nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))

    micro_batches = 2 if layout == "pipeline" else 1
    (single,) = trained(rows_of(build), settings(accumulate=micro_batches, steps=5, optimizer=SGD))
    found = train_laid_out(lambda: rows_of(build), laid_out(layout, optimizer=SGD)).weights
    assert furthest(found, dict(single.model.state_dict())) <= 1e-12


class Assigned(nn.Module):
    """A parameter without gradients that each pass changes by its `data`, as torch does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        code = self.code.clone()
        if self.training:
            self.code.data.mul_(0.9).add_(0.03)
        return x * code


@pytest.mark.parametrize("part", [partial(Codebook, 0, by_samples=True), Assigned], ids=["in place", "its data"])
@pytest.mark.parametrize(
    ("network", "exchange", "key"),
    [
        ({"data": 2, "microbatches": 1}, {"shard": "parameters"}, "exchange.shard"),
        ({"data": 2, "pipeline": 2, "schedule": "pipedream", "microbatches": 2}, {}, "network.schedule"),
    ],
    ids=["ZeRO-3", "pipedream"],
)
def test_a_parameter_without_gradients_that_the_pass_moves_is_refused_where_its_moves_would_be_lost(
    network: dict[str, Any], exchange: dict[str, Any], key: str, part: Any
) -> None:
    def build() -> nn.Module:
        return nn.Sequential(part(), nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, 1))

    with pytest.raises(ConfigError, match=rf"strategy\.{key}: .* changes a parameter that is not trained"):
        train_laid_out(lambda: rows_of(build), layout_settings(network, exchange, batch_size=8, steps=2))


SGD = {"type": "sgd", "lr": 0.01}


class Masked(Rows):
    """A loss that is NaN for a sample of weight 0 alone."""

    def weight(self, batch: Any) -> float:
        return float((batch["inputs"][:, 0] > MASKED).sum())

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        weights = (batch["inputs"][:, 0] > MASKED).double()
        return (weights * (outputs.reshape(-1) - batch["targets"]).square()).sum() / weights.sum()


MASKED = -5


@pytest.mark.parametrize("exchange", [{}, {"shard": "parameters"}])
def test_the_pass_of_a_replica_without_samples_may_have_a_loss_that_is_not_a_number(exchange: Any) -> None:
    inputs = np.random.default_rng(0).normal(size=(17, WIDTH))
    inputs[0, 0] = MASKED - 1  # the sample of passes that count nowhere

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))

    def task() -> Rows:
        return Masked(inputs, inputs.sum(1), build)

    (single,) = trained(task(), settings(steps=6, drop_last=False, optimizer=SGD, batch_size=15))
    found = train_laid_out(task, settings(3, exchange, steps=6, optimizer=SGD, batch_size=15)).weights
    assert furthest(found, dict(single.model.state_dict())) <= 1e-12


class Forces(nn.Module):
    """A model that takes gradients in its forward pass, and has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, 1)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        energy = self.inside(x).square().sum() * self.scale
        return torch.autograd.grad(energy, x, create_graph=self.training)[0].sum(1)


def test_a_replica_without_samples_makes_its_pass_where_the_model_takes_gradients() -> None:
    (single,) = trained(rows_of(Forces, num_samples=9), settings(steps=4))
    found = trained(rows_of(Forces, num_samples=9), settings(3, steps=4))[0]
    assert furthest(whole_state(found), whole_state(single)) <= 1e-12
