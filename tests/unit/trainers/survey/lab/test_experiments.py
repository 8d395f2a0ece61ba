"""Each experiment computes the same in every way that it compares, and its sentences follow from its rows."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional

from orchestray.trainers.analysis.trace import traced
from orchestray.trainers.survey.lab import (
    caching,
    connecting,
    convolving,
    deadline,
    defining,
    gridding,
    moving,
    multiplying,
    partitioning,
    remembering,
    replicating,
    settings,
)
from orchestray.trainers.survey.lab.exhibit import Exhibit
from orchestray.trainers.survey.lab.registry import EXPERIMENTS
from orchestray.trainers.survey.operators import closed_forms, convolutions
from orchestray.trainers.survey.operators.closed_forms import ConvolutionShape
from support.threads import run_replicas


def column(exhibit: Exhibit, name: str) -> list[Any]:
    """Return the cells of the column whose name begins like that."""
    (place,) = (number for number, each in enumerate(exhibit.columns) if each.startswith(name))
    return [row[place] for row in exhibit.rows]


QUICK: Mapping[str, Callable[[], Exhibit]] = {
    "convolutions": lambda: convolving.convolving(1, convolving.SMALL),
    "convolution-costs": lambda: convolving.counted(shapes=convolving.SMALL),
    "winograd": convolving.winograd_error,
    "layouts": lambda: convolving.layouts(1, convolving.SMALL),
    "gemm": lambda: multiplying.gemm(1, (8, 16, 32)),
    "fully-connected": lambda: multiplying.fully_connected(1, (64,), samples=8),
    "onednn": lambda: settings.onednn(1),
    "threads": lambda: settings.thread_sweep(1, (1, 2)),
    "deadline": lambda: deadline.deadline(3, (4, 8)),
    "persistent": lambda: moving.persistent(1, (1, 2), steps=4, hidden=8),
    "feed-forward": lambda: defining.feed_forward_operators(2),
    "reductions": defining.reductions,
    "losses": lambda: defining.losses(2),
    "cells": defining.recurrent_cells,
    "bptt": remembering.truncated,
    "recurrent-memory": lambda: remembering.stored_states(1, 60, (3, 60)),
    "traffic": moving.traffic,
    "backends": connecting.backends,
    "parameter-cache": lambda: caching.parameter_cache(widths=(4, 6, 5, 3), steps=2),
    "interpreter-lock": lambda: replicating.interpreter_lock(1, steps=4, width=16),
    "partitions": lambda: partitioning.partitions(workers=(1,)),
    "grids": lambda: gridding.grid_sweep(workers=(4,), layers=gridding.LAYERS[:1]),
}


class Exhibits(dict[str, Exhibit]):
    """The exhibits, each made when a test first asks for it."""

    def __missing__(self, name: str) -> Exhibit:
        self[name] = QUICK[name]()
        return self[name]


@pytest.fixture(scope="module")
def exhibits() -> dict[str, Exhibit]:
    return Exhibits()


def test_each_experiment_has_a_table_with_a_name_for_each_column_and_says_what_it_shows(
    exhibits: dict[str, Exhibit],
) -> None:
    # Those that train, compile or need a calibrated machine have tests of their own, and tests/cluster those with Ray.
    others = {"small-networks", "minibatches", "compiled", "map-reduce", "message-driven", "unlike-devices"}
    assert {*QUICK, *others, "predictions"} == {*EXPERIMENTS}
    for name in QUICK:
        exhibit = exhibits[name]
        assert exhibit.name == name
        assert {len(row) for row in (*exhibit.rows, *exhibit.texts())} == {len(exhibit.columns)}
        assert exhibit.findings
        assert json.loads(json.dumps(exhibit.to_json()))["rows"]


def test_a_convolution_that_gives_something_else_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"torch": functional.conv2d, "wrong": lambda x, weight: functional.conv2d(x, weight) + 0.1}
    monkeypatch.setattr(convolving, "ALL", wrong)
    with pytest.raises(ValueError, match=r"wrong is off by 0\.1"):
        convolving.timed(convolving.SMALL[0], 1)


def times(kernels: Sequence[int], fft: Sequence[float]) -> dict[convolving.Shape, dict[str, float]]:
    return {
        convolving.Shape(1, 1, 8, kernel): {
            "direct loops": 3.0,
            "im2col": 1.5,
            "torch": 1.0,
            "FFT": one,
            "FFT, tiled": 9.0,
        }
        for kernel, one in zip(kernels, fft, strict=True)
    }


def test_the_kernel_from_which_fft_wins_is_the_first_after_which_it_always_does() -> None:
    found = convolving.findings(times((3, 5, 7, 11), (1.2, 2.0, 1.4, 0.5)))
    assert "FFT beats im2col from kernels of 7 x 7 on." in found
    assert "im2col is faster than the loops for 4 of 4 shapes, 2 to 2 times as fast." in found
    assert "torch's own is the fastest for 3 of 4 shapes." in found
    assert found[-1].endswith("11x11, 1 x 1 x 8 x 8: FFT (2 times as fast).")
    assert "FFT never beats im2col here." in convolving.findings(times((3, 5), (1.0, 2.0)))


def test_pruned_transforms_have_half_the_operations_in_two_dimensions_and_a_third_in_three(
    exhibits: dict[str, Exhibit],
) -> None:
    found = [line for line in exhibits["convolutions"].findings if line.endswith("times fewer operations pruned.")]
    # Lines of side n with k of them not zero, n' = n / 2 + 1 after the first transform, whose lines are real.
    k, n, half = 3, 64, 33
    plane = (n / 2 + half) / (k / 2 + half)
    cube = (n * n / 2 + 2 * n * half) / (k * k / 2 + k * half + n * half)
    assert found == [
        f"The transform of a kernel of 3x3 in 64x64 has {plane:.2f} times fewer operations pruned.",
        f"The transform of a kernel of 3x3x3 in 64x64x64 has {cube:.2f} times fewer operations pruned.",
    ]
    assert (plane, cube) == (pytest.approx(2, rel=0.06), pytest.approx(3, rel=0.06)), "ZNNi's 3"


def test_each_algorithm_of_a_convolution_has_its_operations_its_depth_and_its_bytes_and_none_is_left_uncounted(
    exhibits: dict[str, Exhibit],
) -> None:
    exhibit = exhibits["convolution-costs"]
    assert column(exhibit, "algorithm") == [*convolving.ALL] * len(convolving.SMALL)
    assert set(column(exhibit, "not counted")) == {"none"}
    rows = {(row[0], row[1]): row[2:7] for row in exhibit.rows}
    for shape in convolving.SMALL:
        x, weight = shape.tensors()
        sizes = ConvolutionShape(len(x), shape.channels, shape.channels, *x.shape[2:], tuple(weight.shape[2:]))
        for name in ("direct loops", "torch", "im2col", "implicit GEMM", "CHWN"):
            assert rows[shape.name, name][0] == closed_forms.direct(sizes).work
        once = x.nbytes + weight.nbytes + 4 * sizes.num_outputs
        multiplications, operations, depth, moved, beside = rows[shape.name, "torch"]
        products_and_sums = 2 * multiplications - sizes.num_outputs
        assert (operations, moved, beside) == (products_and_sums, once, 0)
        # The loops add up one product after the other, and torch's convolution counts as a tree.
        assert depth == 1 + closed_forms.direct(sizes).depth
        assert rows[shape.name, "direct loops"][2] > weight[0].numel()
        patches = 4 * sizes.num_outputs // shape.channels * weight[0].numel()
        assert rows[shape.name, "im2col"][4] == (patches if shape.kernel > 1 else 0)
    assert exhibit.findings[0].startswith("1x1, 2 x 8 x 8 x 8: none has fewer multiplications than the definition; ")
    few = min(
        name
        for name in convolving.ALL
        if rows["3x3, 2 x 8 x 8 x 8", name][0] == min(rows["3x3, 2 x 8 x 8 x 8", each][0] for each in convolving.ALL)
    )
    assert exhibit.findings[1].startswith(f"3x3, 2 x 8 x 8 x 8: {few} has ")


def test_the_error_of_winograd_grows_with_the_tile_while_products_shrink(exhibits: dict[str, Exhibit]) -> None:
    *errors, _own = column(exhibits["winograd"], "largest error")
    assert errors == sorted(errors)
    assert errors[0] < 1e-4
    assert column(exhibits["winograd"], "fewer")[:3] == [36 / 16, 81 / 25, 4.0]


def test_layouts_are_each_others_transposition_and_pooling_takes_the_largest_of_four() -> None:
    x, weight = convolving.SMALL[1].tensors()
    chwn = convolutions.in_chwn(x.permute(1, 2, 3, 0).contiguous(), weight)
    assert chwn.is_contiguous()  # the samples lie side by side in memory, in outputs as in inputs
    torch.testing.assert_close(chwn.permute(3, 0, 1, 2), functional.conv2d(x, weight), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(convolving._pool_nchw(x), functional.max_pool2d(x, 2))
    torch.testing.assert_close(
        convolving._pool_chwn(x.permute(1, 2, 3, 0)).permute(3, 0, 1, 2), functional.max_pool2d(x, 2)
    )


def test_the_ratio_with_transposing_is_that_of_a_way_that_transposes_in_memory_there_and_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken_ms = {"NCHW": 6.0, "CHWN": 2.0, "CHWN, transposed twice": 4.0, "pool NCHW": 3.0, "pool CHWN": 2.0}
    copies: dict[str, int] = {}

    def given(ways: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
        copies.update(
            {name: Counter(each.name for each in traced(way).operations)["clone"] for name, way in ways.items()}
        )
        assert ways["CHWN, transposed twice"]().is_contiguous()
        return {name: [taken_ms[name] / 1e3] * rounds for name in ways}

    monkeypatch.setattr(convolving, "times_s", given)
    exhibit = convolving.layouts(1, convolving.SMALL[1:2])
    assert copies["CHWN, transposed twice"] == copies["CHWN"] + 2
    assert column(exhibit, "NCHW / CHWN") == [pytest.approx(3.0)]
    assert column(exhibit, "with transposing") == [pytest.approx(1.5)]
    assert exhibit.findings == [
        "With both transpositions CHWN is 1.5 to 1.5 times as fast as NCHW.",
        "CHWN is the faster order for 1 of 1 shapes, so transposed.",
        "Pooling in CHWN is 1.5 to 1.5 times as fast as in NCHW.",
    ]


def test_speeds_of_products_are_operations_over_time_and_the_line_has_the_least_relative_errors() -> None:
    exhibit = multiplying.gemm(1, (8, 16, 32))
    speeds = column(exhibit, "GFLOP/s")
    for side, taken_us, speed in zip(*(column(exhibit, name) for name in ("side", "us")), speeds, strict=True):
        assert speed == pytest.approx(2 * side**3 / taken_us / 1e3)
    fastest = (8, 16, 32)[speeds.index(max(speeds))]
    library = re.search(r"BLAS_INFO=(\w+)", torch.__config__.show())
    assert library is not None
    assert exhibit.findings[2] == f"torch calls the BLAS of {library[1]} for them; {fastest} is the fastest size."
    x, y = torch.tensor([1.0, 2.0, 4.0, 5.0]).double(), torch.tensor([3.0, 5.0, 9.5, 10.0]).double()
    line = multiplying.fitted(x, y)
    least = float(((line - y) / y).square().sum())
    for turned in (1e-3 * (x - 1), 1e-3 * (x - 4), 1e-3 * torch.ones_like(x), -1e-3 * x):
        assert float(((line + turned - y) / y).square().sum()) > least
    torch.testing.assert_close(multiplying.fitted(x, 2 * x + 1), 2 * x + 1)


def test_a_batch_as_one_product_is_its_samples_one_by_one() -> None:
    torch.manual_seed(0)
    network, x = multiplying._Network(16, 24, 2, 8).double(), torch.randn(9, 16).double()
    with torch.no_grad():
        torch.testing.assert_close(multiplying._one_by_one(network, x), network(x), rtol=1e-6, atol=1e-6)


def test_a_layer_is_one_product_over_the_batch_and_one_for_each_sample_where_they_come_one_by_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: dict[str, Counter[str]] = {}

    def counted(ways: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
        found.update({name: Counter(each.name for each in traced(way).operations) for name, way in ways.items()})
        return dict.fromkeys(ways, [1.0] * rounds)

    monkeypatch.setattr(multiplying, "times_s", counted)
    multiplying.fully_connected(1, (64,), samples=8)
    layers = 5
    assert (found["batched"]["addmm"], found["one by one"]["addmm"]) == (layers, 8 * layers)


def test_fixed_point_names_the_class_that_full_precision_names(exhibits: dict[str, Exhibit]) -> None:
    agree = [each for each in column(exhibits["fully-connected"], "agree") if each is not None]
    assert len(agree) == 2
    assert all(float(each.strip("%")) >= 75 for each in agree)  # of eight samples, six
    assert column(exhibits["fully-connected"], "times as fast")[0] == 1.0


def test_results_with_and_without_onednn_agree_and_the_setting_is_put_back(exhibits: dict[str, Exhibit]) -> None:
    exhibit = exhibits["onednn"]
    assert max(column(exhibit, "largest difference")) < 1e-4
    assert torch.backends.mkldnn.enabled
    times = zip(*(column(exhibit, name) for name in ("on, ms", "off, ms", "off / on")), strict=True)
    assert all(min(on, off) > 0 and ratio == pytest.approx(off / on) for on, off, ratio in times)
    # The two are different kernels, not one that is timed twice.
    on, off = (
        dict(zip(column(exhibit, "operation"), column(exhibit, f"its kernels, {way}"), strict=True))
        for way in ("on", "off")
    )
    assert on["convolution 3x3"] == 1
    assert on["exp of each element"] == 0
    assert set(off.values()) == {0}
    assert "convolution 3x3" in exhibit.findings[-1]

    def fail() -> None:
        with settings.without_onednn():
            assert not torch.backends.mkldnn.enabled
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert torch.backends.mkldnn.enabled


def test_each_operation_is_timed_on_each_number_of_threads_which_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    exhibit = settings.thread_sweep(1, (1, 2))
    assert torch.get_num_threads() == before
    assert column(exhibit, "operation") == list(settings.operations())
    for one, two, ratio in zip(*(column(exhibit, name) for name in ("1 threads", "2 threads", "2 / 1")), strict=True):
        assert ratio == pytest.approx(one / two)
    seen: dict[int, None] = {}
    monkeypatch.setattr(settings, "operations", lambda: {"look": lambda: seen.setdefault(torch.get_num_threads())})
    settings.thread_sweep(1, (1, 2))
    assert list(seen) == [1, 2]


def test_kept_weights_move_no_bytes_and_fetched_ones_all_of_theirs_for_the_same_states(
    exhibits: dict[str, Exhibit],
) -> None:
    exhibit = exhibits["persistent"]
    assert column(exhibit, "bytes of weights") == [0, 0, 8 * 32 * 4]
    assert column(exhibit, "bytes of states") == [0, 4 * 4, 0]
    assert max(column(exhibit, "difference")) < 1e-5
    assert (
        exhibit.findings[0] == "A step moves 0 bytes of weights that are kept, and 1,024 of weights that are fetched."
    )


def test_the_bytes_of_a_step_are_counted_and_not_computed() -> None:
    torch.manual_seed(0)
    lstm, x = torch.nn.LSTM(8, 8), torch.randn(4, 1, 8)
    layer = moving.FusedLayer(lstm, 0)
    with torch.no_grad():
        exact = lstm(x)[0]

    class More(moving.PersistentCells):
        def run(self, x: torch.Tensor) -> torch.Tensor:
            self._workers.all_gather(torch.zeros(25))
            return super().run(x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(moving, "PersistentCells", More)
        weights, states, *_ = run_replicas(2, lambda group: moving._kept(layer, x, exact, 1, group))[0]
    assert (weights, states) == (25 * 4 / len(x), 4 * 4)


def test_chains_and_trees_add_the_same_numbers_by_as_many_additions_at_their_own_depths(
    exhibits: dict[str, Exhibit],
) -> None:
    exhibit = exhibits["reductions"]
    counts = (2, 7, 16, 100, 1000)
    assert column(exhibit, "values") == [count for count in counts for _ in ("chain", "tree")]
    assert [row[2] for row in exhibit.rows] == [count - 1 for count in counts for _ in ("chain", "tree")]
    assert column(exhibit, "depth") == [1, 1, 6, 3, 15, 4, 99, 7, 999, 10]
    assert set(column(exhibit, "difference")) == {0}
    assert exhibit.findings == [
        "1,000 values take 999 additions in a chain and 999 in a tree; the longest path has 999 and 10 of them.",
        "All sums are exact.",
    ]


def test_no_tiling_of_any_convolution_moves_less_than_the_bound(exhibits: dict[str, Exhibit]) -> None:
    exhibit = exhibits["traffic"]
    assert set(column(exhibit, "below")) == {0}
    assert min(column(exhibit, "tilings")) > 50
    assert column(exhibit, "carried out") == column(exhibit, "best tiling")
    assert re.fullmatch(
        r"The best tilings were carried out: the words are those that were counted, .* to [\d.]+e-0[4-9]\.",
        exhibit.findings[2],
    )
    assert all(ratio >= 1 for ratio in column(exhibit, "over the bound"))
    assert re.match(r"0 of [\d,]+ tilings move less than the bound", exhibit.findings[0])
    # Pooling in one tile moves 16 x 16 inputs and 15 x 15 outputs a map; output by output, four inputs for each.
    assert exhibit.findings[1].endswith(f"by 36 tilings {16 * (256 + 225):,} to {16 * 5 * 225:,}.")


def test_operators_by_definition_are_torch_s_on_every_shape(exhibits: dict[str, Exhibit]) -> None:
    exhibit = exhibits["feed-forward"]
    assert column(exhibit, "operator") == [name for name in defining.OPERATORS for _ in range(2)]
    assert len(set(column(exhibit, "inputs"))) > len(defining.OPERATORS)
    assert max(column(exhibit, "largest difference")) < 1e-10


def test_losses_by_their_formulas_are_torch_s_and_those_of_the_tasks(exhibits: dict[str, Exhibit]) -> None:
    exhibit = exhibits["losses"]
    assert column(exhibit, "loss") == [name for name in defining.LOSSES for _ in range(2)]
    for name in ("difference", "from the task's", "of the gradient"):
        assert max(column(exhibit, name)) < 1e-12
    assert [finding.split(" of tasks")[0] for finding in exhibit.findings] == [
        f"The {name}" for name in defining.LOSSES
    ]


def test_cells_by_their_equations_are_torch_s_and_a_gru_has_three_quarters_of_an_lstm(
    exhibits: dict[str, Exhibit],
) -> None:
    exhibit = exhibits["cells"]
    assert dict(zip(column(exhibit, "cell"), column(exhibit, "part"), strict=True)) == {
        "Elman": 0.25,
        "LSTM": 1.0,
        "GRU": 0.75,
    }
    assert max(column(exhibit, "difference of outputs") + column(exhibit, "of gradients")) < 1e-12


def test_a_cut_changes_the_gradient_unless_it_comes_after_the_last_step(exhibits: dict[str, Exhibit]) -> None:
    errors = dict(zip(column(exhibits["bptt"], "cut after"), column(exhibits["bptt"], "relative error"), strict=True))
    assert errors[24] == errors[32] == 0
    assert errors[1] > errors[4] > errors[16] > 0
    assert "Cut after 24 steps or more" in exhibits["bptt"].findings[1]


def test_few_stored_states_give_the_gradient_for_the_work_of_the_programme(exhibits: dict[str, Exhibit]) -> None:
    exhibit = exhibits["recurrent-memory"]
    assert column(exhibit, "most stored") == [3, 60, 3, 60]
    assert column(exhibit, "forward steps") == column(exhibit, "by the programme")
    assert column(exhibit, "done again")[1] == 0  # all that the backward pass needs is stored
    assert max(column(exhibit, "difference")) < 1e-12
    assert "With 3 stored states, 0.05 of 60" in exhibit.findings[1]


def test_gloo_does_each_operation_as_mpi_defines_it_for_every_type_for_which_it_is_defined(
    exhibits: dict[str, Exhibit],
) -> None:
    exhibit = exhibits["backends"]
    tried: dict[Any, Any] = {row[1]: row[2:] for row in exhibit.rows if row[0] == "gloo"}
    assert {name: row[0] for name, row in tried.items()} == {
        "all_reduce, sum": "MPI_Allreduce, MPI_SUM",
        "all_reduce, max": "MPI_Allreduce, MPI_MAX",
        "reduce_scatter": "MPI_Reduce_scatter_block",
        "all_gather": "MPI_Allgather",
        "broadcast": "MPI_Bcast",
        "exchange": "MPI_Alltoall",
    }
    for _, right, undefined, refused, wrong in tried.values():
        assert (refused, wrong) == (None, None)
        assert len(right.split()) + len((undefined or "").split()) == len(connecting.TYPES)
    assert exhibit.findings[0].startswith("gloo does 6 of 6 operations")


def test_a_backend_that_was_not_tried_is_not_said_to_work(exhibits: dict[str, Exhibit]) -> None:
    others: list[Any] = [row for row in exhibits["backends"].rows if row[0] != "gloo"]
    assert {row[0] for row in others} == {"mpi", "nccl", "ucc"}
    assert all(row[1] in ("not here", "not tried") and row[2:] == [None] * 5 for row in others)


def test_a_result_that_is_not_what_the_operation_means_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connecting, "TYPES", (torch.int64,))
    root = connecting.OPERATIONS["broadcast"]
    wrong = connecting.Meaning(root.standard, root.run, lambda all_of, _: all_of[0])
    monkeypatch.setattr(connecting, "OPERATIONS", {"broadcast": wrong})
    assert connecting.backends().rows[0] == ["gloo", "broadcast", "MPI_Bcast", None, None, None, "int64"]


def test_replicas_in_threads_and_in_processes_have_together_the_gradient_of_one(exhibits: dict[str, Exhibit]) -> None:
    exhibit = exhibits["interpreter-lock"]
    assert column(exhibit, "replicas") == ["one", "2 threads", "2 processes"] * 2
    assert column(exhibit, "processes") == [1, 1, 2] * 2
    assert max(column(exhibit, "difference")) < 1e-5
    times, faster = column(exhibit, "ms"), column(exhibit, "times as fast")
    assert faster == pytest.approx([times[row // 3 * 3] / each for row, each in enumerate(times)])
    assert exhibit.findings[1] == f"a loop in Python, 2 processes: {faster[2]:.2g} times as fast as one replica."


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ([12.0, 24.0], "12 to 24 times less"),
        ([0.25, 0.5], "2 to 4 times as long"),
        ([0.9, 1.5], "0.9 to 1.5 times less"),
    ],
)
def test_a_way_that_is_slower_for_all_networks_is_said_to_take_longer(gains: list[float], expected: str) -> None:
    assert multiplying._less_or_longer(gains) == expected
