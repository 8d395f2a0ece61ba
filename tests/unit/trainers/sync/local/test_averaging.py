"""Local SGD: replicas that train alone and average now and then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from orchestray.platform.errors import ConfigError
from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good
from orchestray.trainers.loop.checkpoint_source import Loaded
from support.layouts import LaidOut, layout_settings, train_and_keep, train_laid_out
from support.training import Rows, digits, few_digits, furthest, regression, same_bits


def task() -> Any:
    return few_digits()


def averaged(data: int = 3, network: dict[str, Any] | None = None, *, every: Any = 1, **rest: Any) -> Any:
    exchange = {"type": "averaging", "every": every, **rest.pop("exchange", {})}
    return layout_settings({"data": data, **(network or {})}, exchange, **rest)


@pytest.mark.parametrize(
    ("data", "optimizer"),
    [(2, {"momentum": 0.0}), (3, {"momentum": 0.9}), (2, {"momentum": 0.9, "nesterov": True})],
)
def test_averaging_after_every_step_is_the_single_process(data: int, optimizer: dict[str, Any]) -> None:
    chosen = {"optimizer": {"type": "sgd", "lr": 0.1, **optimizer}, "steps": 3}
    one = train_laid_out(task, layout_settings(**chosen))
    found = train_laid_out(task, averaged(data, **chosen))
    assert found.losses == pytest.approx(one.losses, rel=0, abs=1e-12)
    assert furthest(found.weights, one.weights) <= 1e-12


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_averaging_after_every_step_is_synchronous_sgd_bit_for_bit_where_no_sum_is_rounded(momentum: float) -> None:
    """Train a linear layer on whole numbers: all values are multiples of a power of two, which doubles hold."""
    rng = np.random.default_rng(0)
    inputs, targets = rng.integers(-3, 4, (16, 3)).astype(float), rng.integers(-3, 4, 16).astype(float)

    def exact() -> Rows:
        return Rows(inputs, targets, lambda: of_halves(nn.Linear(3, 1)))

    chosen = {"optimizer": {"type": "sgd", "lr": 0.125, "momentum": momentum}, "batch_size": 8, "steps": 4}
    averaging = train_laid_out(exact, averaged(2, **chosen))
    synchronous = train_laid_out(exact, layout_settings({"data": 2}, **chosen))
    assert same_bits(averaging.weights, synchronous.weights)
    assert averaging.losses == synchronous.losses
    assert not same_bits(averaging.weights, train_laid_out(exact, averaged(2, every=2, **chosen)).weights)


def test_a_replica_without_samples_has_no_gradient_to_clip() -> None:
    """Have one sample in the second batch of each epoch."""
    settings = averaged(2, every=2, steps=4, batch_size=8, grad_clip=1.0)
    assert len(train_laid_out(lambda: regression(9), settings).losses) == 4


def of_halves(layer: nn.Linear) -> nn.Linear:
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.fill_(0.5)
    return layer


@pytest.mark.parametrize("network", [{"tensor": 2}, {"pipeline": 2}])
def test_averaging_after_every_step_is_the_single_process_however_a_replica_is_laid_out(
    network: dict[str, Any],
) -> None:
    one = train_laid_out(task, layout_settings(steps=2))
    found = train_laid_out(task, averaged(2, network, steps=2))
    assert found.losses == pytest.approx(one.losses, rel=0, abs=1e-12)
    assert furthest(found.weights, one.weights) <= 1e-12


def test_parameters_are_sent_only_when_replicas_meet() -> None:
    often, seldom = (train_laid_out(task, averaged(2, every=every, steps=24)).outcome for every in (1, 12))
    size = sum(p.numel() for p in task().build_model().parameters()) * 8
    told = [outcome.bytes_sent - meetings * 2 * size for outcome, meetings in ((often, 24), (seldom, 2))]
    assert told[0] == told[1]
    assert told[0] < 3000


def test_one_mean_at_the_end_is_sent_once_whoever_asks_for_it(tmp_path: Path) -> None:
    """Ask for it in a validation, in a checkpoint and at the end itself."""
    settings = averaged(2, every="end", steps=24, validate_every_steps=24)
    once = train_laid_out(task, settings, checkpoints=lambda: CheckpointWriter(tmp_path, keep=1)).outcome
    often = train_laid_out(task, averaged(2, every=1, steps=24, validate_every_steps=24)).outcome
    size = sum(p.numel() for p in task().build_model().parameters()) * 8
    assert often.bytes_sent - once.bytes_sent == (24 - 1) * 2 * size
    assert 2 * size < once.bytes_sent < 2 * size + 3000


def test_meeting_every_40_steps_sends_a_40th_of_what_is_sent_in_lock_step() -> None:
    """Compare parameters with gradients; losses and wishes to stop, which do not grow with the model, are left out."""
    chosen: dict[str, Any] = {"batch_size": 4, "steps": 40, "validate_every_steps": 40}
    models = [lambda: digits(hidden=[4]), lambda: digits(hidden=[8])]
    sizes = [sum(p.numel() for p in model().build_model().parameters()) * 8 for model in models]
    sent = [train_laid_out(model, averaged(2, every=40, **chosen)).outcome.bytes_sent for model in models]
    gradients = [40 * 2 * size for size in sizes]  # 2(P-1)/P of them from each of P = 2, in each step
    assert sent[1] - sent[0] == (gradients[1] - gradients[0]) / 40


def test_an_outer_optimizer_that_takes_the_whole_move_is_plain_averaging() -> None:
    plain = train_laid_out(task, averaged(2, every=3, steps=8))
    outer = {"outer_optimizer": {"type": "sgd", "lr": 1.0}}
    found = train_laid_out(task, averaged(2, every=3, steps=8, exchange=outer))
    assert furthest(found.weights, plain.weights) <= 1e-12


def resumed(settings: Any, tmp_path: Path, *, first_steps: int, then: Any) -> LaidOut:
    from dataclasses import replace

    train_laid_out(task, replace(settings, steps=first_steps), checkpoints=lambda: CheckpointWriter(tmp_path, keep=1))

    def load() -> Loaded:
        found = latest_good(tmp_path)[0]
        assert found is not None
        assert found.step == first_steps
        return Loaded(found)

    return train_laid_out(task, then, load=load)


OUTER = {"type": "sgd", "lr": 0.7, "momentum": 0.9, "nesterov": True}
NADAM = {"type": "torch.optim:NAdam", "lr": 0.1}


# Within a round, at a meeting, after one.
@pytest.mark.parametrize(
    ("first_steps", "outer"), [(2, OUTER), (3, OUTER), (4, OUTER), (2, NADAM), (4, NADAM), (2, None), (4, None)]
)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(tmp_path: Path, first_steps: int, outer: Any) -> None:
    settings = averaged(2, every=3, steps=6, exchange={"outer_optimizer": outer})
    whole, load = train_and_keep(task, settings, tmp_path, first_steps)
    again = train_laid_out(task, settings, load=load)
    assert same_bits(again.weights, whole.weights)
    assert again.losses == whole.losses[first_steps:]


@pytest.mark.parametrize("optimizer", [{"momentum": 0.0, "groups": [{"match": "0.*", "momentum": 0.9}]}])
def test_replicas_whose_parameters_have_other_state_each_resume_bit_for_bit(
    tmp_path: Path, optimizer: dict[str, Any]
) -> None:
    settings = averaged(2, every=3, steps=6, optimizer={"type": "sgd", "lr": 0.1, **optimizer})
    again = resumed(settings, tmp_path, first_steps=4, then=settings)
    assert same_bits(again.weights, train_laid_out(task, settings).weights)


def test_an_outer_optimizer_has_groups_and_may_be_a_class_of_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outer.py").write_text("import torch\n\n\nclass Own(torch.optim.SGD):\n    pass\n")
    monkeypatch.chdir(tmp_path)
    grouped = {**OUTER, "groups": [{"match": "0.*", "lr": 0.1}]}
    own = {**grouped, "type": "outer.py:Own"}
    found = [
        train_laid_out(task, averaged(2, every=3, steps=6, exchange={"outer_optimizer": outer})).weights
        for outer in (grouped, own, OUTER)
    ]
    assert furthest(found[0], found[1]) <= 1e-12
    assert furthest(found[0], found[2]) > 1e-3


@pytest.mark.parametrize("outer", [{"type": "lars", "lr": 0.1}, {"type": "torch.optim:Muon", "lr": 0.1}])
def test_an_outer_optimizer_that_looks_at_whole_parameters_is_refused_where_they_are_cut(outer: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"exchange\.outer_optimizer\.type: .* it would see a part of '0\.weight'"):
        train_laid_out(task, averaged(2, {"tensor": 2}, steps=2, exchange={"outer_optimizer": outer}))


@pytest.mark.parametrize(("network", "exchange"), [({"data": 3}, {"type": "averaging", "every": 2}), ({}, {})])
def test_another_scheme_or_number_of_replicas_goes_on_from_the_mean(
    tmp_path: Path, network: dict[str, Any], exchange: dict[str, Any]
) -> None:
    settings = averaged(2, every=5, steps=8)
    again = resumed(settings, tmp_path, first_steps=8, then=layout_settings(network, exchange, steps=8))
    whole = train_laid_out(task, settings)
    assert again.losses == []
    assert furthest(again.weights, whole.weights) <= 1e-15


def test_the_mean_of_the_replicas_is_what_is_validated() -> None:
    settings = averaged(2, every="end", steps=6, validate_every_steps=6)
    found = train_laid_out(task, settings)
    model = task().build_model().double()
    model.load_state_dict(found.weights)
    whole = train_laid_out(task, layout_settings(steps=6, validate_every_steps=6))
    validation = found.outcome.final["validation"]
    assert validation is not None
    assert whole.outcome.final["validation"] is not None
    assert validation != whole.outcome.final["validation"]
    split = task().dataset("validation")
    with torch.no_grad():
        batch = task().to_batch(split)
        loss = task().loss(model(batch["inputs"].double()), batch)
    assert validation["loss"] == pytest.approx(float(loss), rel=1e-6)


def test_an_outer_optimizer_begins_from_the_weights_of_another_schemes_checkpoint(tmp_path: Path) -> None:
    outer = {"type": "sgd", "lr": 0.5}
    settings = averaged(2, every=4, steps=8, exchange={"outer_optimizer": outer})
    lock_step = layout_settings({"data": 2}, steps=4)
    saved = tmp_path / "lock-step"
    train_laid_out(task, lock_step, checkpoints=lambda: CheckpointWriter(saved, keep=1))
    found = latest_good(saved)[0]
    assert found is not None
    again = train_laid_out(task, settings, load=lambda: Loaded(found))
    plain = train_laid_out(task, averaged(2, every=4, steps=8), load=lambda: Loaded(found))
    start = Loaded(found).model().tensors
    for name, tensor in again.weights.items():  # half of the move of plain averaging
        halfway = (start[name] + plain.weights[name]) / 2
        assert torch.allclose(tensor, halfway, rtol=0, atol=1e-12), name


def compressed(data: int, compression: dict[str, Any], **rest: Any) -> Any:
    from dataclasses import replace

    return replace(averaged(data, **rest), compression=compression)


LOSSLESS = {"type": "topk", "ratio": 1.0, "error_feedback": True}
CODES = [
    {"type": "topk", "ratio": 0.1, "error_feedback": True},
    {"type": "qsgd", "bits": 4, "bucket": 512, "error_feedback": False, "huffman": False},
    {"type": "onebit", "error_feedback": True},
]


@pytest.mark.parametrize("data", [2, 3])
def test_moves_in_a_code_that_loses_nothing_are_plain_averaging(data: int) -> None:
    plain = train_laid_out(task, averaged(data, every=3, steps=8))
    found = train_laid_out(task, compressed(data, LOSSLESS, every=3, steps=8))
    assert furthest(found.weights, plain.weights) <= 1e-12


@pytest.mark.parametrize(
    ("code", "outer"),
    [*((code, None) for code in CODES), (CODES[0], OUTER)],
    ids=lambda each: each["type"] if each else "",
)
def test_compressed_moves_are_fewer_bytes_and_resume_bit_for_bit(
    tmp_path: Path, code: dict[str, Any], outer: Any
) -> None:
    settings = compressed(2, code, every=2, steps=5, exchange={"outer_optimizer": outer})
    whole = train_laid_out(task, settings)
    assert whole.outcome.bytes_sent < whole.outcome.bytes_dense
    again = resumed(settings, tmp_path, first_steps=3, then=settings)
    assert same_bits(again.weights, whole.weights)


@pytest.mark.parametrize("code", CODES, ids=lambda code: code["type"])
def test_replicas_learn_from_compressed_moves(code: dict[str, Any]) -> None:
    chosen: dict[str, Any] = {"steps": 25, "optimizer": {"type": "sgd", "lr": 0.3, "momentum": 0.9}}
    settings = compressed(2, code, network={"microbatches": 1}, every=3, **chosen)
    found = train_laid_out(lambda: digits(hidden=[16]), settings)
    assert sum(found.losses[-5:]) < 0.8 * sum(found.losses[:5])
