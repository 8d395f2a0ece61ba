"""The replica's loop: any number of replicas is the single process, and a restart changes nothing."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.solo import SoloCollective
from orchestray.platform.data.source import open_source
from orchestray.platform.data.stream import SampleStream
from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good
from orchestray.platform.task import TaskSource
from orchestray.trainers.config.goals import EarlyStop, Until
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.core.outcome import Outcome
from orchestray.trainers.core.rng import building
from orchestray.trainers.core.weights import model_tensors
from orchestray.trainers.layout.degrees import Layout
from orchestray.trainers.loop.checkpoint_source import Loaded
from orchestray.trainers.loop.position import Position
from orchestray.trainers.loop.replica import Replica
from support.layouts import layout_settings, train_laid_out
from support.patience import PATIENCE_S
from support.threads import run_replicas
from support.tiny_task import TinyTask
from support.training import stream_of

SETTINGS = ReplicaSettings(
    task=TaskSource(type="tiny", arguments={}, file=None, source=None),
    batch_size=10,
    epochs=3,
    steps=None,
    optimizer={"type": "sgd", "lr": 0.1, "momentum": 0.9},
    lr_schedule={"type": "constant", "warmup_steps": 0},
    precision="float64",
)


def make(settings: ReplicaSettings, task: TinyTask) -> Replica:
    sources = {split: open_source(task.dataset(split)) for split in ("train", "validation")}

    def stream(split: str, rank: int) -> SampleStream:
        return SampleStream(
            sources[split],
            task.to_batch,
            batch_size=settings.batch_size,
            rank=rank,
            num_replicas=settings.num_replicas,
            accumulate=settings.accumulate if split == "train" else 1,
            seed=settings.seed,
            shuffle=split == "train",
        )

    return Replica(task, settings, stream)


def train(settings: ReplicaSettings, task: TinyTask) -> list[tuple[Replica, Outcome]]:
    # Built one after the other: threads share torch's generator of random numbers, processes do not.
    replicas = [make(settings, task) for _ in range(settings.num_replicas)]

    def body(collective: Collective) -> tuple[Replica, Outcome]:
        replica = replicas[collective.rank]
        replica.connect(collective)
        return replica, replica.run(started_at=0.0)

    if settings.num_replicas == 1:
        return [body(SoloCollective())]
    return run_replicas(settings.num_replicas, body)


def lines(replica: Replica, **having: Any) -> list[dict[str, Any]]:
    return [line for line in replica.recorder.since(-1) if all(line.get(key) == value for key, value in having.items())]


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor], tolerance: float) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize(
    ("variant", "num_replicas"),
    [
        *(("plain", 2), ("batch_norm", 3), ("accumulate", 2), ("accumulate_batch_norm", 4)),
        *(("clip", 2), ("adamw", 3), ("bucketed", 4)),
    ],
)
def test_any_number_of_replicas_is_the_single_process(variant: str, num_replicas: int) -> None:
    task = TinyTask(batch_norm="batch_norm" in variant)
    changes: dict[str, dict[str, Any]] = {
        "accumulate": {"accumulate": 3},
        "accumulate_batch_norm": {"accumulate": 3},
        "clip": {"grad_clip": 0.05},
        "adamw": {"optimizer": {"type": "adamw", "lr": 0.01, "weight_decay": 0.1}},
        "bucketed": {"exchange": {"bucket_mb": 0.0001}},
    }
    settings = replace(SETTINGS, **changes.get(variant, {}))
    (single, single_outcome), *_ = train(settings, task)
    results = train(replace(settings, layout=Layout(data=num_replicas)), task)
    expected_losses = [line["loss"] for line in lines(single) if "split" not in line]
    for replica, outcome in results:
        losses = [line["loss"] for line in lines(replica) if "split" not in line]
        assert losses == pytest.approx(expected_losses, rel=1e-12, abs=1e-12)
        assert_same(model_tensors(replica.model), model_tensors(single.model), 1e-12)
        assert outcome.final["validation"] == pytest.approx(single_outcome.final["validation"], rel=1e-12)
    first = model_tensors(results[0][0].model)
    for replica, _ in results[1:]:
        assert_same(model_tensors(replica.model), first, 0.0)


def test_float32_replicas_are_the_single_process_within_1e_6() -> None:
    settings = replace(SETTINGS, precision="float32")
    (single, _), *_ = train(settings, TinyTask())
    for replica, _ in train(replace(settings, layout=Layout(data=2)), TinyTask()):
        assert_same(model_tensors(replica.model), model_tensors(single.model), 1e-6)


def test_local_batch_norm_ends_with_the_same_buffers_on_every_replica() -> None:
    results = train(replace(SETTINGS, layout=Layout(data=3), batch_norm="local"), TinyTask(batch_norm=True))
    first = model_tensors(results[0][0].model)
    assert any("running_mean" in name for name in first)
    for replica, _ in results[1:]:
        assert_same(model_tensors(replica.model), first, 0.0)


def test_every_step_and_every_validation_leaves_one_line() -> None:
    (replica, outcome), *_ = train(SETTINGS, TinyTask())
    assert [line["step"] for line in lines(replica) if "split" not in line] == list(range(1, 13))
    assert [line["step"] for line in lines(replica, split="validation")] == [4, 8, 12]
    assert [line["epoch"] for line in lines(replica, split="validation")] == [1, 2, 3]
    assert outcome.step == 12
    assert outcome.samples == 3 * 37


def test_validation_every_n_steps_and_at_the_end() -> None:
    (replica, _), *_ = train(replace(SETTINGS, validate_every_steps=5), TinyTask())
    assert [line["step"] for line in lines(replica, split="validation")] == [5, 10, 12]


def test_until_stops_at_the_validation_that_reaches_it() -> None:
    settings = replace(SETTINGS, epochs=500, until=Until("accuracy", 0.8, "max"))
    (replica, outcome), *_ = train(settings, TinyTask())
    reached = [line["accuracy"] >= 0.8 for line in lines(replica, split="validation")]
    assert outcome.ended == "until"
    assert reached == [False] * (len(reached) - 1) + [True]


def test_early_stopping_ends_a_run_after_as_many_validations_without_a_gain_as_it_has_patience() -> None:
    never_better = EarlyStop("loss", patience=3, min_delta=100.0, mode="min")
    settings = replace(SETTINGS, epochs=500, early_stop=never_better)
    for replica, outcome in train(settings, TinyTask()):
        assert outcome.ended == "early_stopping"
        assert outcome.epochs == 4  # the first is the best, and three are not better
        assert replica.position.num_worse == 3


def test_a_run_that_was_stopped_goes_on_where_it_now_has_more_patience_or_a_higher_goal() -> None:
    early = EarlyStop("loss", patience=3, min_delta=0.0, mode="min")
    position = Position(stopped_by="early_stopping", num_worse=3, validation={"accuracy": 0.8, "members": []})
    for changes, stopped_by in (
        ({"early_stop": early}, "early_stopping"),
        ({"early_stop": replace(early, patience=4)}, None),
        ({"until": Until("accuracy", 0.8, "max")}, None),
    ):
        again = replace(position)
        again.begin_attempt(replace(SETTINGS, **changes))
        assert again.stopped_by == stopped_by
    for value, stopped_by in ((0.8, "until"), (0.9, None)):
        again = replace(position, stopped_by="until")
        again.begin_attempt(replace(SETTINGS, until=Until("accuracy", value, "max")))
        assert again.stopped_by == stopped_by


def test_a_validation_that_a_pause_or_a_time_limit_adds_costs_no_patience() -> None:
    never_better = EarlyStop("loss", patience=1, min_delta=100.0, mode="min")
    settings = replace(SETTINGS, validate_every_steps=2, early_stop=never_better)
    replica = make(settings, TinyTask())
    replica.pause_at = 3
    replica.connect(SoloCollective())
    assert replica.run(started_at=0.0).ended == "finished"
    assert [line["step"] for line in lines(replica, split="validation")] == [2, 3]
    assert replica.position.num_worse == 0


def test_an_unknown_until_metric_names_the_nearest_and_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no metric 'acuracy'; did you mean 'accuracy'\? \(it has: accuracy, loss\)"):
        train(replace(SETTINGS, until=Until("acuracy", 0.8, "max")), TinyTask())


def test_time_limit_ends_every_replica_at_the_same_step() -> None:
    results = train(replace(SETTINGS, layout=Layout(data=2), time_limit_s=1.0), TinyTask())  # it began in 1970
    assert [(outcome.ended, outcome.step) for _, outcome in results] == [("time_limit_s", 1)] * 2


def test_a_stop_asked_of_one_replica_ends_all_at_the_same_step() -> None:
    def body(collective: Collective) -> Outcome:
        replica = make(replace(SETTINGS, layout=Layout(data=2)), TinyTask())
        replica.connect(collective)
        replica.stop_requested = collective.rank == 1
        return replica.run(started_at=0.0)

    assert [(outcome.ended, outcome.step) for outcome in run_replicas(2, body)] == [("interrupted", 1)] * 2


@pytest.mark.parametrize("stop_at", [4, 7])
def test_a_resumed_run_is_bit_identical_to_an_uninterrupted_one(tmp_path: Path, stop_at: int) -> None:
    task = TinyTask(dropout=0.5, batch_norm=True)
    (whole, _), *_ = train(SETTINGS, task)
    first = make(replace(SETTINGS, checkpoint_every_steps=stop_at, epochs=None, steps=stop_at), task)
    with CheckpointWriter(str(tmp_path), keep=1) as writer:
        first.connect(SoloCollective())
        first.write_checkpoints_with(writer)
        first.run(started_at=0.0)
        writer.wait()
    found, _ = latest_good(str(tmp_path))
    assert found is not None
    second = make(SETTINGS, task)
    assert second.connect(SoloCollective(), lambda: Loaded(found)) == stop_at
    second.run(started_at=0.0)
    assert_same(model_tensors(second.model), model_tensors(whole.model), 0.0)
    losses = [line["loss"] for line in lines(whole) if "split" not in line]
    assert [line["loss"] for line in lines(second) if "split" not in line] == losses[stop_at:]


def test_a_new_replica_takes_the_state_of_the_farthest() -> None:
    task = TinyTask()
    settings = replace(SETTINGS, layout=Layout(data=2), average={"type": "ema", "decay": 0.7})
    (whole, _), *_ = train(settings, task)
    half = replace(settings, epochs=None, steps=5)
    survivor = train(half, task)[0][0]
    survivor.settings = settings

    def body(collective: Collective) -> Replica:
        replica = survivor if collective.rank == 1 else make(settings, task)
        assert replica.connect(collective) == 5
        replica.run(started_at=0.0)
        return replica

    for replica in run_replicas(2, body):
        assert_same(model_tensors(replica.model), model_tensors(whole.model), 0.0)
        assert_same(replica.trained_model().tensors, whole.trained_model().tensors, 0.0)


def test_nan_in_the_data_names_step_worker_and_sample() -> None:
    with pytest.raises(TrainingError) as failed:
        train(replace(SETTINGS, batch_size=37), TinyTask(nan_at=17))
    assert "The loss became nan at step 1 on worker 0, in the batch of samples" in str(failed.value)
    assert "The data itself holds NaN or infinity in sample(s) 17: clean or drop them." in str(failed.value)


def test_a_diverging_loss_names_its_samples_and_the_remedies() -> None:
    with pytest.raises(TrainingError, match="The data is finite: lower the learning rate"):
        train(replace(SETTINGS, precision="float32", optimizer={"type": "sgd", "lr": 1e38}), TinyTask())


def test_a_loss_that_is_no_scalar_is_refused_with_its_shape() -> None:
    class Unreduced(TinyTask):
        def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
            return torch.nn.functional.cross_entropy(outputs, batch["targets"], reduction="none")

    with pytest.raises(TrainingError, match=r"must be a scalar tensor.*a tensor of shape \(10,\)"):
        train(SETTINGS, Unreduced())


def test_an_error_in_the_users_model_says_where_also_in_a_pipeline_that_measures_its_layers() -> None:
    class Wrong(TinyTask):
        def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
            raise ValueError("no loss today")

    with pytest.raises(TrainingError, match=r"failed at step 1 on worker 0: .*test_replica.py, line \d+"):
        train(SETTINGS, Wrong())
    with pytest.raises(TrainingError, match=r"failed at step 1 on worker 0: .*test_replica.py, line \d+"):
        train_laid_out(Wrong, layout_settings({"pipeline": 2, "split": "balanced"}))


def test_bfloat16_trains_with_float32_weights() -> None:
    (replica, outcome), *_ = train(replace(SETTINGS, precision="bfloat16", epochs=30), TinyTask())
    assert all(parameter.dtype == torch.float32 for parameter in replica.model.parameters())
    assert outcome.final["validation"]["accuracy"] > 0.8  # type: ignore[index]


def test_fewer_samples_than_replicas_still_is_the_single_process() -> None:
    for batch_norm in (False, True):
        task = TinyTask(num_samples=3, batch_norm=batch_norm)
        (single, _), *_ = train(SETTINGS, task)
        for replica, _ in train(replace(SETTINGS, layout=Layout(data=4)), task):
            assert_same(model_tensors(replica.model), model_tensors(single.model), 1e-12)


def test_checks_of_a_worker_that_is_ready_first_leave_alone_what_another_thread_still_builds() -> None:
    """They seed torch's generator, which threads share: its state is put back between the draws of two layers here."""
    settings = layout_settings({"pipeline": 2})
    has_built, checks, has_begun, meets = (threading.Event() for _ in range(4))

    class Slow(TinyTask):
        def build_model(self) -> nn.Module:
            checks.wait(PATIENCE_S)
            first = nn.Linear(4, 8)
            has_begun.set()
            meets.wait(PATIENCE_S)
            self.model = nn.Sequential(first, nn.Tanh(), nn.Linear(8, 2))
            return self.model

    task = Slow()

    def run(world: Collective) -> None:
        if world.rank == 1:
            has_built.wait(PATIENCE_S)
            Replica(task, settings, stream_of(task, settings)).connect(world)
            return
        quick = TinyTask()
        # A task says what its data are while no other thread seeds: now, as the other one is to build meanwhile.
        streams = {split: stream_of(quick, settings)(split, 0) for split in ("train", "validation")}
        replica = Replica(quick, settings, lambda split, _: streams[split])
        has_built.set()
        start = world._start

        def starting(*operation: Any) -> Any:
            checks.set()
            meets.set()
            return start(*operation)

        def passing(*_: object) -> None:
            checks.set()
            has_begun.wait(PATIENCE_S)

        replica.model.register_forward_pre_hook(passing)
        with mock.patch.object(world, "_start", starting):
            replica.connect(world)

    run_replicas(2, run)
    with building(settings.seed):
        expected = TinyTask().build_model().to(torch.float64)
    assert_same(dict(task.model.state_dict()), dict(expected.state_dict()), 0.0)
