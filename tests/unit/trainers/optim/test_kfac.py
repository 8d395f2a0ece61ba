"""K-FAC: factors against their definition, steps against a dense inverse, and replicas against one process."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.platform.comm.solo import SoloCollective
from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good
from orchestray.trainers.loop.checkpoint_source import Loaded
from orchestray.trainers.loop.fitting_optimizer import make_fitting
from orchestray.trainers.loop.replica import Replica
from orchestray.trainers.optim.kfac import KFAC
from orchestray.trainers.optim.kronecker import damped_inverses
from support.layouts import LaidOut, layout_settings, train_laid_out
from support.threads import run_replicas
from support.training import digits, furthest, order_of, same_bits, settings_for, state_of, stream_of, train

NUM_SAMPLES = 12
DAMPING = 0.02
LR = 0.3
FEW = {"validation_fraction": 0.02}


def watching(model: nn.Module, replicas: Collective | None = None, **keys: Any) -> KFAC:
    """Return an optimizer of a model, ready for the first step."""
    optimizer = KFAC(momentum=0.0, **keys)
    optimizer.prepare(model)
    optimizer.observe(model, {})
    optimizer.init(model.named_parameters())
    optimizer.join(replicas or SoloCollective())
    return optimizer


def linear() -> tuple[nn.Module, Tensor]:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(NUM_SAMPLES, 3)


def convolution() -> tuple[nn.Module, Tensor]:
    layers = nn.Conv2d(2, 3, (3, 2), stride=(1, 2), padding=(1, 0), dilation=(2, 1)), nn.Flatten(), nn.Linear(18, 2)
    return nn.Sequential(*layers), torch.randn(NUM_SAMPLES, 2, 5, 4)


def same_padding() -> tuple[nn.Module, Tensor]:
    layers = nn.Conv2d(1, 2, (2, 3), padding="same", bias=False), nn.Flatten(), nn.Linear(24, 2, bias=False)
    return nn.Sequential(*layers), torch.randn(NUM_SAMPLES, 1, 3, 4)


def rows_of(module: nn.Module, inputs: Tensor) -> Tensor:
    """Return a row of the layer's inputs for each of its positions, by what the outputs are of unit weights."""
    if isinstance(module, nn.Linear):
        rows = inputs
    else:
        assert isinstance(module, nn.Conv2d)
        num = module.weight[0].numel()
        probe = nn.Conv2d(
            module.in_channels, num, module.kernel_size, module.stride, module.padding, module.dilation, bias=False
        )
        probe.weight.data = torch.eye(num).reshape(num, *module.weight.shape[1:])
        rows = probe(inputs).movedim(1, -1).reshape(-1, num)
    return rows if module.bias is None else torch.cat([rows, torch.ones(len(rows), 1)], dim=1)


@pytest.mark.parametrize("make", [linear, convolution, same_padding])
def test_a_step_is_that_of_the_dense_inverse_of_the_kronecker_product_of_the_damped_factors(make: Any) -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    try:
        model, inputs = make()
        targets = torch.randint(2, (NUM_SAMPLES,))
        optimizer = watching(model, damping=DAMPING, kl_clip=None)
        seen: dict[nn.Module, tuple[Tensor, Tensor]] = {}
        for module in model:
            module.register_forward_hook(lambda own, given, out: seen.update({own: (given[0], out)}))
        each = functional.cross_entropy(model(inputs), targets, reduction="none")
        layers = [module for module in model if hasattr(module, "weight")]
        expected = {}
        for module in layers:
            given, outputs = seen[module]
            errors = torch.autograd.grad(each.sum(), outputs, retain_graph=True)[0]  # of each sample's own loss
            e = errors.movedim(1, -1).reshape(-1, errors.shape[1])
            a = rows_of(module, given.detach())
            in_factor, out_factor = a.T @ a / len(a), e.T @ e / NUM_SAMPLES
            pi = ((in_factor.trace() / len(in_factor)) / (out_factor.trace() / len(out_factor))).sqrt()
            in_factor = in_factor + pi * DAMPING**0.5 * torch.eye(len(in_factor))
            out_factor = out_factor + DAMPING**0.5 / pi * torch.eye(len(out_factor))
            gradient = e.T @ a / NUM_SAMPLES  # [out, in], row after row: the index of G comes first
            dense = torch.linalg.inv(torch.kron(out_factor, in_factor))
            step = (dense @ gradient.reshape(-1)).reshape(gradient.shape)
            whole = step if module.bias is None else step[:, :-1]
            expected[module.weight] = module.weight.detach() - LR * whole.reshape(module.weight.shape)
            if module.bias is not None:
                expected[module.bias] = module.bias.detach() - LR * step[:, -1]
        optimizer.begin_step(1, NUM_SAMPLES, NUM_SAMPLES)
        functional.cross_entropy(model(inputs), targets).backward()
        parameters = list(model.parameters())
        optimizer.step(parameters, [parameter.grad for parameter in parameters], LR)
        for parameter in parameters:
            assert torch.allclose(parameter, expected[parameter], rtol=0, atol=1e-10)
    finally:
        torch.set_default_dtype(torch.float32)


GROUPS = [{"match": "*.bias", "weight_decay": 0.0, "lr": 2 * LR}, {"match": "0.*", "lr": 0.3 * LR}]
RATES = {"0.weight": 0.3, "0.bias": 2.0, "2.weight": 1.0, "2.bias": 2.0}
"""Rates of the parameters, relative to that of the run."""


def moves(
    model: nn.Module, inputs: Tensor, gradients: Sequence[Tensor] | None = None, **keys: Any
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the moves of the parameters in a step, by their own gradients or other ones, and their own gradients."""
    model = copy.deepcopy(model)
    optimizer = make_fitting({"type": "kfac", "lr": LR, "momentum": 0.0, "damping": DAMPING, **keys}, model)
    optimizer.observe(model, {})
    optimizer.init(model.named_parameters())
    optimizer.join(SoloCollective())
    optimizer.begin_step(1, NUM_SAMPLES, NUM_SAMPLES)
    functional.cross_entropy(model(inputs), torch.arange(NUM_SAMPLES) % 2).backward()
    parameters = list(model.parameters())
    before, own = state_of(model), [parameter.grad for parameter in parameters if parameter.grad is not None]
    optimizer.step(parameters, own if gradients is None else gradients, LR)
    return [before[name] - parameter.detach() for name, parameter in model.named_parameters()], own


def test_groups_change_the_penalty_before_the_inverses_of_whole_layers_and_the_rate_behind_them() -> None:
    torch.manual_seed(0)
    model, inputs = (each.double() for each in linear())
    found, gradients = moves(model, inputs, groups=GROUPS, weight_decay=0.1, kl_clip=None)
    pulls = [
        gradient if name.endswith(".bias") else gradient + 0.1 * parameter.detach()
        for (name, parameter), gradient in zip(model.named_parameters(), gradients, strict=True)
    ]
    plain, _ = moves(model, inputs, pulls, kl_clip=None)
    for move, whole, rate in zip(found, plain, RATES.values(), strict=True):
        assert torch.allclose(move, rate * whole, rtol=1e-12, atol=0)


def test_a_step_in_groups_is_cut_to_the_largest_length_by_the_rate_of_each() -> None:
    torch.manual_seed(0)
    model, inputs = (each.double() for each in linear())
    lengths = []
    for kl_clip in (None, 1e-6):
        found, gradients = moves(model, inputs, groups=GROUPS, kl_clip=kl_clip)
        parts = zip(RATES.values(), found, gradients, strict=True)
        lengths.append(sum(LR * rate * float((move * gradient).sum()) for rate, move, gradient in parts))
    whole, cut = lengths  # of a cut step this is the length over the factor by which it was cut
    assert cut**2 / whole == pytest.approx(1e-6)


def test_a_factor_with_values_that_are_not_finite_is_refused() -> None:
    with pytest.raises(TrainingError, match="K-FAC cannot invert"):
        damped_inverses(torch.full((2, 2), torch.inf), torch.eye(2), 0.1)


def test_a_model_without_layers_that_have_factors_is_refused() -> None:
    with pytest.raises(ConfigError, match="the model has none that is trained"):
        KFAC().prepare(nn.LayerNorm(3))
    with pytest.raises(ConfigError, match="looks at the layers"):
        KFAC().init([("weight", torch.zeros(2, 2))])


class Unusual(nn.Module):
    """A model with sparse gradients, and a layer that gets its input by name."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4, sparse=True)
        self.linear = nn.Linear(4, 3)

    def forward(self, indices: Tensor) -> Tensor:
        output: Tensor = self.linear(input=self.embedding(indices))
        return output


def one_step(model: nn.Module, **keys: Any) -> dict[str, Tensor]:
    """Make one step on four samples, and return how far each parameter went."""
    optimizer = watching(model, kl_clip=None, **keys)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer.begin_step(1, 4, 4)
    model(torch.tensor([1, 2, 3, 4])).square().mean().backward()
    parameters = list(model.parameters())
    optimizer.step(parameters, [parameter.grad for parameter in parameters], LR)
    return {name: before[name] - parameter.detach() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("penalty", [0.0, 0.1])
def test_sparse_gradients_and_inputs_given_by_name_move_as_others(penalty: float) -> None:
    torch.manual_seed(0)
    model = Unusual()
    weights = model.embedding.weight.detach().clone()
    moves = one_step(model, weight_decay=penalty)
    gradient = model.embedding.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    assert torch.allclose(moves["embedding.weight"], LR * (gradient.to_dense() + penalty * weights), atol=1e-7)
    assert model.linear.weight.grad is not None
    plain = LR * (model.linear.weight.grad + penalty * (model.linear.weight.detach() + moves["linear.weight"]))
    assert not torch.allclose(moves["linear.weight"], plain, rtol=0.1)  # it was measured: not a step of SGD


def test_a_step_that_a_lost_replica_breaks_changes_nothing() -> None:
    def body(collective: Collective) -> None:
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = watching(model, collective)
        collective.barrier()
        if collective.rank == 1:
            collective.abort()
            return
        optimizer.begin_step(1, 2, 4)
        model(torch.ones(2, 4)).sum().backward()
        before, state = state_of(model), {key: value.clone() for key, value in optimizer.state_tensors().items()}
        parameters = list(model.parameters())
        with pytest.raises(PeerLostError):
            optimizer.step(parameters, [parameter.grad for parameter in parameters], LR)
        assert same_bits(state_of(model), before)
        assert same_bits(optimizer.state_tensors(), state)

    run_replicas(2, body)


def test_a_new_replica_goes_on_with_inverses_that_only_a_lost_one_held() -> None:
    optimizer = {"type": "kfac", "lr": 0.05, "inverse_every_steps": 3, "inverse_fraction": 0.0}
    task = digits(hidden=[12, 10], **FEW)
    whole = train(task, 2, optimizer=optimizer, steps=6)[0]
    survivor = train(task, 2, optimizer=optimizer, steps=5)[0].replica
    survivor.settings = settings = settings_for(2, optimizer=optimizer, steps=6)
    new = Replica(task, settings, stream_of(task, settings))

    def body(collective: Collective) -> Replica:
        replica = survivor if collective.rank == 1 else new
        assert replica.connect(collective) == 5
        replica.run(started_at=0.0)
        return replica

    for replica in run_replicas(2, body):
        assert same_bits(state_of(replica.model), whole.after)


def trained(data: int = 1, *, model: str = "mlp", steps: int = 7, rest: Any = None, **keys: Any) -> LaidOut:
    optimizer = {"type": "kfac", "lr": 0.05, "damping": 0.03, "inverse_every_steps": 3, "kl_clip": None, **keys}
    hidden = [12, 10] if model == "mlp" else [4, 6]
    settings = layout_settings({"data": data}, optimizer=optimizer, steps=steps, batch_norm="synchronized")
    return train_laid_out(lambda: digits(model=model, hidden=hidden, **FEW), settings, **(rest or {}))


@pytest.mark.parametrize(
    ("model", "keys"),
    [
        ("mlp", {}),
        ("mlp", {"inverse_fraction": 0.0, "weight_decay": 0.01}),
        ("mlp", {"inverse_fraction": 0.67, "kl_clip": 0.001, "statistics_every_steps": 3}),
        ("cnn", {"inverse_fraction": 0.34}),
    ],
)
def test_three_replicas_make_the_steps_of_one_process_whoever_holds_the_inverses(
    model: str, keys: dict[str, Any]
) -> None:
    one, three = trained(model=model, **keys), trained(3, model=model, **keys)
    assert furthest(three.weights, one.weights) <= 1e-9
    assert three.losses == pytest.approx(one.losses, rel=0, abs=1e-9)


@pytest.mark.parametrize("fraction", [0.0, 0.67, 1.0])
def test_replicas_keep_the_same_bits_in_float32(fraction: float) -> None:
    optimizer = {"type": "kfac", "lr": 0.05, "inverse_every_steps": 2, "inverse_fraction": fraction}
    first, *others = train(digits(hidden=[12, 10], **FEW), 3, optimizer=optimizer, steps=4, precision="float32")
    assert all(same_bits(one.after, first.after) for one in others)


def test_a_sample_that_stands_in_for_an_empty_share_is_not_measured() -> None:
    def trained_by(data: int) -> dict[str, Tensor]:
        task = digits(model="cnn", hidden=[4, 6], **FEW)
        optimizer = {"type": "kfac", "lr": 0.05, "damping": 0.03}
        return train(task, data, optimizer=optimizer, steps=3, batch_size=2, batch_norm="synchronized")[0].after

    assert furthest(trained_by(3), trained_by(1)) <= 1e-9


@pytest.mark.parametrize("data", [1, 2])
def test_a_run_resumes_exactly_between_two_inversions(data: int, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"inverse_every_steps": 4, "inverse_fraction": 0.5, "kl_clip": 0.01}
    whole = trained(data, steps=7, **keys)
    trained(data, steps=6, rest={"checkpoints": lambda: CheckpointWriter(tmp_path, keep=1)}, **keys)
    state, _ = latest_good(tmp_path)
    assert state is not None
    resumed = trained(data, steps=7, rest={"load": lambda: Loaded(state)}, **keys)
    assert len(resumed.losses) == 1
    assert same_bits(resumed.weights, whole.weights)


@pytest.mark.parametrize(("data", "workers"), [(2, 1), (3, 2)])
def test_statistics_come_from_the_statistics_workers_alone(data: int, workers: int) -> None:
    """Let the last replicas measure: the factors are those of their shares of the batch, and others get the steps."""
    task, batch_size = digits(hidden=[12, 10], **FEW), 24
    optimizer = {"type": "kfac", "lr": 0.05, "statistics_workers": workers}
    found, *others = train(task, data, optimizer=optimizer, batch_size=batch_size)
    table = task.dataset("train")
    chosen = order_of(len(table), seed=0, epoch=0)[batch_size - batch_size * workers // data : batch_size]
    batch = task.to_batch(table.take(chosen))
    model = task.build_model().double()
    model.load_state_dict(found.before)
    inputs = batch["inputs"].double()
    errors = model(inputs).softmax(1) - functional.one_hot(batch["targets"], 10)
    rows = torch.cat([inputs.flatten(1), inputs.new_ones(len(inputs), 1)], dim=1)
    first, last = ([name for name, _ in model.named_parameters()][index] for index in (0, -2))
    state = found.optimizer[0]
    torch.testing.assert_close(state[f"{first}.inputs"], rows.T @ rows / len(rows), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(state[f"{last}.errors"], errors.T @ errors / len(rows), rtol=1e-12, atol=1e-12)
    assert all(same_bits(other.after, found.after) for other in others)
    everybody = trained(2, steps=3, statistics_workers=2)
    assert furthest(everybody.weights, trained(1, steps=3).weights) <= 1e-9


def test_inverses_are_never_older_than_the_steps_between_two_inversions() -> None:
    model = nn.Linear(3, 2)
    optimizer = watching(model, inverse_every_steps=3)
    parameters = list(model.parameters())
    used, ages = [], []
    for step in range(1, 8):
        optimizer.begin_step(step, 4, 4)
        model.zero_grad()
        model(torch.randn(4, 3)).square().mean().backward()
        optimizer.step(parameters, [parameter.grad for parameter in parameters], LR)
        state = {key: tensor.clone() for key, tensor in optimizer.state_tensors().items()}
        used.append(state["weight.used_inputs"])
        ages.append(optimizer.step_metrics()["inverse_age"])
        assert torch.equal(state["weight.used_inputs"], state["weight.inputs"]) is (ages[-1] == 0)
    assert ages == [0, 1, 2, 0, 1, 2, 0]
    assert [torch.equal(*pair) for pair in itertools.pairwise(used)] == [True, True, False, True, True, False]
