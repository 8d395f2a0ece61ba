"""The network that writes weights: its shapes, its gradients, a state handed on, and any space of a user's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import orchestray
from orchestray.search.trials.one_shot.hypernetwork import HyperNetwork
from orchestray.search.trials.one_shot.smash import SmashTrial
from support.mixed_space import BEST, mixed_config

torch.set_num_threads(1)

COMMON: dict[str, Any] = {"seed": 0, "finalists": 2, "architecture_part": 0.5, "num_judged": 16}


def test_weights_begin_as_the_networks_own_and_fit_any_width_that_was_expected() -> None:
    writer = HyperNetwork(hidden=8, seed=0, dtype=torch.float32)
    wide, narrow = nn.Linear(6, 5), nn.Linear(6, 2)
    writer.expect(narrow)
    writer.expect(wide)
    for network in (wide, narrow, nn.Linear(9, 7)):  # the last is larger than was expected: it gets its own
        written = writer.write({"width": network.out_features}, network)
        assert {name: t.shape for name, t in written.items()} == {n: p.shape for n, p in network.named_parameters()}
    sizes = {name: tuple(tensor.shape) for name, tensor in writer.parameters.items() if "weight" in name}
    assert sizes == {"weight 2d": (7, 5, 6), "weight 2d 7x9": (7, 7, 9)}


def test_architectures_get_weights_of_their_own_from_one_set_that_learns_from_each() -> None:
    writer = HyperNetwork(hidden=8, seed=0, dtype=torch.float64)
    network = nn.Linear(4, 3).double()
    one, other = (writer.write({"kind": kind}, network)["weight"] for kind in ("a", "b"))
    assert not torch.allclose(one, other)
    grads = torch.autograd.grad(one.square().sum(), list(writer.parameters.values()), allow_unused=True)
    assert [grad is not None for grad in grads] == ["bias" not in name for name in writer.parameters]


def test_architectures_that_need_opposite_weights_of_one_name_both_get_them() -> None:
    """Fit y = w x and y = -w x: the mean loss of one w for both is at least the mean square of the target."""
    writer, network = HyperNetwork(hidden=8, seed=0, dtype=torch.float64), nn.Linear(4, 1, bias=False).double()
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(64, 4, dtype=torch.float64, generator=draws)
    target = x @ torch.tensor([[1.0], [-2.0], [0.5], [0.0]], dtype=torch.float64)

    def loss(sign: float) -> torch.Tensor:
        written = writer.write({"sign": sign}, network)["weight"]
        return (sign * x @ written.T - target).square().mean()

    assert float(loss(1.0) + loss(-1.0)) / 2 > 0.5 * float(target.square().mean())
    optimizer = torch.optim.Adam(writer.parameters.values(), lr=0.03)
    for step in range(400):
        optimizer.zero_grad()
        loss((-1.0) ** step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert max(float(loss(sign)) for sign in (1.0, -1.0)) < 0.02 * float(target.square().mean())


def test_a_trial_that_goes_on_from_its_state_is_one_that_was_never_paused() -> None:
    config = mixed_config(steps=20)
    whole = SmashTrial(config, **COMMON)
    whole.advance(20)
    first = SmashTrial(config, **COMMON)
    first.advance(9)
    second = SmashTrial(config, **COMMON)
    second.load(first.state())
    second.advance(20)
    ours, theirs = second.state(), whole.state()
    assert ours.position == theirs.position
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert all(torch.equal(ours.tensors[name], theirs.tensors[name]) for name in ours.tensors)


def test_the_planted_network_is_ranked_first_and_left_behind(tmp_path: Path) -> None:
    trial = SmashTrial(mixed_config(steps=100), **COMMON)
    assert trial.advance(100).told["genomes"][0] == BEST
    trial.leave_run(tmp_path / "best")
    run = orchestray.load_run(tmp_path / "best")
    assert run.load_task().genome == BEST
    assert run.result["epochs"] == 100 * 32 / 128  # half of the 256 rows are the architecture's
    batch = run.load_task().to_batch(run.load_task().dataset("validation"))
    with torch.no_grad():
        loss = float(run.load_task().loss(run.load_model()(batch["inputs"]), batch))
    assert loss == pytest.approx(trial.validate(trial.child(BEST))["loss"], rel=1e-5)


def test_a_step_of_what_writes_the_weights_is_clipped_as_the_config_says() -> None:
    plain = {"optimizer": {"type": "sgd", "lr": 1.0}, "grad_clip": 0.01}
    trial = SmashTrial(mixed_config(steps=2, **plain), **COMMON)
    trial.advance(1)  # parameters come up with the first network that is drawn
    before = {name: tensor.detach().clone() for name, tensor in trial.writer.parameters.items()}
    trial.advance(2)
    moved = [(trial.writer.parameters[name].detach() - tensor).square().sum() for name, tensor in before.items()]
    assert 0 < float(sum(moved)) ** 0.5 <= 0.01 * (1 + 1e-5)


def test_the_names_of_metrics_are_known_before_the_first_step() -> None:
    trial = SmashTrial(mixed_config(steps=2), **COMMON)
    assert trial.metric_names(["other"]) == ["closeness"]
    assert trial.step == 0


def test_a_metric_of_which_less_is_better_ranks_the_other_way_round() -> None:
    one, other = (
        SmashTrial(mixed_config(steps=4), **COMMON, metric="closeness", less_is_better=less) for less in (False, True)
    )
    batch = {"inputs": torch.rand(8, 4), "target": torch.rand(8)}
    assert one.judge(BEST, batch) == -other.judge(BEST, batch) > 0
