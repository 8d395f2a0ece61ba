"""A pipeline of measured layers: the closed forms of its bubble, its memory and its links."""

from __future__ import annotations

import random
from dataclasses import replace
from statistics import fmean

import pytest

from orchestray.trainers.config.settings import PipelineSettings, ReplicaSettings
from orchestray.trainers.layout.degrees import Layout
from orchestray.trainers.parallel.pipeline.balance import Bounds, balanced
from orchestray.trainers.parallel.pipeline.schedules import make_programs, placement
from orchestray.trainers.parallel.pipeline.simulation import simulate, staleness
from orchestray.trainers.planning import pipelines
from orchestray.trainers.planning.found import LayerProfile
from orchestray.trainers.planning.pipelines import pipeline_step

LAYERS = LayerProfile(
    names=tuple("abcdefgh"),
    forward_s=(1.0,) * 8,
    backward_s=(2.0,) * 8,
    parameter_bytes=(10,) * 8,
    activation_bytes=(5,) * 8,
    received_bytes=(0,) * 8,
    loss_bytes=0,
    boundary_bytes=(7,) * 7 + (0,),
    forbidden_cuts=(),
    micro_batch_samples=4,
    num_parameters=(1,) * 8,
)


def settings(
    stages: int, micro_batches: int, schedule: str = "gpipe", recompute: str = "none", tensor: int = 1
) -> ReplicaSettings:
    return ReplicaSettings(
        task=None,  # type: ignore[arg-type] - nothing looks at it
        batch_size=64,
        epochs=None,
        steps=1,
        optimizer={},
        lr_schedule={},
        accumulate=micro_batches,
        layout=Layout(pipeline=stages, tensor=tensor),
        pipeline=PipelineSettings(schedule=schedule),
        recompute=recompute,
    )


@pytest.fixture(autouse=True)
def _without_work_beside_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipelines, "ACTION_S", 0.0)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 4), (4, 8), (8, 8), (4, 1)])
def test_the_bubble_of_even_stages_is_that_of_huang_et_al(schedule: str, stages: int, micro_batches: int) -> None:
    step = pipeline_step([LAYERS], settings(stages, micro_batches, schedule), lambda _: 0.0)
    each_s = 3.0 * 8 / stages
    assert step.span_s == pytest.approx((micro_batches + stages - 1) * each_s)
    assert step.busy_s == pytest.approx(micro_batches * each_s)


def test_a_transfer_delays_each_crossing_of_the_first_micro_batch() -> None:
    without, with_it = (pipeline_step([LAYERS], settings(4, 1), lambda _, s=s: s).span_s for s in (0.0, 0.5))
    assert with_it - without == pytest.approx(2 * 3 * 0.5)


def test_recomputing_goes_forward_once_more() -> None:
    step = pipeline_step([LAYERS], settings(2, 4, recompute="blocks"), lambda _: 0.0)
    assert step.busy_s == pytest.approx(4 * 4 * (1.0 + 3.0))


def test_every_micro_batch_crosses_every_cut_both_ways() -> None:
    assert pipeline_step([LAYERS], settings(4, 8), lambda _: 0.0).link_bytes == 2 * 8 * 3 * 7


def test_gpipe_holds_all_micro_batches_and_1f1b_those_in_flight() -> None:
    held = {
        schedule: pipeline_step([LAYERS], settings(4, 8, schedule), lambda _: 0.0).activation_bytes
        for schedule in ("gpipe", "1f1b")
    }
    assert held["gpipe"] == (8 * 2 * 5,) * 4
    assert held["1f1b"] == (4 * 2 * 5, 3 * 2 * 5, 2 * 2 * 5, 1 * 2 * 5)


def test_a_stage_holds_what_it_receives_although_the_one_before_it_holds_it_too() -> None:
    layers = replace(LAYERS, received_bytes=(0, 3, 3, 3, 3, 3, 3, 3))
    step = pipeline_step([layers], settings(4, 8), lambda _: 0.0)
    assert step.activation_bytes == (8 * 10, 8 * 13, 8 * 13, 8 * 13)


def test_a_tensor_group_shares_the_work_of_a_stage() -> None:
    step = pipeline_step([LAYERS], settings(2, 4, tensor=2), lambda _: 0.0)
    assert step.busy_s == pytest.approx(4 * 4 * 3.0 / 2)


def test_workers_hold_the_parameters_of_all_their_stages() -> None:
    step = pipeline_step([LAYERS], settings(2, 4, "interleaved_1f1b"), lambda _: 0.0)
    assert (step.parameter_bytes, step.num_parameters) == ((40, 40), (4, 4))


def test_pipedream_has_no_bubble_in_its_steady_state_and_staleness_instead() -> None:
    step = pipeline_step([LAYERS], settings(4, 8, "pipedream"), lambda _: 0.0)
    assert step.span_s == pytest.approx(8 * 2 * 3.0)
    assert step.staleness == pytest.approx((3 + 2 + 1 + 0) / 4, abs=0.2)


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_pipedream_takes_a_batch_as_long_as_a_long_stream_does_and_is_as_stale_as_one_of_six(stages: int) -> None:
    draw = random.Random(stages)
    uneven = replace(
        LAYERS,
        forward_s=tuple(draw.randint(0, 9) for _ in range(8)),
        backward_s=tuple(draw.randint(1, 9) for _ in range(8)),
    )
    step = pipeline_step([uneven], settings(stages, 3, "pipedream"), lambda _: 0.0)
    times_s = [
        [sum(each[slice(*part)]) for part in cut(uneven, stages)] for each in (uneven.forward_s, uneven.backward_s)
    ]
    spans_s = [
        simulate(make_programs("pipedream", stages, 1, count), placement("pipedream", stages, 1), *times_s).span_s
        for count in (300, 303)
    ]
    assert step.span_s == spans_s[1] - spans_s[0]
    counted = staleness(make_programs("pipedream", stages, 1, 18)).updates
    assert step.staleness == fmean(age for ages in counted for age in ages)


def cut(layers: LayerProfile, stages: int) -> Bounds:
    return balanced([ahead + back for ahead, back in zip(layers.forward_s, layers.backward_s, strict=True)], stages)


def test_uneven_layers_are_cut_where_the_run_would_cut_them() -> None:
    uneven = replace(LAYERS, forward_s=(7.0,) + (1.0,) * 7, backward_s=(0.0,) * 8)
    step = pipeline_step([uneven], settings(2, 4), lambda _: 0.0)
    assert step.parameter_bytes == (10, 70)
    assert step.busy_s == pytest.approx(4 * 7.0)
