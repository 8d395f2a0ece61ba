"""The exchange of gradients equals one process that sees the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from orchestray.platform.comm.collective import Collective, PeerLostError, ring_bytes
from orchestray.platform.comm.solo import SoloCollective
from orchestray.platform.errors import ConfigError, TrainingError
from orchestray.trainers.core.exchange import MAX_EXTRAS
from orchestray.trainers.sync.allreduce import allreduce
from orchestray.trainers.sync.allreduce.allreduce import AllReduce
from orchestray.trainers.sync.common.buckets import Filling
from orchestray.trainers.sync.factory import make_exchange
from support.threads import make_gloo_threads, run_replicas

SHARES = {
    1: [[12]],
    2: [[5, 4], [3]],
    3: [[1], [], [4, 4, 3]],
    4: [[3, 2], [4], [0, 2], [1]],
}
"""Samples of each micro-batch, for each replica; every size has 12 in all."""


class Net(nn.Module):
    """A network of tied, frozen, sometimes and never used parameters, and one that is not contiguous."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10, dtype=dtype)
        self.hidden = nn.Linear(10, 10, dtype=dtype)
        self.tied = nn.Linear(10, 10, bias=False, dtype=dtype)
        self.tied.weight = self.hidden.weight
        self.frozen = nn.Linear(10, 10, dtype=dtype).requires_grad_(False)
        self.rare = nn.Linear(6, 10, dtype=dtype)
        self.never = nn.Parameter(torch.ones(3, dtype=dtype))
        self.turned = nn.Parameter(torch.randn(4, 10, dtype=dtype).t())

    def forward(self, x: Tensor) -> Tensor:
        h = self.frozen(torch.tanh(self.first(x)))
        chosen = x[:, 0] > 0.9
        if chosen.any():
            h = h.index_add(0, chosen.nonzero()[:, 0], self.rare(x[chosen]))
        return self.tied(torch.tanh(self.hidden(h))) @ self.turned


def batch(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 6, generator=generator, dtype=dtype)
    x[:, 0] = 0.0
    x[11, 0] = 1.0  # one sample of the last replica alone uses `rare`
    return x, torch.randn(12, 4, generator=generator, dtype=dtype)


def model_of(dtype: torch.dtype) -> Net:
    torch.manual_seed(0)
    return Net(dtype)


def mean_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return ((model(x) - y) ** 2).sum(1).mean()


def reference(dtype: torch.dtype) -> tuple[dict[str, Tensor | None], float]:
    model = model_of(dtype)
    loss = mean_loss(model, *batch(dtype))
    loss.backward()
    return gradients(model), loss.item()


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def one_step(
    exchange: AllReduce, model: nn.Module, collective: Collective, dtype: torch.dtype, step: int = 1
) -> tuple[dict[str, Tensor | None], list[float]]:
    shares = SHARES[collective.size]
    start = sum(sum(counts) for counts in shares[: collective.rank])
    counts = [count for count in shares[collective.rank] if count]
    x, y = batch(dtype)
    exchange.before_step(step)
    loss_sum = 0.0
    for number, count in enumerate(counts, start=1):
        loss = mean_loss(model, x[start : start + count], y[start : start + count]) * (count / 12)
        exchange.begin_backward(number == len(counts))
        loss.backward()
        loss_sum += loss.item()
        start += count
    sums = exchange.finish([loss_sum, 1.0])
    result = gradients(model), sums
    exchange.after_step(step)
    return result


def replicated(size: int, dtype: torch.dtype, steps: int = 2, **options: object) -> list[dict[str, Tensor | None]]:
    original = model_of(dtype)
    _, whole_loss = reference(dtype)  # not in the threads: they share the random generator it seeds

    def replica(collective: Collective) -> dict[str, Tensor | None]:
        model = copy.deepcopy(original)
        exchange = AllReduce(**options)
        exchange.attach(model, collective)
        for step in range(1, steps + 1):
            result, sums = one_step(exchange, model, collective, dtype, step)
        assert sums[0] == pytest.approx(whole_loss, rel=1e-6 if dtype == torch.float32 else 1e-12)
        assert sums[1] == size
        return result

    return run_replicas(size, replica)


def assert_same_bits(a: dict[str, Tensor | None], b: dict[str, Tensor | None]) -> None:
    for name, value in a.items():
        other = b[name]
        if value is None or other is None:
            assert value is other, name
        else:
            assert torch.equal(value, other), name


@pytest.mark.parametrize("bucket_mb", [0.0003, 25.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gradients_equal_those_of_one_process_on_the_whole_batch(
    size: int, dtype: torch.dtype, bucket_mb: float
) -> None:
    expected, _ = reference(dtype)
    assert expected["rare.weight"] is not None
    assert expected["never"] is None
    tolerance = 1e-6 if dtype == torch.float32 else 1e-12
    for result in replicated(size, dtype, bucket_mb=bucket_mb):
        for name, value in expected.items():
            if value is None:
                assert result[name] is None, name
            else:
                torch.testing.assert_close(result[name], value, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_gradients_are_the_same_bits_on_every_rank_and_with_overlap_on_or_off(size: int) -> None:
    overlapped = replicated(size, torch.float32, bucket_mb=0.0003, overlap=True)
    after = replicated(size, torch.float32, bucket_mb=0.0003, overlap=False)
    for result in overlapped + after:
        assert_same_bits(result, overlapped[0])


@pytest.mark.parametrize("overlap", [True, False])
def test_a_small_last_bucket_that_is_filled_at_once_has_the_bits_of_one_that_is_filled_gradient_by_gradient(
    overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooked = []
    monkeypatch.setattr(Filling, "_gradient_ready", lambda *_: hooked.append(1))
    at_once = replicated(2, torch.float32, overlap=overlap)
    assert hooked == []
    monkeypatch.undo()
    monkeypatch.setattr(allreduce, "_CACHED_BYTES", 0)
    one_by_one = replicated(2, torch.float32, overlap=overlap)
    for a, b in zip(at_once, one_by_one, strict=True):
        assert_same_bits(a, b)


def test_a_parameter_used_in_an_earlier_micro_batch_only_keeps_its_gradient() -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])
    x = torch.randn(4, 3)

    def replica(collective: Collective) -> list[Tensor]:
        model = copy.deepcopy(layers)
        exchange = AllReduce()
        exchange.attach(model, collective)
        exchange.before_step(1)
        for layer, last in ((0, False), (1, True)):
            exchange.begin_backward(last)
            model[layer](x).sum().backward()
        exchange.finish([])
        return [p.grad for p in model.parameters() if p.grad is not None]

    for result in run_replicas(2, replica):
        assert len(result) == 4
        for index in (0, 2):
            torch.testing.assert_close(result[index], 2 * x.sum(0, keepdim=True))


def test_each_dtype_is_summed_in_its_own_precision() -> None:
    dtypes = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
    values = {
        (rank, dtype): torch.randn(7, generator=torch.Generator().manual_seed(rank)).to(dtype)
        for rank in range(2)
        for dtype in dtypes
    }

    def replica(collective: Collective) -> list[Tensor | None]:
        model = nn.ParameterList([nn.Parameter(torch.zeros(7, dtype=dtype)) for dtype in dtypes])
        exchange = AllReduce()
        exchange.attach(model, collective)
        exchange.before_step(1)
        exchange.begin_backward(True)
        terms = [(p * values[collective.rank, p.dtype]).sum().double() for p in model]
        torch.stack(terms).sum().backward()
        assert exchange.finish([0.1]) == [0.2]
        return [p.grad for p in model]

    for result in run_replicas(2, replica):
        for gradient, dtype in zip(result, dtypes, strict=True):
            assert gradient is not None
            assert torch.equal(gradient, values[0, dtype] + values[1, dtype])


def test_gradients_are_views_of_buckets_that_later_steps_reuse() -> None:
    original = model_of(torch.float32)

    def replica(collective: Collective) -> None:
        model = copy.deepcopy(original)
        exchange = AllReduce()
        exchange.attach(model, collective)
        seen = set()
        for step in (1, 2):
            one_step(exchange, model, collective, torch.float32, step)
            seen.add(tuple(p.grad.data_ptr() for p in model.parameters() if p.grad is not None))
        assert len(seen) == 1
        assert model.turned.grad is not None
        assert model.turned.grad.stride() == model.turned.stride()
        exchange.detach()
        assert all(p.grad is None for p in model.parameters())

    run_replicas(2, replica)


def test_one_replica_copies_nothing() -> None:
    model = model_of(torch.float32)
    exchange = AllReduce()
    alone = SoloCollective()
    exchange.attach(model, alone)
    exchange.before_step(1)
    exchange.begin_backward(True)
    mean_loss(model, *batch(torch.float32)).backward()
    before = {name: p.grad for name, p in model.named_parameters()}
    assert exchange.finish([3.0]) == [3.0]
    assert all(p.grad is before[name] for name, p in model.named_parameters())
    assert alone.bytes_sent == 0


@pytest.mark.parametrize("size", [2, 3])
def test_bytes_sent_follow_the_algebra_of_a_ring(size: int) -> None:
    numel = 16 * 50

    def replica(collective: Collective) -> tuple[int, int]:
        model = nn.ParameterList([nn.Parameter(torch.zeros(numel))])
        exchange = AllReduce()
        exchange.attach(model, collective)
        for step in (1, 2, 3):
            before = collective.bytes_sent
            exchange.before_step(step)
            exchange.finish([])
        assert exchange.bytes_saved == 0
        return collective.bytes_sent - before, collective.bytes_sent

    trailing = 1 + 3 * MAX_EXTRAS * size
    expected = ring_bytes(torch.zeros(numel + trailing), size)
    assert expected == pytest.approx(2 * (size - 1) / size * 4 * (numel + trailing), abs=1)
    assert run_replicas(size, replica) == [(expected, 3 * expected)] * size


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_extras_are_summed_in_double_precision_whatever_the_gradients_are(dtype: torch.dtype) -> None:
    numbers = [
        [1 / 3 + rank, 1e-30 * (rank + 1), -123456789.123456789, float("inf") if rank else 1.0] for rank in range(3)
    ]

    def replica(collective: Collective) -> list[float]:
        exchange = AllReduce()
        exchange.attach(nn.ParameterList([nn.Parameter(torch.zeros(5, dtype=dtype))]), collective)
        exchange.before_step(1)
        return exchange.finish(numbers[collective.rank])

    expected = [sum(column) for column in zip(*numbers, strict=True)]
    for sums in run_replicas(3, replica):
        assert sums == pytest.approx(expected, rel=1e-15)


def test_a_nan_among_the_extras_reaches_every_rank() -> None:
    def replica(collective: Collective) -> bool:
        exchange = AllReduce()
        exchange.attach(nn.Linear(2, 2), collective)
        exchange.before_step(1)
        (value,) = exchange.finish([float("nan") if collective.rank else 1.0])
        return value != value

    assert run_replicas(2, replica) == [True, True]


def reentrant(overlap: bool) -> Callable[[Collective], Tensor]:
    torch.manual_seed(0)
    original = nn.Linear(4, 4)
    x = torch.randn(2, 4)

    def replica(collective: Collective) -> Tensor:
        model = copy.deepcopy(original)
        exchange = AllReduce(bucket_mb=0.00001, overlap=overlap)
        exchange.attach(nn.ModuleList([nn.Linear(1, 1), model]), collective)
        exchange.before_step(1)
        exchange.begin_backward(True)
        h = x.clone().requires_grad_()
        for _ in range(2):
            h = checkpoint(model, h, use_reentrant=True)
        h.sum().backward()
        exchange.finish([])
        assert model.weight.grad is not None
        return model.weight.grad

    return replica


def test_a_second_gradient_after_the_first_was_sent_is_an_error_and_right_without_overlap() -> None:
    with pytest.raises(TrainingError, match="use_reentrant=False"):
        run_replicas(2, reentrant(overlap=True))
    (alone,) = run_replicas(1, reentrant(overlap=False))
    for result in run_replicas(2, reentrant(overlap=False)):
        torch.testing.assert_close(result, 2 * alone)


def test_a_replica_that_fails_raises_peer_lost_on_the_others_and_they_go_on_in_a_new_group() -> None:
    original = model_of(torch.float64)
    second = make_gloo_threads(2)

    def replica(collective: Collective) -> dict[str, Tensor | None]:
        model = copy.deepcopy(original)
        exchange = AllReduce(bucket_mb=0.0003)
        exchange.attach(model, collective)
        exchange.before_step(1)
        if collective.rank == 1:
            collective.abort()
        else:
            with pytest.raises(PeerLostError, match="lost a peer"):
                one_step(exchange, model, collective, torch.float64)
            with pytest.raises(PeerLostError, match="lost a peer"):
                collective.barrier()
        if collective.rank == 2:
            return {}
        exchange.attach(model, second[collective.rank])
        return one_step(exchange, model, second[collective.rank], torch.float64)[0]

    try:
        results = run_replicas(3, replica)
    finally:
        for member in second:
            member.close()
    expected, _ = reference(torch.float64)
    for name, value in results[0].items():
        torch.testing.assert_close(value, expected[name], atol=1e-12, rtol=1e-12)
    assert_same_bits(results[0], results[1])


def test_misuse_is_refused_with_a_sentence() -> None:
    with pytest.raises(TrainingError, match="not attached"):
        AllReduce().finish([])
    exchange = AllReduce()
    exchange.attach(nn.Linear(1, 1), SoloCollective())
    with pytest.raises(ValueError, match="At most 8"):
        exchange.finish([0.0] * 9)
    assert exchange.state() == {}
    assert exchange.wanted() == {}


def test_an_exchange_is_made_from_the_keys_of_its_config_section() -> None:
    assert isinstance(make_exchange(type="allreduce", algorithm="native", shard="none", bucket_mb=1), AllReduce)
    for arguments in ({"type": "gosip"}, {"algorithm": "treee"}, {"shard": "layers"}):
        with pytest.raises(ConfigError, match=r"is not (an exchange|in this version)"):
            make_exchange(**arguments)
