"""Losses that are divided by another number than that of the samples, losses between samples, and their check."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.platform.data.tensors import to_tensor
from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.platform.run.checkpoint import CheckpointWriter, list_checkpoints
from orchestray.trainers.core.rng import building
from orchestray.trainers.loop.checkpoint_source import Loaded
from support.layouts import LaidOut, layout_settings, train_laid_out
from support.training import Rows, digits, stream_of, train

LENGTH, CLASSES, STEPS = 6, 5, 5
PIPEDREAM = {"pipeline": 2, "schedule": "pipedream", "microbatches": 2, "split": "equal"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "data 2": {"network": {"data": 2}},
    "data 3, accumulate 4": {"network": {"data": 3}, "accumulate": 4},
    "pipeline 2": {"network": {"pipeline": 2}},
    "tensor 2": {"network": {"tensor": 2}},
    "ZeRO-2": {"network": {"data": 2}, "exchange": {"shard": "gradients"}},
    "ZeRO-3": {"network": {"data": 2}, "exchange": {"shard": "parameters"}, "accumulate": 2},
}


class Sequences:
    """A task with a label a position, most of which are masked, and all of every third sequence."""

    def __init__(self, *, is_normalised: bool = False) -> None:
        rng = np.random.default_rng(5)
        inputs, labels = rng.normal(size=(52, LENGTH * 4)), rng.integers(0, CLASSES, size=(52, LENGTH))
        labels[np.arange(LENGTH) >= rng.integers(1, LENGTH + 1, size=(52, 1))] = -100
        labels[::3] = -100
        columns = {"inputs": list(inputs), "targets": list(labels)}
        self._table = pa.table({name: pa.array(value) for name, value in columns.items()})
        self._is_normalised = is_normalised

    def build_model(self) -> nn.Module:
        middle: nn.Module = nn.BatchNorm1d(LENGTH) if self._is_normalised else nn.Tanh()
        first = nn.Sequential(nn.Unflatten(1, (LENGTH, 4)), nn.Linear(4, 16), nn.Tanh())
        return nn.Sequential(*first, middle, nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def dataset(self, split: str) -> pa.Table:
        return self._table

    def to_batch(self, columns: pa.Table) -> dict[str, Tensor]:
        return {name: to_tensor(columns[name]) for name in ("inputs", "targets")}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(outputs.flatten(0, 1), batch["targets"].flatten(), ignore_index=-100)

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return (batch["targets"] != -100).sum()

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {}


class Unweighted(Sequences):
    """The same task without a word on its weight, and without sequences that have no loss."""

    weight = None  # type: ignore[assignment]

    def to_batch(self, columns: pa.Table) -> dict[str, Tensor]:
        batch = super().to_batch(columns)
        return {**batch, "targets": torch.where(batch["targets"].max(1).values[:, None] < 0, 1, batch["targets"])}


class Weighted(Sequences):
    """A task whose classes weigh differently, by the last valid position of a sequence."""

    WEIGHTS = torch.tensor([0.1, 3.0, 1.0, 7.0, 0.0], dtype=torch.float64)

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return functional.cross_entropy(outputs[:, 0], self._labels(batch), weight=self.WEIGHTS)

    def weight(self, batch: dict[str, Tensor]) -> Tensor:
        return self.WEIGHTS[self._labels(batch)].sum()

    def _labels(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["targets"].max(1).values.clamp(min=0)


class Contrastive(Sequences):
    """A task that compares the outputs of all samples of a batch with each other."""

    weight = None  # type: ignore[assignment]

    def loss(self, outputs: Any, batch: dict[str, Tensor], *, gather: Any) -> Tensor:  # type: ignore[override]
        found, labels = gather((outputs.flatten(1), batch["targets"].max(1).values))
        alike = functional.normalize(found) @ functional.normalize(found).T
        return functional.binary_cross_entropy_with_logits(alike, (labels[:, None] == labels).double())


class Annealed(Sequences):
    """A task whose loss depends on the step."""

    weight = None  # type: ignore[assignment]

    def loss(self, outputs: Tensor, batch: dict[str, Tensor], step: int = -1) -> Tensor:  # type: ignore[override]
        return outputs.square().mean() * step + outputs.mean()


class Vanishing(Annealed):
    """A task whose loss is divided by the step, and notes each."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def loss(self, outputs: Tensor, batch: dict[str, Tensor], step: int = -1) -> Tensor:
        self.steps.append(step)
        return outputs.square().mean() * (1.0 / step)


class Noisy(Sequences):
    """A task whose loss draws random numbers."""

    weight = None  # type: ignore[assignment]

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (outputs - torch.randn_like(outputs)).square().mean()


def plain(task: Any, **asked: Any) -> LaidOut:
    """Train by plain PyTorch on the same samples in the same order."""
    settings = layout_settings({"microbatches": None}, steps=STEPS)
    with building(settings.seed):
        model = task.build_model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses: list[float] = []
    stream = stream_of(task, settings)("train", 0)
    epoch = 0
    while len(losses) < STEPS:
        with stream.epoch(epoch) as shares:
            for share in shares:
                if len(losses) == STEPS:
                    break
                batch = {k: v.double() if v.is_floating_point() else v for k, v in share.micro_batches[0].batch.items()}
                given = {"step": len(losses) + 1} if "step" in asked else asked
                loss = task.loss(model(batch["inputs"]), batch, **given)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        epoch += 1
    return LaidOut(losses, {name: value.detach() for name, value in model.state_dict().items()}, None)  # type: ignore[arg-type]


def trained(task: Any, *, network: Any = None, exchange: Any = None, **config: Any) -> LaidOut:
    settings = layout_settings({"microbatches": None, **(network or {})}, exchange, steps=STEPS, **config)
    return train_laid_out(lambda: task, settings)


def is_that_of(found: LaidOut, right: LaidOut) -> bool:
    assert found.losses == pytest.approx(right.losses, rel=1e-10)
    assert found.weights.keys() == right.weights.keys()
    return all(torch.allclose(found.weights[k], v, rtol=1e-10, atol=1e-12) for k, v in right.weights.items())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_loss_over_valid_tokens_is_that_of_a_single_process(layout: str) -> None:
    assert is_that_of(trained(Sequences(), **LAYOUTS[layout]), plain(Sequences()))


@pytest.mark.parametrize("layout", ["data 2", "data 3, accumulate 4"])
def test_a_loss_over_weighted_classes_is_that_of_a_single_process(layout: str) -> None:
    assert is_that_of(trained(Weighted(), **LAYOUTS[layout]), plain(Weighted()))


def test_a_loss_over_valid_tokens_is_cut_right_in_a_stream_of_batches() -> None:
    one, two = ({**PIPEDREAM, "data": data} for data in (1, 2))
    assert is_that_of(trained(Sequences(), network=two), trained(Sequences(), network=one))


def test_samples_without_weight_count_in_the_statistics_of_batch_normalisation() -> None:
    found = trained(Sequences(is_normalised=True), **LAYOUTS["data 3, accumulate 4"])
    right = trained(Sequences(is_normalised=True), accumulate=4)
    assert is_that_of(found, right)
    assert found.weights["3.num_batches_tracked"] == 4 * STEPS


@pytest.mark.parametrize("layout", ["data 2", "ZeRO-2", "tensor 2"])
def test_a_loss_between_samples_is_that_of_a_single_process(layout: str) -> None:
    assert is_that_of(trained(Contrastive(), **LAYOUTS[layout]), plain(Contrastive(), gather=lambda values: values))


def test_a_loss_between_samples_on_shares_of_zero_3_is_that_of_a_single_process() -> None:
    layout = {"network": {"data": 3}, "exchange": {"shard": "parameters"}}
    assert is_that_of(trained(Contrastive(), **layout), plain(Contrastive(), gather=lambda values: values))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"network": {"data": 2}, "accumulate": 2}, "train.accumulate"),
        ({"network": {"pipeline": 2}}, "strategy.network.pipeline"),
        (
            {"network": {"data": 2}, "exchange": {"type": "averaging", "every": 2}},
            "strategy.exchange.type must be allreduce",
        ),
        (
            {
                "network": {"data": 3},
                "batch_size": 24,
                "batch_schedule": {"type": "steps", "every_steps": 2, "max_batch_size": 48},
            },
            r"take train\.batch_schedule out",
        ),
        ({"network": {"data": 3}, "batch_size": 25}, r"last batch of the train data has 2.*, or set train\.drop_last"),
        ({"network": {"data": 3}, "batch_size": 2}, r"last batch of the train data has 2"),
        ({"network": {"data": 3}, "batch_size": 2, "drop_last": True}, r"train data has 2; choose another train\.\w+$"),
        (
            {"network": {"data": 3}, "batch_size": 25, "drop_last": True},
            r"last batch of the validation data has 2; choose another train\.batch_size$",
        ),
    ],
)
def test_a_loss_between_samples_is_refused_where_replicas_do_not_see_a_batch_together(config: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        trained(Contrastive(), **config)


def test_a_loss_between_samples_is_refused_if_it_has_a_weight_as_well() -> None:
    task = Contrastive()
    task.weight = lambda batch: torch.tensor(1.0)  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"gathers outputs .*take weight\(batch\) out of the task"):
        trained(task, network={"data": 2})
    assert len(trained(task).losses) == STEPS


def test_a_loss_between_samples_is_refused_where_an_aggregation_chooses_among_gradients() -> None:
    settings = layout_settings({"data": 4, "microbatches": None}, steps=STEPS)
    chosen = replace(settings, aggregation={"type": "median", "byzantine": 1})
    with pytest.raises(ConfigError, match=r"strategy\.aggregation: median chooses .* a loss that gathers"):
        train_laid_out(Contrastive, chosen)


@pytest.mark.parametrize(
    "config",
    [
        {"network": {"data": 2}},
        {"accumulate": 2},
        {"network": {"pipeline": 2}},
        {"network": PIPEDREAM},
        {"network": {"data": 2}, "accumulate": 4, "batch_size": 8},
        {"network": {"data": 4}, "batch_size": 4},
        {"network": {"pipeline": 2, "microbatches": 4}, "batch_size": 4},
        {"network": {"data": 2}, "exchange": {"shard": "parameters"}, "accumulate": 4, "batch_size": 8},
    ],
)
def test_a_loss_that_is_no_mean_over_samples_is_refused_at_the_first_step(config: Any) -> None:
    with pytest.raises(TrainingError, match=r"not a mean over samples.*weight\(batch\).*between_samples"):
        trained(Unweighted(), **config)


class HardestHalf(Rows):
    """A task whose loss is the mean over the samples of the largest losses."""

    def loss(self, outputs: Tensor, batch: dict[str, Any]) -> Tensor:
        losses = (outputs.flatten() - batch["targets"]).abs()
        return losses.topk(max(1, len(losses) // 2)).values.mean()


@pytest.mark.parametrize("seed", [0, 3])
def test_a_mean_over_the_hardest_samples_is_refused_also_where_two_halves_have_as_many_of_them(seed: int) -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(8, 2)), rng.normal(size=8)
    settings = layout_settings({"microbatches": None}, accumulate=2, batch_size=8, seed=seed)
    with pytest.raises(TrainingError, match="not a mean over samples"):
        train_laid_out(lambda: HardestHalf(*rows, lambda: nn.Linear(2, 1)), settings)


class NormalisedByTheBatch(Unweighted):
    """A task whose loss is a mean, and whose model normalises by the batch at all times."""

    def build_model(self) -> nn.Module:
        layer = nn.BatchNorm1d(LENGTH, track_running_stats=False)
        return nn.Sequential(nn.Unflatten(1, (LENGTH, 4)), layer, nn.Linear(4, CLASSES))

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return outputs.pow(2).mean()


@pytest.mark.parametrize("batch_norm", ["local", "synchronized"])
def test_batch_normalisation_without_running_statistics_is_named_where_it_makes_losses_differ(batch_norm: str) -> None:
    with pytest.raises(TrainingError, match=r"no running statistics \(1\): take track_running_stats=False out of it"):
        trained(NormalisedByTheBatch(), network={"data": 2}, batch_norm=batch_norm)


class ByHand(nn.Module):
    """A batch normalisation in the model's own code, with or without dropout beside it."""

    def __init__(self, *, drops: bool = False) -> None:
        super().__init__()
        self.layers, self.last = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5 * drops)), nn.Linear(8, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.layers(inputs)
        if self.training:
            hidden = (hidden - hidden.mean(0)) / (hidden.var(0, correction=0) + 1e-5).sqrt()
        return self.last(hidden.tanh())


def by_hand(network: dict[str, Any], *, drops: bool = False, **keys: Any) -> LaidOut:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(48, 6)), rng.integers(0, 5, size=48)
    settings = layout_settings({"microbatches": None, **network}, **keys)
    return train_laid_out(lambda: Rows(*rows, lambda: ByHand(drops=drops)), settings)


@pytest.mark.parametrize(
    "keys",
    [
        {"network": {"data": 2}},
        {"network": {"data": 2}, "drops": True},
        {"network": {"data": 2}, "exchange": {"shard": "parameters"}, "drops": True},
        {"network": {}, "accumulate": 2},
    ],
)
def test_samples_that_depend_on_each_other_in_training_alone_are_refused_where_batches_are_cut(keys: Any) -> None:
    with pytest.raises(TrainingError, match=r"the loss of a sample depends on those beside it.*set train\.batch_norm"):
        by_hand(**keys)


def test_a_model_that_normalises_by_its_share_trains_where_the_user_says_so_or_nothing_is_cut() -> None:
    assert len(by_hand({"data": 2}, batch_norm="local").losses) == len(by_hand({}).losses) == 3
    assert len(by_hand({"data": 2}, loss_is="between_samples").losses) == 3


class GoingBack(Rows):
    def loss(self, outputs: Tensor, batch: dict[str, Any]) -> Tensor:
        loss = super().loss(outputs, batch)
        loss.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        return loss


class InFloat32(Rows):
    def loss(self, outputs: Tensor, batch: dict[str, Any]) -> Tensor:
        return super().loss(outputs.float(), batch)


def of_rows(kind: type[Rows], network: dict[str, Any]) -> LaidOut:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(48, 6)), rng.integers(0, 5, size=48)
    return train_laid_out(lambda: kind(*rows, lambda: nn.Linear(6, 5)), layout_settings(network))


def test_gradients_that_a_loss_leaves_by_itself_are_refused_where_workers_share_a_batch() -> None:
    with pytest.raises(TrainingError, match=r"calls backward\(\).* use torch\.autograd\.grad"):
        of_rows(GoingBack, {"data": 2, "microbatches": None})


def test_a_loss_in_float32_is_a_mean_over_samples_in_a_run_of_float64_too() -> None:
    assert len(of_rows(InFloat32, {"data": 2, "microbatches": None}).losses) == 3


class InLowPrecision(Rows):
    """A task whose model has weights of bfloat16, and so a loss in it."""

    def build_model(self) -> nn.Module:
        return super().build_model().bfloat16()

    def to_batch(self, columns: pa.Table) -> dict[str, Tensor]:
        return {name: values.bfloat16() for name, values in super().to_batch(columns).items()}


def test_a_loss_of_low_precision_is_a_mean_over_samples_in_a_run_of_float32() -> None:
    rng = np.random.default_rng(0)
    task = InLowPrecision(rng.normal(size=(96, 4)), rng.normal(size=96), lambda: nn.Linear(4, 1))
    settings = layout_settings({"data": 2, "microbatches": None}, precision="float32", steps=1)
    assert len(train_laid_out(lambda: task, settings).losses) == 1


class ByFrequency(Sequences):
    """A task whose model divides gradients by how often a row is used in a batch."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(7, CLASSES, scale_grad_by_freq=True), nn.Linear(CLASSES, CLASSES))

    def to_batch(self, columns: pa.Table) -> dict[str, Tensor]:
        batch = super().to_batch(columns)
        return batch | {"inputs": batch["targets"].clamp(min=0)}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return outputs.pow(2).mean()


@pytest.mark.parametrize("config", [{"network": {"data": 2}}, {"accumulate": 2}, {"network": {"pipeline": 2}}])
def test_gradients_that_are_divided_by_what_is_in_the_batch_are_refused_where_a_batch_is_cut(config: Any) -> None:
    with pytest.raises(TrainingError, match=r"layer '.*0' divides its gradients .*scale_grad_by_freq"):
        trained(ByFrequency(), **config)
    assert len(trained(ByFrequency()).losses) == STEPS


def test_a_loss_that_is_no_mean_is_refused_as_soon_as_a_resumed_run_cuts_batches(tmp_path: Path) -> None:
    alone = layout_settings({"microbatches": None}, steps=3)
    train_laid_out(Unweighted, alone, checkpoints=lambda: CheckpointWriter(str(tmp_path), keep=2))
    [found] = list_checkpoints(tmp_path)
    two = layout_settings({"data": 2, "microbatches": None}, steps=STEPS)
    with pytest.raises(TrainingError, match="not a mean over samples"):
        train_laid_out(Unweighted, two, load=lambda: Loaded(found))


def test_a_loss_that_is_no_mean_trains_where_the_user_says_so_or_nothing_is_cut() -> None:
    assert len(trained(Unweighted(), network={"data": 2}, loss_is="between_samples").losses) == STEPS
    assert is_that_of(trained(Unweighted()), plain(Unweighted()))


def test_a_loss_that_draws_random_numbers_is_not_taken_for_one_that_is_no_mean() -> None:
    assert len(trained(Noisy(), network={"data": 2}).losses) == STEPS


class Mixed(Unweighted):
    """A task whose batches to train on have other targets than those to validate on, which its metrics take alone."""

    def to_training_batch(self, columns: pa.Table, draws: Any) -> dict[str, Tensor]:
        batch = self.to_batch(columns)
        return {**batch, "targets": functional.one_hot(batch["targets"].clamp(min=0), CLASSES).double()}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        soft = batch["targets"].is_floating_point()
        targets = batch["targets"] if soft else functional.one_hot(batch["targets"].clamp(min=0), CLASSES).double()
        return functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(0, 1))

    def metrics(self, outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"accuracy": (outputs.argmax(-1) == batch["targets"]).double().mean()}


@pytest.mark.parametrize("network", [{"data": 2}, {"pipeline": 2}])
def test_the_check_of_a_loss_asks_for_no_metrics_of_a_batch_to_train_on(network: Any) -> None:
    found = trained(Mixed(), network=network, batch_size=26)
    assert len(found.losses) == STEPS
    assert 0 <= found.outcome.final["validation"]["accuracy"] <= 1


def test_metrics_that_take_gradients_are_validated_after_the_check_of_a_loss_that_takes_none() -> None:
    task = Rows(np.ones((40, 4)), np.ones(40), lambda: nn.Linear(4, 1))
    slopes: list[bool] = []

    def metrics(outputs: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        torch.autograd.grad(outputs.sum(), batch["inputs"].requires_grad_(), allow_unused=True)
        slopes.append(True)
        return {}

    task.metrics = metrics  # type: ignore[method-assign]
    trained(task, network={"data": 2})
    assert slopes


class Halving(nn.Module):
    """A module that changes its inputs in place."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(0.5)


def test_the_check_of_a_loss_leaves_the_batch_as_it_is() -> None:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(40, 4))
    task = Rows(inputs, inputs.sum(1), lambda: nn.Sequential(Halving(), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    assert is_that_of(trained(task, network={"data": 2}), trained(task))


def test_a_task_whose_weight_is_none_costs_no_operation_a_step() -> None:
    inputs = np.ones((40, 4))
    made: list[list[str]] = []
    for weight in (False, True):
        task: Any = Rows(inputs, inputs.sum(1), lambda: nn.Linear(4, 1))
        if weight:
            task.weight = None
        # Their sizes differ from run to run: messages with times are among them.
        made.append([operation for replica in train(task, 2, steps=3) for operation, _ in replica.calls])
    assert made[0] == made[1]


def test_a_batch_in_which_nothing_counts_is_refused_with_its_step() -> None:
    task = Sequences()
    task.weight = lambda batch: torch.tensor(0.0)  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match="batch of step 1 has weight 0"):
        trained(task, network={"data": 2})


@pytest.mark.parametrize("weight", [torch.tensor(-1.0), torch.ones(2), None])
def test_a_weight_that_is_negative_or_not_one_number_is_refused(weight: Any) -> None:
    task = Sequences()
    task.weight = lambda batch: weight  # type: ignore[method-assign]
    with pytest.raises(TrainingError, match=rf"returned {re.escape(format(weight))} for a batch of"):
        trained(task, network={"data": 2})


@pytest.mark.parametrize("layout", ["data 2", "data 3, accumulate 4", "pipeline 2", "ZeRO-3"])
def test_a_loss_gets_the_step_of_the_run(layout: str) -> None:
    assert is_that_of(trained(Annealed(), **LAYOUTS[layout]), plain(Annealed(), step=0))


@pytest.mark.parametrize("layout", ["data 2", "pipeline 2", "tensor 2", "ZeRO-3"])
def test_no_call_of_a_loss_gets_a_step_before_the_first(layout: str) -> None:
    task = Vanishing()
    trained(task, **LAYOUTS[layout])
    assert {*task.steps} == {*range(1, STEPS + 1)}


class Counting(Sequences):
    """A task whose loss counts its calls."""

    calls = 0

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        self.calls += 1
        return super().loss(outputs, batch) * (1 + self.calls)


@pytest.mark.parametrize("layout", ["data 2", "ZeRO-2"])
def test_what_a_task_counts_in_its_loss_is_not_counted_in_the_check(layout: str) -> None:
    one = train_laid_out(Counting, layout_settings(steps=STEPS, network={"microbatches": None}))
    found = train_laid_out(
        Counting, layout_settings(steps=STEPS, **LAYOUTS[layout] | {"network": {"data": 2, "microbatches": None}})
    )
    assert found.losses == pytest.approx(one.losses, rel=1e-12)


def test_the_bytes_of_the_check_are_no_part_of_those_between_stages() -> None:
    """Check that twice the steps send twice the bytes over each link: the first step's check sends some as well."""
    sent = []
    for steps in (2, 4):
        settings = layout_settings({"pipeline": 2}, steps=steps)
        usage = train_laid_out(lambda: digits(hidden=[16]), settings).outcome.usage
        sent.append({link: count for worker in usage for link, count in worker["bytes_by_link"].items()})
    assert sent[1] == {link: 2 * count for link, count in sent[0].items()}
    assert sent[0].keys() == {"stage 0 -> stage 1", "stage 1 -> stage 0"}
