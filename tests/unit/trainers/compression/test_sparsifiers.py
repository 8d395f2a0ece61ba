"""Choice of the values that are sent: top-k, thresholds, deep gradient compression."""

from __future__ import annotations

import math
from typing import Literal

import pytest
import torch
from torch import Tensor

from orchestray.trainers.compression.adaptive_threshold import AdaptiveThreshold
from orchestray.trainers.compression.delta import gap_bytes
from orchestray.trainers.compression.dgc import Dgc
from orchestray.trainers.compression.sparse import HEADER_BYTES
from orchestray.trainers.compression.threshold import Threshold
from orchestray.trainers.compression.topk import TopK, num_sent

SHAPES = [(30, 20), (30,), (700,), (3,)]


def gradients(seed: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, dtype=torch.float64, generator=generator) * scale for shape in SHAPES]


def flat(tensors: list[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


@pytest.mark.parametrize("ratio", [0.001, 0.01, 0.07, 0.25, 0.999, 1.0])
def test_topk_sends_exactly_the_part_of_each_tensor_and_the_largest(ratio: float) -> None:
    compressor = TopK(ratio)
    compressor.init(gradients(0))
    found = compressor.decompress(compressor.compress(gradients(1), step=1))
    for given, there in zip(gradients(1), found, strict=True):
        is_sent = there != 0
        assert int(is_sent.sum()) == math.ceil(round(ratio * given.numel(), 6))
        assert torch.equal(there[is_sent], given[is_sent])
        if not is_sent.all():
            assert given[is_sent].abs().min() >= given[~is_sent].abs().max()


def test_the_part_that_is_sent_is_rounded_up_but_not_by_what_binary_fractions_add() -> None:
    assert [num_sent(100, ratio) for ratio in (0.07, 0.29, 0.071, 1e-6, 1.0)] == [7, 29, 8, 1, 100]
    assert num_sent(0, 0.5) == 0


@pytest.mark.parametrize("error_feedback", [False, True])
def test_a_threshold_sends_what_reaches_it_and_with_error_feedback_what_adds_up_to_it(error_feedback: bool) -> None:
    compressor = Threshold(1.0, error_feedback=error_feedback)
    small = [torch.full((3,), 0.3, dtype=torch.float64), torch.tensor([-1.0, 1.0, 0.9999], dtype=torch.float64)]
    compressor.init(small)
    sent = [flat(compressor.decompress(compressor.compress(small, step=step))) for step in range(1, 5)]
    expected = torch.tensor([[0, 0, 0, -1, 1, 0]] * 4, dtype=torch.float64)
    if error_feedback:
        expected[3, :3] = 1.2
        expected[1, 5] = expected[3, 5] = 2 * 0.9999
    torch.testing.assert_close(torch.stack(sent), expected, rtol=0, atol=1e-12)


def test_the_threshold_is_sent_with_its_sign_in_a_bit_and_what_is_beyond_it_later() -> None:
    given = [torch.tensor([2.5, -1.0, 0.4, -3.2], dtype=torch.float64), torch.zeros(500, dtype=torch.float64)]
    compressor = Threshold(1.0, "threshold")
    compressor.init(given)
    sent = []
    for step in range(1, 5):
        message = compressor.compress(given if step == 1 else [torch.zeros_like(each) for each in given], step=step)
        found = flat(compressor.decompress(message))
        places = found.nonzero().view(-1)
        assert message.numel() == HEADER_BYTES + 2 * 8 + math.ceil(len(places) / 8) + gap_bytes(places)
        sent.append(found[:4].tolist())
    assert sent == [[1, -1, 0, -1], [1, 0, 0, -1], [0, 0, 0, -1], [0, 0, 0, 0]]
    left = torch.tensor([0.5, 0.0, 0.4, -0.2], dtype=torch.float64)
    torch.testing.assert_close(compressor.state()["residual"][:4], left, rtol=0, atol=1e-12)


@pytest.mark.parametrize("values", ["exact", "means"])
def test_the_adaptive_threshold_keeps_to_its_part_while_gradients_shrink_and_differ_between_tensors(
    values: Literal["exact", "means"],
) -> None:
    compressor = AdaptiveThreshold(0.05, values, error_feedback=True)
    generator = torch.Generator().manual_seed(5)
    compressor.init([torch.zeros(40_000), torch.zeros(9_000)])
    total, sent = torch.zeros(49_000, dtype=torch.float64), torch.zeros(49_000, dtype=torch.float64)
    for step in range(1, 13):
        sizes = 0.5**step, 100 * 0.5**step
        given = [torch.randn(n, generator=generator) * s for n, s in zip((40_000, 9_000), sizes, strict=True)]
        found = compressor.decompress(compressor.compress(given, step=step))
        # The first from a sample of 16384: 5% of it is 410 positive and 410 negative values, give or take 5% each.
        for there, tolerance in zip(found, (4 * 0.05 / math.sqrt(2), 0.01), strict=True):
            assert float((there != 0).double().mean()) == pytest.approx(0.05, rel=tolerance)
            assert float((there > 0).sum() / (there < 0).sum()) == pytest.approx(1, rel=0.35)
        total, sent = total + flat(given), sent + flat(found)
        # Nothing is lost: what was not sent is in the residual.
        torch.testing.assert_close(sent + compressor.state()["residual"], total, rtol=0, atol=1e-4)


def test_means_are_those_of_the_values_that_are_sent_of_each_tensor_and_sign_with_a_bit_for_each() -> None:
    given = gradients(7)
    compressor, exact = AdaptiveThreshold(0.1, "means"), AdaptiveThreshold(0.1)
    for each in (compressor, exact):
        each.init(given)
    message = compressor.compress(given, step=1)
    found = compressor.decompress(message)
    unchanged = exact.decompress(exact.compress(given, step=1))
    for one, whole in zip(found, unchanged, strict=True):
        assert torch.equal(one != 0, whole != 0)
        for sign in (1, -1):
            chosen = whole * sign > 0
            if chosen.any():
                torch.testing.assert_close(one[chosen], whole[chosen].mean().expand(int(chosen.sum())))
    places = flat(found).nonzero().view(-1)
    of_values = 2 * len(SHAPES) * 8 + math.ceil(len(places) / 8)
    assert message.numel() == HEADER_BYTES + of_values + gap_bytes(places)


def test_the_adaptive_threshold_of_a_small_tensor_is_exact_and_of_one_sign_alone_too() -> None:
    compressor = AdaptiveThreshold(0.1, error_feedback=False)
    given = [torch.arange(1.0, 101.0), -torch.arange(1.0, 11.0), torch.zeros(5), torch.tensor([5.0, -1.0, -2.0, 3.0])]
    compressor.init(given)
    found = compressor.decompress(compressor.compress(given, step=1))
    assert [there[there != 0].tolist() for there in found] == [
        [float(value) for value in range(91, 101)],
        [-10.0],
        [],
        [5.0, -2.0],
    ]


class PlainDgc:
    """Algorithm 3 of the paper for one worker, on one flat vector, as it is written."""

    def __init__(self, momentum: float, counts: list[int], sizes: list[int]) -> None:
        self.momentum, self.counts, self.sizes = momentum, counts, sizes
        self.u = torch.zeros(sum(sizes), dtype=torch.float64)
        self.v = torch.zeros_like(self.u)

    def step(self, gradient: Tensor) -> Tensor:
        self.u = self.momentum * self.u + gradient
        self.v = self.v + self.u
        mask = torch.cat(
            [
                torch.zeros(part.numel(), dtype=torch.bool).index_fill_(0, part.abs().topk(count).indices, True)
                for part, count in zip(self.v.split(self.sizes), self.counts, strict=True)
            ]
        )
        sent = self.v * mask
        self.v, self.u = self.v * ~mask, self.u * ~mask
        return sent


def test_dgc_is_momentum_correction_with_momentum_factor_masking() -> None:
    sizes = [math.prod(shape) for shape in SHAPES]
    plain = PlainDgc(0.9, [num_sent(size, 0.02) for size in sizes], sizes)
    compressor = Dgc(0.02, momentum=0.9)
    compressor.init(gradients(0))
    for step in range(1, 30):
        sent = plain.step(flat(gradients(step)))
        found = flat(compressor.decompress(compressor.compress(gradients(step), step=step)))
        torch.testing.assert_close(found, sent, rtol=0, atol=1e-12)
        torch.testing.assert_close(compressor.state()["velocity"], plain.u, rtol=0, atol=1e-12)
        torch.testing.assert_close(compressor.state()["residual"], plain.v, rtol=0, atol=1e-12)


def test_dgc_that_sends_everything_is_momentum_cleared_at_every_step_and_without_masking_would_be_sgds() -> None:
    compressor = Dgc(1.0, momentum=0.9)
    compressor.init(gradients(0))
    for step in range(1, 4):
        found = compressor.decompress(compressor.compress(gradients(step), step=step))
        assert torch.equal(flat(found), flat(gradients(step)))


@pytest.mark.parametrize("num_workers", [1, 4, 9])
def test_dgc_cuts_a_workers_gradient_to_its_root_of_the_workers_part_of_the_norm(num_workers: int) -> None:
    clip = 0.5
    compressor = Dgc(0.01, momentum=0.0, clip=clip, num_workers=num_workers)
    compressor.init(gradients(0))
    gradient = gradients(1)
    sent = flat(compressor.decompress(compressor.compress(gradient, step=1)))
    accumulated = sent + compressor.state()["residual"]
    assert float(accumulated.norm()) == pytest.approx(clip / math.sqrt(num_workers), rel=1e-12)
    torch.testing.assert_close(accumulated / accumulated.norm(), flat(gradient) / flat(gradient).norm())
    short = [tensor * 1e-3 for tensor in gradient]
    compressor.init(gradients(0))
    sent = flat(compressor.decompress(compressor.compress(short, step=1)))
    assert torch.equal(sent + compressor.state()["residual"], flat(short))
    assert compressor.run_report()["clipped"] == 1


@pytest.mark.parametrize("steps_a_stage", [1, 23])
def test_dgc_warms_up_from_a_quarter_in_four_stages_by_the_same_factor(steps_a_stage: int) -> None:
    compressor = Dgc(0.001, warmup_steps=4 * steps_a_stage)
    ratios = [compressor.ratio(step) for step in range(1, 7 * steps_a_stage + 1)]
    factor = (0.001 / 0.25) ** 0.25
    stages = [0.25 * factor**n for n in range(4)] + [0.001] * 3
    assert ratios == pytest.approx([ratio for ratio in stages for _ in range(steps_a_stage)], rel=1e-12)


def test_dgc_in_its_warm_up_sends_what_the_papers_table_1_says() -> None:
    compressor = Dgc(0.001, warmup_steps=4)
    dropped = [100 * (1 - compressor.ratio(step)) for step in range(1, 6)]
    assert dropped == pytest.approx([75, 93.75, 98.4375, 99.6, 99.9], abs=0.06)


def test_dgc_without_a_warm_up_or_with_more_than_a_quarter_begins_with_its_ratio() -> None:
    assert [Dgc(0.001).ratio(step) for step in (1, 2)] == [0.001, 0.001]
    assert Dgc(0.5, warmup_steps=4).ratio(1) == 0.5


def test_dgc_without_error_feedback_keeps_momentum_and_nothing_else() -> None:
    compressor = Dgc(0.01, momentum=0.5, error_feedback=False)
    compressor.init(gradients(0))
    velocity = torch.zeros_like(flat(gradients(0)))
    for step in range(1, 4):
        velocity = 0.5 * velocity + flat(gradients(step))
        found = flat(compressor.decompress(compressor.compress(gradients(step), step=step)))
        torch.testing.assert_close(found[found != 0], velocity[found != 0], rtol=0, atol=1e-12)
        velocity[found != 0] = 0.0
        assert set(compressor.state()) == {"velocity"}
        torch.testing.assert_close(compressor.state()["velocity"], velocity, rtol=0, atol=1e-12)
