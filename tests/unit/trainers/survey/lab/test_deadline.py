"""The network that answers is the most accurate of those that should keep the deadline, by times of other networks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestray.trainers.survey.lab import deadline
from orchestray.trainers.survey.lab.deadline import Performance, most_accurate_within

NETWORKS = st.dictionaries(
    st.integers(0, 9), st.tuples(st.sampled_from([0.5, 0.8, 0.9]), st.floats(0.1, 5)), min_size=1
)


@given(networks=NETWORKS, deadline_s=st.floats(0.05, 6))
def test_the_choice_keeps_the_deadline_and_none_that_does_is_more_accurate_or_as_accurate_and_quicker(
    networks: dict[int, tuple[float, float]], deadline_s: float
) -> None:
    accuracy = {name: one for name, (one, _) in networks.items()}
    predicted_s = {name: one for name, (_, one) in networks.items()}
    chosen = most_accurate_within(accuracy, predicted_s, deadline_s)
    fitting = [name for name in networks if predicted_s[name] <= deadline_s]
    if not fitting:
        assert chosen is None
        return
    assert chosen in fitting
    assert accuracy[chosen] == max(accuracy[name] for name in fitting)
    assert all(predicted_s[chosen] <= predicted_s[name] for name in fitting if accuracy[name] == accuracy[chosen])


def test_times_that_are_a_line_are_predicted_for_other_work_with_the_spread_that_was_measured() -> None:
    work = [10, 100, 1000]
    model = Performance.fitted(work, [2 + 0.5 * one for one in work], [1.2 * (2 + 0.5 * one) for one in work])
    assert model.p95_s(400) == pytest.approx(1.2 * (2 + 0.5 * 400))


@pytest.mark.parametrize("times", [[5.0, 5.0, 4.0], [1.0, 1000.0, 1e6]])
def test_neither_part_of_a_time_is_negative_whatever_was_measured(times: list[float]) -> None:
    model = Performance.fitted([10, 100, 1000], times, times)
    assert min(model.fixed_s, model.operation_s) >= 0
    for work, taken in zip([10, 100, 1000], times, strict=True):
        assert model.p95_s(work) >= taken * (1 - 1e-9)


def test_each_row_has_the_choice_for_its_deadline_and_the_first_has_none() -> None:
    exhibit = deadline.deadline(3, (4, 8, 16))
    first, *rows = exhibit.rows
    assert first[1:] == [None] * 5
    accuracies = [float(row[2]) for row in rows]  # type: ignore[arg-type]
    assert accuracies == sorted(accuracies)
    assert accuracies[-1] > 0.8
    for deadline_ms, _, _, predicted_ms, p95_ms, kept in rows:
        assert predicted_ms <= deadline_ms  # type: ignore[operator]
        assert kept == ("yes" if p95_ms <= deadline_ms else "no")  # type: ignore[operator]


def test_the_times_of_the_networks_to_choose_from_are_not_looked_at_before_the_choice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: list[int] = []
    chosen: list[int] = []
    latencies, choose = deadline._latencies, deadline.most_accurate_within

    def watch(network, request, rounds):  # type: ignore[no-untyped-def]
        measured.append(network[0].out_channels)
        return latencies(network, request, rounds)

    def note(*arguments):  # type: ignore[no-untyped-def]
        chosen.append(len(measured))
        return choose(*arguments)

    monkeypatch.setattr(deadline, "_latencies", watch)
    monkeypatch.setattr(deadline, "most_accurate_within", note)
    deadline.deadline(2, (4, 8))
    assert set(measured[: chosen[0]]) == set(deadline._PROBES)
    assert not set(deadline._PROBES) & set(deadline._FAMILY)
