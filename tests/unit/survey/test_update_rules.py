"""Group B: update rules and learning rates, against the survey's formulas and against torch.optim."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.core.rng import seed_everything
from orchestray.trainers.loop.checkpoint_source import Loaded
from orchestray.trainers.loop.replica import Replica
from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.optim.schedules import lr_at
from support.training import (
    Rows,
    State,
    Trained,
    digits,
    furthest,
    order_of,
    regression,
    same_bits,
    settings_for,
    stream_of,
    train,
)

NUM_STEPS = 100


class Plane(nn.Module):
    """The map w0 x0 + w1 x1, one product and one sum at a time, so that every library rounds alike."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.3, -0.7], dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs[:, 0] * self.weight[0] + inputs[:, 1] * self.weight[1]


def by_torch(
    task: Any, optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer], batch_size: int = 32
) -> State:
    """Return the weights after `NUM_STEPS` steps of the loop of PyTorch's tutorials, on the same samples."""
    settings = settings_for(steps=NUM_STEPS, batch_size=batch_size)
    stream = stream_of(task, settings)("train", 0)
    seed_everything(settings.seed)
    model = task.build_model().to(torch.float64)
    updates = optimizer(list(model.parameters()))
    step, epoch = 0, 0
    while step < NUM_STEPS:
        with stream.epoch(epoch) as shares:
            for share in shares:
                if step == NUM_STEPS:
                    break
                (micro_batch,) = share.micro_batches
                batch = {k: v.double() if v.is_floating_point() else v for k, v in micro_batch.batch.items()}
                updates.zero_grad()
                task.loss(model(batch["inputs"]), batch).backward()
                updates.step()
                step += 1
        epoch += 1
    return {name: value.detach() for name, value in model.state_dict().items()}


def by_us(task: Any, optimizer: dict[str, Any]) -> Trained:
    return train(task, steps=NUM_STEPS, optimizer=optimizer)[0]


def descend(optimizer: dict[str, Any], gradients: list[np.ndarray], start: np.ndarray) -> list[np.ndarray]:
    """Return the path of the optimizer from `start` by these gradients; one array a step."""
    weight = nn.Parameter(torch.tensor(start))
    updates = make_optimizer(**optimizer)
    updates.init([("weight", weight)])
    path = []
    for gradient in gradients:
        updates.step([weight], [torch.tensor(gradient)], optimizer["lr"])
        path.append(weight.detach().numpy().copy())
    return path


@pytest.fixture
def gradients() -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.normal(size=7) + 0.5 for _ in range(NUM_STEPS)]


START = np.linspace(-1, 1, 7)


# -- plain steps -------------------------------------------------------------------------------------------------------


def test_sgd_algorithm_1_equals_the_loop_by_hand_bit_for_bit() -> None:
    rng = np.random.default_rng(3)
    inputs, targets = rng.normal(size=(40, 2)), rng.normal(size=40)
    # A rate that is a power of two multiplies without rounding: fused or not, the update is the same number.
    run = train(Rows(inputs, targets, Plane), batch_size=1, epochs=2, seed=5, optimizer={"type": "sgd", "lr": 0.125})[0]
    weight = np.array([0.3, -0.7])
    path = []
    for epoch in range(2):
        for sample in order_of(40, seed=5, epoch=epoch):
            (x0, x1), target = inputs[sample], targets[sample]
            error = x0 * weight[0] + x1 * weight[1] - target
            weight = weight - 0.125 * (2 * error * np.array([x0, x1]))
            path.append(weight)
    assert len(run.weights) == len(path) == 80
    assert all(np.array_equal(state["weight"].numpy(), wanted) for state, wanted in zip(run.weights, path, strict=True))


def test_learning_rate_rule_equals_torch_sgd_bit_for_bit() -> None:
    task = digits()
    ours = by_us(task, {"type": "sgd", "lr": 0.1})
    assert same_bits(ours.after, by_torch(task, lambda parameters: torch.optim.SGD(parameters, lr=0.1)))


def test_momentum_equals_torch_and_the_survey_s_formula(gradients: list[np.ndarray]) -> None:
    task = digits()
    ours = by_us(task, {"type": "sgd", "lr": 0.05, "momentum": 0.9})
    theirs = by_torch(task, lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9))
    assert furthest(ours.after, theirs) <= 1e-12
    now, before = START, START
    for gradient, ours_now in zip(
        gradients, descend({"type": "sgd", "lr": 0.05, "momentum": 0.9}, gradients, START), strict=True
    ):
        now, before = now + 0.9 * (now - before) - 0.05 * gradient, now
        np.testing.assert_allclose(ours_now, now, rtol=0, atol=1e-12)


def test_nesterov_momentum_equals_torch_and_the_look_ahead_form() -> None:
    task = digits()
    options: dict[str, Any] = {"lr": 0.05, "momentum": 0.9, "nesterov": True}
    ours = by_us(task, {"type": "sgd", **options})
    assert furthest(ours.after, by_torch(task, lambda parameters: torch.optim.SGD(parameters, **options))) <= 1e-12
    # v <- mu v - lr grad(w + mu v); w <- w + v, whose look-ahead point w + mu v is what the optimizer holds.
    curvature = np.array([1.0, 10.0, 100.0])
    weight, velocity = np.ones(3), np.zeros(3)
    held = nn.Parameter(torch.ones(3, dtype=torch.float64))
    updates = make_optimizer("sgd", momentum=0.9, nesterov=True)
    updates.init([("held", held)])
    for _ in range(50):
        updates.step([held], [torch.tensor(curvature) * held.detach()], 0.005)
        velocity = 0.9 * velocity - 0.005 * curvature * (weight + 0.9 * velocity)
        weight = weight + velocity
        np.testing.assert_allclose(held.detach().numpy(), weight + 0.9 * velocity, rtol=0, atol=1e-12)


def test_nesterov_momentum_needs_fewer_steps_if_ill_conditioned() -> None:
    curvature = torch.tensor([1.0, 1000.0], dtype=torch.float64)

    def steps_to_goal(**options: Any) -> int:
        weight = nn.Parameter(torch.ones(2, dtype=torch.float64))
        updates = make_optimizer("sgd", **options)
        updates.init([("weight", weight)])
        for step in range(1, 100_000):
            updates.step([weight], [curvature * weight.detach()], 1 / 1000)
            if float((curvature * weight.detach() ** 2).sum()) < 1e-12:
                return step
        raise AssertionError("it never arrived")

    root = math.sqrt(1000)
    nesterov = steps_to_goal(momentum=(root - 1) / (root + 1), nesterov=True)
    assert 10 * nesterov < steps_to_goal()


# -- a rate per weight -------------------------------------------------------------------------------------------------


def test_adagrad_equals_torch_and_the_survey_s_formula(gradients: list[np.ndarray]) -> None:
    task = digits()
    ours = by_us(task, {"type": "adagrad", "lr": 0.05, "eps": 1e-10})
    theirs = by_torch(task, lambda parameters: torch.optim.Adagrad(parameters, lr=0.05, eps=1e-10))
    assert furthest(ours.after, theirs) <= 1e-12
    weight, squares = START, np.zeros(7)
    for gradient, reached in zip(
        gradients, descend({"type": "adagrad", "lr": 0.05, "eps": 1e-12}, gradients, START), strict=True
    ):
        squares = squares + gradient**2
        weight = weight - 0.05 * gradient / np.sqrt(squares + 1e-12)
        np.testing.assert_allclose(reached, weight, rtol=0, atol=1e-9)


def test_rmsprop_equals_torch_and_the_survey_s_formula(gradients: list[np.ndarray]) -> None:
    task = digits()
    ours = by_us(task, {"type": "rmsprop", "lr": 0.002, "alpha": 0.95, "eps": 1e-8})
    theirs = by_torch(task, lambda parameters: torch.optim.RMSprop(parameters, lr=0.002, alpha=0.95, eps=1e-8))
    assert furthest(ours.after, theirs) <= 1e-12
    weight, squares = START, np.zeros(7)
    options: dict[str, Any] = {"type": "rmsprop", "lr": 0.002, "alpha": 0.95, "eps": 1e-12}
    for gradient, reached in zip(gradients, descend(options, gradients, START), strict=True):
        squares = 0.95 * squares + 0.05 * gradient**2
        weight = weight - 0.002 * gradient / np.sqrt(squares + 1e-12)
        np.testing.assert_allclose(reached, weight, rtol=0, atol=1e-9)


def test_adam_equals_torch_and_the_formula_of_its_paper(gradients: list[np.ndarray]) -> None:
    task = digits()
    ours = by_us(task, {"type": "adam", "lr": 0.003})
    assert furthest(ours.after, by_torch(task, lambda parameters: torch.optim.Adam(parameters, lr=0.003))) <= 1e-12
    weight, mean, squares = START, np.zeros(7), np.zeros(7)
    path = descend({"type": "adam", "lr": 0.003, "betas": (0.9, 0.999), "eps": 1e-8}, gradients, START)
    for step, (gradient, reached) in enumerate(zip(gradients, path, strict=True), start=1):
        mean = 0.9 * mean + 0.1 * gradient
        squares = 0.999 * squares + 0.001 * gradient**2
        corrected = np.sqrt(squares / (1 - 0.999**step)) + 1e-8
        weight = weight - 0.003 * mean / (1 - 0.9**step) / corrected
        np.testing.assert_allclose(reached, weight, rtol=0, atol=1e-9)


# -- learning rates over time ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "rate"),
    [
        ({"type": "step", "every_steps": 4, "gamma": 0.5}, lambda done: 0.2 * 0.5 ** (done // 4)),
        ({"type": "cosine"}, lambda done: 0.2 * (1 + math.cos(math.pi * done / 12)) / 2),
        ({"type": "linear", "end_factor": 0.25}, lambda done: 0.2 * (1 - 0.75 * done / 12)),
    ],
    ids=["step", "cosine", "linear"],
)
def test_decaying_learning_rate_is_the_schedule_s_also_after_a_resume(
    schedule: dict[str, Any], rate: Callable[[int], float], tmp_path: Path
) -> None:
    rates = rates_of_a_resumed_run(schedule, tmp_path)
    np.testing.assert_allclose(rates, [rate(done) for done in range(12)], rtol=1e-12, atol=1e-15)
    assert rates == sorted(rates, reverse=True)
    assert rates[0] > rates[-1]


def rates_of_a_resumed_run(schedule: dict[str, Any], tmp_path: Path) -> list[float]:
    """Return the rates of 12 steps from 0.2 on, which are those of a run that was stopped and resumed."""
    task = regression()
    config: dict[str, Any] = {"optimizer": {"type": "sgd", "lr": 0.2}, "lr_schedule": schedule}
    whole = train(task, steps=12, **config)[0]
    rates = [line["lr"] for line in whole.steps]
    writer = CheckpointWriter(str(tmp_path), keep=2)

    def stop_at_five(replica: Replica, collective: object, calls: object) -> None:
        record = replica.recorder.record

        def stopping(line: dict[str, Any]) -> None:
            record(line)
            replica.stop_requested |= line["step"] == 4  # a stop is agreed on in the step that follows

        replica.recorder.record = stopping  # type: ignore[method-assign]

    first = train(task, steps=12, checkpoints=writer, prepare=stop_at_five, **config)[0]
    writer.wait()
    writer.close()
    found, warnings = latest_good(str(tmp_path))
    assert found is not None
    assert warnings == []
    second = train(task, steps=12, load=lambda: Loaded(found), **config)[0]
    assert first.outcome.ended == "interrupted"
    assert [line["step"] for line in first.steps + second.steps] == list(range(1, 13))
    assert [line["lr"] for line in first.steps + second.steps] == rates
    assert same_bits(second.after, whole.after)
    return rates


def falling(part: float) -> float:
    """Return the part of a cosine's way from 1 down to 0 that is left."""
    return (1 + math.cos(math.pi * part)) / 2


SPECIAL: dict[str, tuple[dict[str, Any], Callable[[int], float]]] = {
    "CosineAnnealingWarmRestarts": (
        {"T_0": 4, "T_mult": 2},
        lambda done: 0.2 * (falling(done / 4) if done < 4 else falling((done - 4) / 8)),
    ),
    "CyclicLR": (
        {"base_lr": 0.05, "max_lr": 0.25, "step_size_up": 3, "cycle_momentum": False},
        lambda done: 0.25 - 0.2 * abs(done % 6 - 3) / 3,
    ),
    "OneCycleLR": (  # up in a quarter of the steps from a 25th of the rate, down to a 10,000th of that
        {"max_lr": 0.5, "total_steps": 13, "pct_start": 0.25, "cycle_momentum": False},
        lambda done: (
            0.5 - 0.48 * falling(done / 2.25) if done <= 2.25 else 2e-6 + (0.5 - 2e-6) * falling((done - 2.25) / 9.75)
        ),
    ),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_restarted_cyclic_and_one_cycle_rates_are_torch_s_and_their_formulas_also_after_a_resume(
    name: str, tmp_path: Path
) -> None:
    arguments, rate = SPECIAL[name]
    rates = rates_of_a_resumed_run({"type": f"torch.optim.lr_scheduler:{name}", **arguments}, tmp_path)
    np.testing.assert_allclose(rates, [rate(done) for done in range(12)], rtol=1e-9, atol=1e-12)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.2)
    scheduler = getattr(torch.optim.lr_scheduler, name)(optimizer, **arguments)
    for found in rates:
        assert found == optimizer.param_groups[0]["lr"]
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("name", ["one-cycle", "cyclic", "restarts"])
def test_the_configs_of_special_schedules_have_a_rate_in_every_step(name: str) -> None:
    config = load_train_config(Path(__file__).parents[3] / f"configs/train/digits-{name}.yaml")
    schedule = config.train.lr_schedule.model_dump()
    total = config.train.steps or (config.train.epochs or 0) * 23  # batches of 64 of 1,438 samples
    rates = [lr_at(schedule, config.train.optimizer.lr, step) for step in range(1, total + 1)]
    turns = np.sign(np.diff(rates))
    assert 0 <= min(rates) < max(rates) / 9
    assert 1 <= np.count_nonzero(turns[1:] != turns[:-1]) < 20  # it goes up and down


def test_learning_rate_warmup_is_a_ramp_to_the_rate() -> None:
    run = train(
        regression(),
        steps=12,
        optimizer={"type": "sgd", "lr": 0.2},
        lr_schedule={"type": "constant", "warmup_steps": 8},
    )[0]
    np.testing.assert_allclose(
        [line["lr"] for line in run.steps], [0.2 * min(1, k / 8) for k in range(1, 13)], rtol=1e-12
    )
