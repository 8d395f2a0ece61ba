"""Ensembles: members that train apart, each on every sample, and are validated and saved together."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.platform.errors import ConfigError
from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good, load_checkpoint
from orchestray.trainers.core.members import member_seed
from orchestray.trainers.ensemble.ensemble import Ensemble
from orchestray.trainers.loop.checkpoint_source import Loaded
from support.layouts import LaidOut, layout_settings, train_and_keep, train_laid_out
from support.training import few_digits, furthest, regression, same_bits, stream_of
from support.training import train as train_watched


def task(**arguments: Any) -> Any:
    return few_digits(**arguments)


def apart(data: int = 3, network: dict[str, Any] | None = None, **rest: Any) -> Any:
    exchange = {"type": "independent", **rest.pop("exchange", {})}
    return layout_settings({"data": data, **(network or {})}, exchange, **rest)


def member(weights: dict[str, Tensor], index: int) -> dict[str, Tensor]:
    prefix = f"members.{index}."
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


# -- the members -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [{}, {"dropout": 0.3}, {"batch_norm": True}], ids=["plain", "dropout", "norm"])
def test_each_member_is_the_plain_run_of_its_seed_bit_for_bit(arguments: dict[str, Any]) -> None:
    found = train_laid_out(lambda: task(**arguments), apart(3, steps=3, grad_clip=1.0, seed=5))
    for index in range(3):
        alone = layout_settings(steps=3, grad_clip=1.0, seed=member_seed(5, index))
        one = train_laid_out(lambda: task(**arguments), alone)
        assert same_bits(member(found.weights, index), one.weights)


def test_member_0_has_the_seed_of_the_run_and_no_two_members_the_same() -> None:
    assert member_seed(7, 0) == 7
    assert len({member_seed(seed, index) for seed in range(20) for index in range(20)}) == 400


@pytest.mark.parametrize("network", [{"tensor": 2}, {"pipeline": 2}])
def test_each_member_may_be_laid_out_over_several_workers(network: dict[str, Any]) -> None:
    found = train_laid_out(task, apart(2, network, steps=2, validate_every_steps=2))
    whole = train_laid_out(task, apart(2, steps=2, validate_every_steps=2))
    assert furthest(found.weights, whole.weights) <= 1e-12
    assert flat(found.outcome.final["validation"]) == pytest.approx(flat(whole.outcome.final["validation"]), abs=1e-12)


def flat(validation: Any) -> list[float]:
    plain = [value for key, value in validation.items() if key != "members"]
    return plain + [value for own in validation["members"] for value in own.values()]


def test_each_member_sees_every_sample_once_an_epoch_in_an_order_of_its_own() -> None:
    settings = apart(3, batch_size=100, epochs=1, steps=None)
    stream = stream_of(task(), settings)
    orders = []
    for index in range(3):
        with stream("train", index).epoch(0) as shares:
            orders.append([i for share in shares for part in share.micro_batches for i in part.sample_ids.tolist()])
    num_samples = stream("train", 0).num_samples
    assert all(sorted(order) == list(range(num_samples)) for order in orders)
    assert len({tuple(order) for order in orders}) == 3


def test_the_loss_of_a_step_is_the_mean_of_the_members() -> None:
    found = train_laid_out(task, apart(2, steps=3))
    alone = [train_laid_out(task, layout_settings(steps=3, seed=member_seed(0, i))).losses for i in range(2)]
    assert found.losses == pytest.approx([(a + b) / 2 for a, b in zip(*alone, strict=True)], rel=0, abs=1e-15)


def test_the_exchange_sends_nothing_and_members_meet_at_the_ends_of_segments_alone() -> None:
    """Count one agreement a segment: a loss a step, and three numbers."""
    calls = {}
    for steps in (5, 12):
        trained = train_watched(
            task(), 2, exchange={"type": "independent"}, steps=steps, batch_size=24, validate_every_steps=steps
        )
        assert all(one.sent_by_exchange == 0 for one in trained)
        calls[steps] = trained[0].calls
        assert calls[steps].count(("all_reduce", steps + 3)) == 1
        who_saves = 2 * (8 + 5)  # asked once: the length of an answer, and "false"
        assert trained[0].outcome.bytes_sent == 2 * 8 * (steps + 3) + who_saves
    assert [name for name, _ in calls[5]] == [name for name, _ in calls[12]]


# -- the answer --------------------------------------------------------------------------------------------------------


def ensemble_of(weights: dict[str, Tensor], num_members: int, average: Any, **arguments: Any) -> Ensemble:
    built = Ensemble([task(**arguments).build_model().double() for _ in range(num_members)], average)
    built.load_state_dict(weights)
    built.eval()
    return built


@pytest.mark.parametrize("average", ["outputs", "probabilities"])
def test_the_validation_is_that_of_the_averaged_answer_and_of_each_member(average: Any) -> None:
    settings = apart(3, steps=5, validate_every_steps=5, batch_size=48, exchange={"average": average})
    found = train_laid_out(task, settings)
    validation: Any = found.outcome.final["validation"]
    batch = task().to_batch(task().dataset("validation"))
    inputs = batch["inputs"].double()
    with torch.no_grad():
        built = ensemble_of(found.weights, 3, average)
        logits = built.logits(inputs)
        assert validation["loss"] == pytest.approx(float(task().loss(logits, batch)), rel=1e-6)
        assert validation["accuracy"] == pytest.approx(float(task().metrics(logits, batch)["accuracy"]), abs=1e-6)
        for own, told in zip(built.members, validation["members"], strict=True):
            assert told["loss"] == pytest.approx(float(task().loss(own(inputs), batch)), rel=1e-6)
            accuracy = task().metrics(own(inputs), batch)["accuracy"]
            assert told["accuracy"] == pytest.approx(float(accuracy), abs=1e-6)


def test_the_loss_of_the_mean_is_at_most_the_mean_loss_of_the_members() -> None:
    """Check that the cross-entropy is convex in the logits (Jensen), whatever the members are."""
    for average in ("outputs", "probabilities"):
        settings = apart(3, steps=3, validate_every_steps=3, exchange={"average": average})
        validation: Any = train_laid_out(task, settings).outcome.final["validation"]
        assert validation["loss"] < sum(own["loss"] for own in validation["members"]) / 3


# -- the trunk ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("network", "batch_norm"), [({}, False), ({"pipeline": 2}, False), ({"tensor": 2}, False), ({}, True)]
)
def test_the_trunk_is_the_same_in_all_members_and_nothing_else_is(network: dict[str, Any], batch_norm: bool) -> None:
    trunk = 3 if batch_norm else 2
    settings = apart(3, network, steps=2, exchange={"trunk": trunk})
    found = train_laid_out(lambda: task(batch_norm=batch_norm), settings)
    first, second, third = (member(found.weights, index) for index in range(3))
    for name, tensor in first.items():
        is_trunk = int(name.split(".")[0]) < trunk
        assert torch.equal(tensor, second[name]) == is_trunk or "num_batches" in name
        assert torch.equal(tensor, third[name]) == is_trunk or "num_batches" in name


def test_the_gradient_of_the_trunk_is_the_mean_over_the_members() -> None:
    """Do one step of gradient descent with a rate of 1: the trunk moves by the mean of the members' gradients."""
    chosen: dict[str, Any] = {"steps": 1, "optimizer": {"type": "sgd", "lr": 1.0, "momentum": 0.0}}
    found = train_laid_out(task, apart(3, exchange={"trunk": 2}, **chosen))
    start = [task().build_model() for _ in range(3)]
    for index, model in enumerate(start):
        torch.manual_seed(member_seed(0, index))
        fresh = task().build_model().double()
        model.double().load_state_dict(fresh.state_dict())
    moves = []
    settings = apart(3, **chosen)
    for index, model in enumerate(start):
        model[0].load_state_dict(start[0][0].state_dict())
        with stream_of(task(), settings)("train", index).epoch(0) as shares:
            share = next(iter(shares))
            for part in share.micro_batches:
                outputs = model(part.batch["inputs"].double())
                (task().loss(outputs, part.batch) * part.num_samples / share.batch_samples).backward()
        moves.append(model[0].weight.grad)
        assert model[2].weight.grad is not None
        moved = model[2].weight.detach() - model[2].weight.grad
        assert float((moved - found.weights[f"members.{index}.2.weight"]).abs().max()) <= 1e-12
    mean = torch.stack([move for move in moves if move is not None]).mean(0)
    expected = start[0][0].weight.detach() - mean
    assert float((expected - found.weights["members.1.0.weight"]).abs().max()) <= 1e-12


def test_a_trunk_may_have_a_table_of_sparse_gradients() -> None:
    class Signs(nn.Module):
        def __init__(self, *, sparse: bool) -> None:
            super().__init__()
            self.table = nn.Embedding(2, 4, sparse=sparse)

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(self.table((x > 0).long()).sum(1))

    found = []
    for sparse in (True, False):
        rows = regression()
        rows.build_model = lambda sparse=sparse: nn.Sequential(Signs(sparse=sparse), nn.Linear(4, 1))  # type: ignore[misc]
        found.append(train_laid_out(lambda rows=rows: rows, apart(2, exchange={"trunk": 1}, steps=3)).weights)
    assert furthest(*found) <= 1e-12


def test_only_the_trunk_is_sent_in_a_step() -> None:
    """Let each of two members send as much as the gradient has, and for each parameter a flag for its use."""
    sent = {}
    for steps in (1, 4):
        trained = train_watched(task(), 2, exchange={"type": "independent", "trunk": 1}, steps=steps, batch_size=24)
        sent[steps] = trained[0].sent_by_exchange
    size = sum(p.numel() for p in task().build_model()[0].parameters())
    assert sent[4] - sent[1] == 3 * (size + 2) * 8


@pytest.mark.parametrize(("trunk", "said"), [(5, "at most 4 can be shared"), (9, "the model has 5 layers")])
def test_a_trunk_of_all_layers_is_refused(trunk: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        train_laid_out(task, apart(2, exchange={"trunk": trunk}))


def test_a_trunk_that_does_not_fit_is_refused_before_anything_starts() -> None:
    from orchestray.trainers.config.load import load_train_config
    from orchestray.trainers.validate.refuse import check_layout

    data = {
        "name": "a",
        "task": {"type": "digits", "hidden": [8]},
        "train": {"batch_size": 8, "steps": 1, "optimizer": {"type": "sgd", "lr": 0.1}},
        "strategy": {"network": {"data": 2}, "exchange": {"type": "independent", "trunk": 1}},
    }
    check_layout(load_train_config(data))
    with pytest.raises(ConfigError, match=r"a\.yaml: strategy\.exchange\.trunk: the model has 3 layers"):
        check_layout(load_train_config(data, ["strategy.exchange.trunk=3"]), label="a.yaml")
    with pytest.raises(ConfigError, match=r"train\.grad_clip: each member's gradient has a norm of its own"):
        load_train_config(data, ["train.grad_clip=1.0"])


# -- checkpoints -------------------------------------------------------------------------------------------------------


def resumed(settings: Any, folder: Path, *, first_steps: int, then: Any) -> LaidOut:
    train_laid_out(task, replace(settings, steps=first_steps), checkpoints=lambda: CheckpointWriter(folder, keep=1))

    def load() -> Loaded:
        found = latest_good(folder)[0]
        assert found is not None
        assert found.step == first_steps
        return Loaded(found)

    return train_laid_out(task, then, load=load)


@pytest.mark.parametrize(("exchange", "network"), [({}, {}), ({"trunk": 2}, {}), ({}, {"tensor": 2})])
def test_a_resumed_ensemble_is_the_uninterrupted_one_bit_for_bit(
    tmp_path: Path, exchange: dict[str, Any], network: dict[str, Any]
) -> None:
    settings = apart(2, network, steps=4, exchange=exchange)
    whole, load = train_and_keep(task, settings, tmp_path, 2)
    again = train_laid_out(task, settings, load=load)
    assert same_bits(again.weights, whole.weights)
    assert again.losses == whole.losses[2:]


def test_a_checkpoint_holds_every_member_and_its_optimizer_once(tmp_path: Path) -> None:
    settings = apart(3, steps=2)
    found = train_laid_out(task, settings, checkpoints=lambda: CheckpointWriter(tmp_path, keep=1))
    saved = latest_good(tmp_path)[0]
    assert saved is not None
    model, optimizer, state = load_checkpoint(saved)
    assert same_bits(model, found.weights)
    assert state["members"] == 3
    assert {name.rpartition(".")[0] for name in optimizer} == set(model)
    assert "exchange.safetensors" not in saved.files


@pytest.mark.parametrize("network", [{}, {"tensor": 2}, {"data": 2}])
def test_another_scheme_goes_on_from_member_0(tmp_path: Path, network: dict[str, Any]) -> None:
    again = resumed(apart(2, steps=4), tmp_path, first_steps=2, then=layout_settings(network, steps=4))
    whole = train_laid_out(task, layout_settings(steps=4))
    assert furthest(again.weights, whole.weights) <= 1e-12


def test_an_ensemble_goes_on_from_a_plain_model_in_every_member(tmp_path: Path) -> None:
    again = resumed(layout_settings(steps=7), tmp_path, first_steps=4, then=apart(2, steps=4))
    plain = train_laid_out(task, layout_settings(steps=4))
    assert same_bits(member(again.weights, 0), plain.weights)
    assert same_bits(member(again.weights, 1), plain.weights)


@pytest.mark.parametrize(("members", "sources"), [(2, [0, 1]), (4, [0, 1, 2, 0])])
def test_other_numbers_of_members_take_those_that_were_saved(tmp_path: Path, members: int, sources: list[int]) -> None:
    again = resumed(apart(3, steps=2), tmp_path, first_steps=2, then=apart(members, steps=2))
    whole = train_laid_out(task, apart(3, steps=2))
    for index, source in enumerate(sources):
        assert same_bits(member(again.weights, index), member(whole.weights, source))
    assert len(again.weights) == members * len(member(whole.weights, 0))


def test_members_that_trained_apart_begin_a_trunk_with_that_of_member_0(tmp_path: Path) -> None:
    again = resumed(apart(2, steps=4), tmp_path, first_steps=4, then=apart(2, steps=6, exchange={"trunk": 2}))
    assert torch.equal(again.weights["members.0.0.weight"], again.weights["members.1.0.weight"])
    assert not torch.equal(again.weights["members.0.2.weight"], again.weights["members.1.2.weight"])


def test_a_plain_model_with_a_part_called_members_is_no_ensemble(tmp_path: Path) -> None:
    class Own:
        def __getattr__(self, name: str) -> Any:
            return getattr(task(), name)

        def build_model(self) -> Any:
            return Ensemble([task().build_model() for _ in range(2)])

    settings = layout_settings(steps=2)
    whole = train_laid_out(Own, settings, checkpoints=lambda: CheckpointWriter(tmp_path, keep=1))
    found = latest_good(tmp_path)[0]
    assert found is not None
    again = train_laid_out(Own, settings, load=lambda: Loaded(found))
    assert same_bits(again.weights, whole.weights)


def test_members_that_meet_again_go_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    """Form a new gang of the same processes after a loss; they may come in another order of ranks."""
    from orchestray.platform.run.recorder import Recorder
    from orchestray.trainers.loop.replica import Replica
    from support.threads import run_replicas

    settings = apart(2, steps=6)
    replicas = [Replica(task(), settings, stream_of(task(), settings), recorder=Recorder()) for _ in range(2)]

    def load() -> Loaded:
        found = latest_good(tmp_path)[0]
        assert found is not None
        return Loaded(found)

    def first(world: Collective) -> None:
        replica = replicas[world.rank]
        replica.settings = replace(settings, steps=3)
        replica.connect(world)
        if world.rank == 0:
            with CheckpointWriter(tmp_path, keep=1) as writer:
                replica.write_checkpoints_with(writer)
                replica.run(0.0)
        else:
            replica.run(0.0)

    def second(world: Collective) -> dict[str, Tensor]:
        replica = replicas[1 - world.rank]
        replica.settings = settings
        replica.checkpoints = None
        assert replica.connect(world, load) == 3
        replica.run(0.0)
        return {name: tensor.clone() for name, tensor in replica.trained_model().tensors.items()}

    run_replicas(2, first)
    assert same_bits(run_replicas(2, second)[0], train_laid_out(task, settings).weights)


def test_a_lost_member_is_said_to_the_others() -> None:
    """Check that a member that leaves before the segment's end is a lost peer to the one that waits there."""
    from orchestray.platform.comm.collective import PeerLostError

    def leave(replica: Any, collective: Collective, _calls: object) -> None:
        if collective.rank == 1:
            collective.abort()

    with pytest.raises(PeerLostError):
        train_watched(task(), 2, exchange={"type": "independent"}, steps=4, prepare=leave)
