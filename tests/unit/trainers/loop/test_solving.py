"""Steps by a solver in the loop: any number of replicas is the single process, and a restart changes nothing."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good
from orchestray.trainers.loop.checkpoint_source import Loaded
from orchestray.trainers.loop.replica import Replica
from orchestray.trainers.solvers.registry import SOLVERS as SOLVER_REGISTRY
from orchestray.trainers.tasks.digits_networks import DeepStacking
from support.threads import run_replicas
from support.tiny_task import TinyTask
from support.training import Rows, Trained, furthest, same_bits, settings_for, state_of, stream_of, train

SAMPLES = 40
SOLVERS: dict[str, dict[str, Any]] = {
    "conjugate_gradient": {},
    "bfgs": {},
    "lbfgs": {"history": 4},
    "newton": {"weight_decay": 0.01},
    "levenberg_marquardt": {},
    "hessian_free": {"iterations": 10},
    "stochastic_lbfgs": {"lr": 0.1, "pair_every_steps": 2, "anchor_every_steps": 3},
    "svrg": {"lr": 0.1, "anchor_every_steps": 3},
    "neumann": {"lr": 0.5},
    "admm": {"warmup_steps": 2},
    "stacking": {"steps_per_module": 3},
}


def task(name: str = "", hidden: int = 4) -> Rows:
    """Return three classes of points that overlap; a small network, or with `hidden` 0 logistic regression."""
    rng = np.random.default_rng(0)
    targets = rng.integers(0, 3, SAMPLES)
    inputs = rng.normal(size=(SAMPLES, 3)) + np.eye(3)[targets]

    between = nn.ReLU if name == "admm" else nn.Tanh

    def model() -> nn.Module:
        if name == "stacking":
            return DeepStacking(
                3, 2, 2, 3
            )  # more hidden units than inputs are nearly dependent while weights are small
        return nn.Sequential(nn.Linear(3, hidden), between(), nn.Linear(hidden, 3)) if hidden else nn.Linear(3, 3)

    return Rows(inputs, targets, model)


def solve(name: str, data: int = 1, *, made_of: Any = None, **changes: Any) -> list[Trained]:
    whole = {"batch_size": SAMPLES, "steps": 6, "optimizer": None, "solver": {"type": name, **SOLVERS[name]}}
    return train(task(name) if made_of is None else made_of, data, **{**whole, **changes})


@cache
def alone(name: str) -> Trained:
    """Return the run of a single process."""
    return solve(name)[0]


@pytest.mark.parametrize(
    ("name", "data", "accumulate"),
    [
        *((name, 3, 1) for name in SOLVERS),
        # Parts of a share are summed in the oracle; these ask it for every kind of sum.
        *((name, 2, 2) for name in ("lbfgs", "newton", "levenberg_marquardt", "svrg", "admm", "stacking")),
    ],
)
def test_iterates_of_replicas_are_those_of_one_process(name: str, data: int, accumulate: int) -> None:
    replicas = solve(name, data, accumulate=accumulate)
    for own, shared in zip(alone(name).weights, replicas[0].weights, strict=True):
        assert furthest(own, shared) < 1e-10
    for replica in replicas[1:]:
        assert same_bits(replica.after, replicas[0].after)
        assert same_bits(replica.optimizer[-1], replicas[0].optimizer[-1])
    for own_line, line in zip(alone(name).steps, replicas[0].steps, strict=True):
        assert line["loss"] == pytest.approx(own_line["loss"], abs=1e-10)
    assert alone(name).steps[-1]["loss"] < alone(name).steps[0]["loss"]


def test_directions_without_curvature_are_left_alone_by_any_number_of_replicas() -> None:
    """Take the softmax: adding a number to all classes' weights changes nothing."""

    def newton(data: int) -> Trained:
        return solve("newton", data, made_of=task(hidden=0), solver={"type": "newton"}, steps=8)[0]

    alone = newton(1)
    for data in (2, 3):
        assert furthest(alone.after, newton(data).after) < 1e-10
    moved = alone.after["weight"] - alone.before["weight"]
    assert float(moved.abs().max()) > 0.1
    assert float(moved.sum(0).abs().max()) < 1e-10


@pytest.mark.parametrize(
    "name", ["hessian_free", "levenberg_marquardt", "newton", "neumann", "svrg", "stochastic_lbfgs"]
)
def test_solvers_of_small_batches_are_those_of_one_process_too(name: str) -> None:
    solver = {"type": name, **SOLVERS[name], "weight_decay": 0.01}
    (alone,) = solve(name, made_of=task(hidden=0), batch_size=15, steps=7, solver=solver)
    replicas = solve(name, 2, made_of=task(hidden=0), batch_size=15, steps=7, solver=solver)
    assert furthest(alone.after, replicas[0].after) < 1e-10


@pytest.mark.parametrize("name", SOLVERS)
def test_a_run_that_stops_and_resumes_is_the_run_that_did_not_to_the_bit(name: str, tmp_path: Path) -> None:
    whole = alone(name)
    writer = CheckpointWriter(str(tmp_path), keep=1)
    solve(name, steps=4, checkpoints=writer)
    writer.wait()
    found, _ = latest_good(str(tmp_path))
    assert found is not None
    (rest,) = solve(name, load=lambda: Loaded(found))
    assert [line["step"] for line in rest.steps] == [5, 6]
    assert same_bits(rest.after, whole.after)
    assert same_bits(rest.optimizer[-1], whole.optimizer[-1])


@pytest.mark.parametrize("name", SOLVERS)
def test_a_replica_that_loses_its_peer_midway_has_the_state_of_its_last_step(name: str) -> None:
    settings = settings_for(2, batch_size=SAMPLES, steps=6, optimizer=None, solver={"type": name, **SOLVERS[name]})
    replicas = [Replica(task(name), settings, stream_of(task(name), settings)) for _ in range(2)]
    # Those that keep value and gradient move the weights before their first pass, the others before a later one.
    fails_at = 1 if SOLVER_REGISTRY.params(name).needs_same_batch else 2
    calls, usual = [0], replicas[1].task.loss

    def loss(outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        calls[0] += replicas[1].position.step == 3
        if calls[0] == fails_at:
            raise PeerLostError("gone")
        return usual(outputs, batch)

    replicas[1].task.loss = loss  # type: ignore[method-assign]

    def run(collective: Collective) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        replica = replicas[collective.rank]
        replica.connect(collective)
        with pytest.raises(PeerLostError):
            replica.run(started_at=0.0)
        collective.abort()
        return state_of(replica.model), {k: v.clone() for k, v in replica.optimizer.state_tensors().items()}

    finished = solve(name, 2, steps=3)
    for model, solver in run_replicas(2, run):
        assert same_bits(model, finished[0].after)
        assert same_bits(solver, finished[0].optimizer[-1])
    assert replicas[0].position.step == 3


def test_newton_s_logged_gradients_show_the_quadratic_rate() -> None:
    (run,) = solve("newton", made_of=task(hidden=0), steps=8)
    norms = [line["grad_norm"] for line in run.steps if line["grad_norm"] > 1e-13]
    near = [norm for norm in norms if norm < 0.1]
    assert len(near) >= 3
    assert all(math.log(after) / math.log(before) > 1.7 for before, after in pairwise(near))


def test_the_loss_of_a_step_is_the_task_s_before_it_and_what_is_minimised_has_the_penalty() -> None:
    (plain,) = solve("lbfgs", steps=1)
    (penalised,) = solve("lbfgs", steps=150, solver={"type": "lbfgs", "weight_decay": 0.1})
    assert penalised.steps[0]["loss"] == pytest.approx(plain.steps[0]["loss"], abs=1e-14)
    rows = task()
    model = penalised.replica.model
    batch = rows.to_batch(rows.table)
    (rows.loss(model(batch["inputs"]), batch)).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, -0.1 * parameter.detach(), rtol=0, atol=1e-8)


def test_the_bytes_of_a_step_are_those_of_its_sums() -> None:
    (run, _) = solve("hessian_free", 2, steps=2)
    parameters = sum(p.numel() for p in run.replica.model.parameters())
    line = run.steps[1]
    vectors = (
        2 + line["cg_iterations"]
    )  # the gradient, the product for the promised decrease, and those of the iterations
    scalars = line["evaluations"] + 1 + 3
    warm = 1  # the product with the last solution
    assert line["bytes_sent"] == pytest.approx(2 * 8 * ((vectors + warm) * parameters + scalars), abs=16)


def test_what_a_solver_cannot_take_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has to see all 40 samples; set it to 40 or more"):
        solve("lbfgs", batch_size=39)
    normalised = TinyTask(batch_norm=True)
    with pytest.raises(ConfigError, match="running statistics of batch normalisation"):
        solve("lbfgs", made_of=normalised)
    with pytest.raises(TrainingError, match="the model draws random numbers"):
        solve("hessian_free", made_of=TinyTask(dropout=0.5))

    class Wide(TinyTask):
        def build_model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(4, 100), nn.Linear(100, 100), nn.Linear(100, 2))

    with pytest.raises(ConfigError, match="bfgs holds a number for each pair of parameters, and the model has 10,802"):
        solve("bfgs", made_of=Wide())

    class Changing(TinyTask):
        def to_training_batch(self, columns: Any, draws: Any) -> dict[str, Tensor]:
            return self.to_batch(columns)

    with pytest.raises(ConfigError, match="changes its samples at random"):
        solve("svrg", made_of=Changing())


def test_a_loss_between_replicas_is_differentiated_once_alone() -> None:
    class Between(Rows):
        def loss(self, outputs: Tensor, batch: dict[str, Tensor], *, gather: Any = None) -> Tensor:
            gathered, targets = gather(outputs), gather(batch["targets"])
            return nn.functional.cross_entropy(gathered - gathered.mean(0), targets)

    rows = task()
    rows.__class__ = Between
    for name, solver in SOLVERS.items():
        if SOLVER_REGISTRY.params(name).needs_curvature:
            with pytest.raises(ConfigError, match=f"the task uses gather, unknown to {name} on several replicas"):
                solve(name, 2, made_of=rows)
        elif name not in ("admm", "stacking"):
            (alone,), replicas = (solve(name, data, made_of=rows, steps=3) for data in (1, 2))
            assert furthest(alone.after, replicas[0].after) < 1e-10, solver


def test_replicas_without_samples_are_refused_where_each_needs_some() -> None:
    few = Rows(np.ones((2, 3)), np.arange(2), lambda: nn.Sequential(nn.Linear(3, 3)))
    with pytest.raises(ConfigError, match="admm needs samples on each replica, and 3 replicas share 2"):
        solve("admm", 3, made_of=few)
    (alone,), replicas = (solve("lbfgs", data, made_of=few, steps=3) for data in (1, 3))
    assert furthest(alone.after, replicas[0].after) < 1e-10


def test_what_is_no_scalar_is_refused_as_a_loss() -> None:
    class Unreduced(Rows):
        def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
            return nn.functional.cross_entropy(outputs, batch["targets"], reduction="none")

    rows = task()
    rows.__class__ = Unreduced
    with pytest.raises(TrainingError, match=r"loss\(\) returned a tensor of shape \(40,\)"):
        solve("lbfgs", made_of=rows)


def test_data_that_are_not_numbers_end_the_run_with_a_sentence() -> None:
    with pytest.raises(TrainingError, match="The loss is nan at step 1, before the solver moves the weights"):
        solve("lbfgs", made_of=TinyTask(nan_at=3))


def test_frozen_parameters_do_not_move() -> None:
    class Frozen(TinyTask):
        def build_model(self) -> nn.Module:
            model = super().build_model()
            next(model.parameters()).requires_grad_(False)
            return model

    (run,) = solve("bfgs", made_of=Frozen())
    assert torch.equal(run.after["0.weight"], run.before["0.weight"])
    assert not torch.equal(run.after["0.bias"], run.before["0.bias"])
    assert len(run.optimizer[-1]["solver.inverse"]) == 8 + 18


def test_a_model_without_trained_parameters_is_refused() -> None:
    rows = task()
    rows._model = lambda: nn.Linear(3, 3).requires_grad_(False)
    with pytest.raises(ConfigError, match=r"train\.solver: the model has no parameter that is trained"):
        solve("lbfgs", made_of=rows)
