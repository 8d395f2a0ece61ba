"""Synchronized batch normalisation is that of one process; local statistics come together."""

from __future__ import annotations

import copy
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from orchestray.platform.comm.collective import Collective
from orchestray.platform.comm.solo import SoloCollective
from orchestray.platform.errors import TrainingError
from orchestray.trainers.core.batch_norm import (
    Averaging,
    average_buffers,
    has_synchronized,
    running_statistics,
    synchronize,
    without_torchs_group,
)
from support.threads import run_replicas

NUM_SAMPLES = 9
SHARES = {1: [9], 2: [7, 2], 3: [4, 0, 5], 4: [1, 3, 5, 0]}
KINDS = {
    1: (nn.BatchNorm1d, ()),
    11: (nn.BatchNorm1d, (6,)),
    2: (nn.BatchNorm2d, (3, 5)),
    3: (nn.BatchNorm3d, (2, 3, 2)),
}
OPTIONS: list[dict[str, Any]] = [
    {"affine": False},
    {"momentum": None},
    {"track_running_stats": False},
    {"eps": 0.1},
]


def model_of(kind: int, options: dict[str, Any], dtype: torch.dtype) -> nn.Module:
    """Return a model with normalisations on both sides of a nonlinearity: gradients flow through one into the other."""
    norm = KINDS[kind][0]
    torch.manual_seed(0)
    model = nn.Sequential(norm(4, **options), nn.Tanh(), norm(4, **options)).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(0.5, 1.5)
    return model


def inputs_of(kind: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (NUM_SAMPLES, 4, *KINDS[kind][1])
    x = torch.randn(shape, generator=generator, dtype=dtype)
    return x * 2 + 1, torch.randn(shape, generator=generator, dtype=dtype)


def run(model: nn.Module, x: Tensor, weight: Tensor, passes: int = 2) -> tuple[Tensor, Tensor]:
    """Run some passes, and return the outputs and input gradients of the last.

    The loss is this part of a mean over samples.
    """
    for _ in range(passes):
        model.zero_grad()
        leaf = x.clone().requires_grad_()
        outputs = model(leaf)
        ((outputs * weight).sum() / (NUM_SAMPLES * weight.shape[1])).backward()
    assert leaf.grad is not None
    return outputs.detach(), leaf.grad


# What is summed up depends on the kind, what is done with the sums on the options: each once, not each with each.
@pytest.mark.parametrize(
    ("kind", "options", "dtype"),
    [
        *((kind, {}, torch.float64) for kind in KINDS),
        *((2, options, torch.float64) for options in OPTIONS),
        (1, {"momentum": None}, torch.float32),
        (3, {}, torch.float32),
    ],
    ids=lambda value: "-".join(value) or "defaults" if isinstance(value, dict) else str(value),
)
def test_synchronized_equals_one_process_forward_backward_and_running_statistics(
    kind: int, options: dict[str, Any], dtype: torch.dtype
) -> None:
    x, weight = inputs_of(kind, dtype)
    original = model_of(kind, options, dtype)
    alone = copy.deepcopy(original)
    outputs, gradient = run(alone, x, weight)
    close: Any = dict.fromkeys(("atol", "rtol"), 1e-6 if dtype == torch.float32 else 1e-12)
    for size, shares in SHARES.items():

        def replica(collective: Collective, shares: list[int] = shares) -> Any:
            model = synchronize(copy.deepcopy(original), lambda: collective)
            part = run(model, x.split(shares)[collective.rank], weight.split(shares)[collective.rank])
            return *part, [p.grad for p in model.parameters()], [b.clone() for b in model.buffers()]

        parts = run_replicas(size, replica)
        torch.testing.assert_close(torch.cat([part[0] for part in parts]), outputs, **close)
        torch.testing.assert_close(torch.cat([part[1] for part in parts]), gradient, **close)
        for index, parameter in enumerate(alone.parameters()):
            torch.testing.assert_close(sum(part[2][index] for part in parts), parameter.grad, **close)
        for part in parts:
            for own, theirs, first in zip(part[3], alone.buffers(), parts[0][3], strict=True):
                torch.testing.assert_close(own, theirs, **close)
                assert torch.equal(own, first), "running statistics are the same bits on every replica"


def test_torch_s_synchronized_normalisation_is_that_of_one_process_on_any_number_of_replicas() -> None:
    x, weight = inputs_of(2, torch.float64)
    original = model_of(2, {}, torch.float64)
    alone = copy.deepcopy(original)
    outputs, _ = run(alone, x, weight)
    converted = without_torchs_group(nn.SyncBatchNorm.convert_sync_batchnorm(original))
    assert not has_synchronized(converted)
    torch.testing.assert_close(run(copy.deepcopy(converted), x, weight)[0], outputs)

    def replica(collective: Collective) -> tuple[Tensor, list[Tensor]]:
        model = synchronize(copy.deepcopy(converted), lambda: collective)
        part, _ = run(model, x.split(SHARES[2])[collective.rank], weight.split(SHARES[2])[collective.rank])
        return part, list(model.buffers())

    parts = run_replicas(2, replica)
    torch.testing.assert_close(torch.cat([part for part, _ in parts]), outputs)
    torch.testing.assert_close(parts[0][1], list(alone.buffers()))


def test_torch_s_synchronized_normalisation_does_not_meet_other_workers_of_a_layout() -> None:
    """Torch's own would look for a process group, and refuse a CPU."""
    norm = cast(nn.SyncBatchNorm, without_torchs_group(nn.SyncBatchNorm(4)))
    assert isinstance(norm, nn.SyncBatchNorm)
    assert type(norm).forward is nn.BatchNorm2d.forward


@pytest.mark.parametrize("options", [{}, {"track_running_stats": False}])
def test_eval_mode_is_that_of_one_process_and_needs_no_other_replica(options: dict[str, Any]) -> None:
    x, _ = inputs_of(2, torch.float64)
    original = model_of(2, options, torch.float64).eval()

    def replica(collective: Collective) -> Tensor | None:
        model = synchronize(copy.deepcopy(original), lambda: collective)
        return model(x) if collective.rank == 0 else None

    outputs = run_replicas(2, replica)[0]
    assert outputs is not None
    assert torch.equal(outputs, original(x))


def test_bfloat16_inputs_with_float32_parameters_stay_close_to_one_process() -> None:
    x, _ = inputs_of(2, torch.float32)
    original = model_of(2, {}, torch.float32)[0]  # type: ignore[index]
    expected = copy.deepcopy(original)(x.bfloat16())

    def replica(collective: Collective) -> Tensor:
        model = synchronize(nn.Sequential(copy.deepcopy(original)), lambda: collective)
        outputs: Tensor = model(x.bfloat16().split(SHARES[2])[collective.rank])
        return outputs

    outputs = torch.cat(run_replicas(2, replica))
    assert outputs.dtype == expected.dtype
    torch.testing.assert_close(outputs, expected, atol=0.02, rtol=0.02)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_statistics_of_low_precision_inputs_are_as_precise_as_those_of_one_process(
    dtype: torch.dtype, affine: bool
) -> None:
    torch.manual_seed(0)
    x, upstream = (20 + 0.3 * torch.randn(9, 3, 2, 2)).to(dtype), torch.randn(9, 3, 2, 2).to(dtype)

    def normalise(norm: nn.Module, x: Tensor, upstream: Tensor) -> tuple[Tensor, ...]:
        x = x.clone().requires_grad_()
        outputs = norm(x)
        outputs.backward(upstream)
        assert x.grad is not None
        return outputs.detach(), x.grad, *(parameter.grad for parameter in norm.parameters())

    def replica(collective: Collective) -> tuple[tuple[Tensor, ...], list[Tensor]]:
        norm = synchronize(nn.BatchNorm2d(3, affine=affine), lambda: collective)
        own = [whole.split(SHARES[2])[collective.rank] for whole in (x, upstream)]
        return normalise(norm, *own), list(norm.buffers())

    alone, exact = nn.BatchNorm2d(3, affine=affine), nn.BatchNorm2d(3, affine=affine).double()
    found, wanted = normalise(alone, x, upstream), normalise(exact, x.double(), upstream.double())
    (first, buffers), (second, _) = run_replicas(2, replica)
    parts = [torch.cat([first[index], second[index]]) for index in (0, 1)]
    parts += [a + b for a, b in zip(first[2:], second[2:], strict=True)]
    for together, own, right in zip(
        [*parts, *buffers[:2]], [*found, *alone.buffers()][:-1], [*wanted, *exact.buffers()][:-1], strict=True
    ):
        apart = [float((each.double() - right).abs().max()) for each in (together, own)]
        assert apart[0] <= 2 * apart[1] + 1e-5 * float(right.abs().max())


def test_modules_names_and_parameters_stay_and_one_replica_is_plain_batch_norm() -> None:
    original = model_of(2, {}, torch.float64)
    model = copy.deepcopy(original)
    modules, parameters = list(model.modules()), list(model.parameters())
    assert not has_synchronized(model)
    assert synchronize(model, SoloCollective) is model
    assert has_synchronized(model)
    assert list(model.modules()) == modules
    assert [id(p) for p in model.parameters()] == [id(p) for p in parameters]
    assert list(model.state_dict()) == list(original.state_dict())
    assert isinstance(model[0], nn.BatchNorm2d)  # type: ignore[index]
    x, weight = inputs_of(2, torch.float64)
    for own, theirs in zip(run(model, x, weight), run(original, x, weight), strict=True):
        assert torch.equal(own, theirs)
    assert not has_synchronized(nn.Linear(1, 1))


def test_one_value_per_channel_over_all_replicas_is_refused_as_torch_does() -> None:
    def replica(collective: Collective) -> None:
        model = synchronize(nn.Sequential(nn.BatchNorm1d(3)), lambda: collective)
        with pytest.raises(ValueError, match="more than 1 value per channel over all workers"):
            model(torch.zeros(1 - collective.rank, 3))

    run_replicas(2, replica)


class Activated(nn.BatchNorm2d):
    """A normalisation with an activation in it, as in timm."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        assert self.num_batches_tracked is not None
        if self.training:
            self.num_batches_tracked.add_(1)
        by_batch = (self.running_mean, self.running_var, self.weight, self.bias, self.training)
        return functional.batch_norm(input, *by_batch, momentum=0.3, eps=self.eps).relu()


class Doubled(nn.BatchNorm2d):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return 2 * super().forward(input)


class OfAnyShape(_BatchNorm):
    def _check_input_dim(self, input: Tensor) -> None:  # noqa: A002
        return


@pytest.mark.parametrize("kind", [Activated, Doubled, OfAnyShape])
def test_normalisations_of_a_class_of_their_own_equal_those_of_one_process(kind: type[nn.Module]) -> None:
    x, weight = inputs_of(2, torch.float64)
    original = nn.Sequential(kind(4), nn.Tanh(), kind(4)).double()  # type: ignore[call-arg]
    alone = copy.deepcopy(original)
    outputs, gradient = run(alone, x, weight)

    def replica(collective: Collective) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
        model = synchronize(copy.deepcopy(original), lambda: collective)
        shares = [x.split(SHARES[2])[collective.rank], weight.split(SHARES[2])[collective.rank]]
        return *run(model, *shares), list(model.buffers()), model.eval()(x)

    parts = run_replicas(2, replica)
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), outputs)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), gradient)
    for part in parts:
        torch.testing.assert_close(part[2], list(alone.buffers()))
        torch.testing.assert_close(part[3], alone.eval()(x))


class ByHand(nn.BatchNorm1d):
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return input - input.mean(0)


def test_a_normalisation_that_computes_its_own_statistics_is_refused_where_there_are_other_replicas() -> None:
    def replica(collective: Collective) -> None:
        model = synchronize(nn.Sequential(ByHand(2)), lambda: collective)
        with pytest.raises(TrainingError, match=r"class ByHand defines its own.*set train\.batch_norm to local"):
            model(torch.zeros(3, 2))

    run_replicas(2, replica)
    assert synchronize(nn.Sequential(ByHand(2)), SoloCollective)(torch.ones(3, 2)).sum() == 0


@pytest.mark.parametrize("samples", [[3, 1], [5, 0, 2]])
def test_local_buffers_become_the_average_by_samples_the_same_on_every_replica(samples: list[int]) -> None:
    def replica(collective: Collective) -> tuple[list[Tensor], list[Tensor]]:
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3), nn.BatchNorm1d(3))
        model.register_buffer("constant", torch.tensor([0.1, 1 / 3]))
        model.register_buffer("seen", torch.tensor([collective.rank == 0, False]))
        generator = torch.Generator().manual_seed(collective.rank)
        for _ in range(collective.rank + 1):
            model(torch.randn(4, 3, generator=generator))
        before = [b.clone() for b in model.buffers()]
        average_buffers(list(model.buffers()), collective, samples[collective.rank], sum(samples))
        return before, [b.clone() for b in model.buffers()]

    results = run_replicas(len(samples), replica)
    befores = [before for before, _ in results]
    for _, after in results:
        for index, value in enumerate(after):
            own = [before[index] for before in befores]
            assert torch.equal(value, results[0][1][index])
            if value.is_floating_point():
                mean = sum(n * b.double() for n, b in zip(samples, own, strict=True)) / sum(samples)
                torch.testing.assert_close(value, mean.float(), atol=1e-6, rtol=1e-6)
            else:
                assert torch.equal(value, torch.stack(own).amax(0))
        assert torch.equal(after[0], torch.tensor([0.1, 1 / 3])), "what is equal everywhere stays as it is"


def test_buffers_that_are_being_averaged_keep_their_values_until_the_wait() -> None:
    def replica(collective: Collective) -> list[list[Any]]:
        norm = nn.BatchNorm1d(2)
        norm(torch.full((4, 2), float(collective.rank)).mul_(torch.arange(4.0).view(4, 1)))
        before = [buffer.clone() for buffer in norm.buffers()]
        averaging = Averaging(running_statistics([norm]), collective, 1, 2)
        assert all(map(torch.equal, norm.buffers(), before))
        averaging.wait()
        return [buffer.tolist() for buffer in norm.buffers()]

    first, second = run_replicas(2, replica)
    assert first == second
    mean, _, count = first
    assert mean == pytest.approx([0.1 * 1.5 / 2] * 2)
    assert count == 1


def test_only_normalisations_in_training_mode_have_statistics_to_average() -> None:
    norms = [nn.BatchNorm1d(1), nn.BatchNorm1d(1).eval(), nn.BatchNorm1d(1, track_running_stats=False), nn.Linear(1, 1)]
    assert [id(buffer) for buffer in running_statistics(norms)] == [id(buffer) for buffer in norms[0].buffers()]
