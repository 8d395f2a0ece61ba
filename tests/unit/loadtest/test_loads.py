"""Times at which requests are due."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from pathlib import Path

import pytest
from scipy import stats

from orchestray.loadtest.loads import ClosedLoop, OpenLoop, Trace, read_trace
from orchestray.platform.errors import ConfigError

SEEDS = range(10)
RATE_PER_S, SECONDS = 200.0, 50.0
WINDOW_S = 0.02


def times_s(load: OpenLoop, seed: int, seconds: float = SECONDS) -> list[float]:
    return list(itertools.takewhile(lambda at: at < seconds, load.times_s(seed)))


def p_of_window_counts(arrivals_s: list[float], rate_per_s: float = RATE_PER_S) -> float:
    """Return p of a chi-square test of the counts in windows of 20 ms against a Poisson distribution."""
    num_windows = round(SECONDS / WINDOW_S)
    inside = Counter(int(at / WINDOW_S) for at in arrivals_s)
    found = Counter(min(9, inside[window]) for window in range(num_windows))
    mean = rate_per_s * WINDOW_S
    expected = [num_windows * stats.poisson.pmf(k, mean) for k in range(9)]
    expected.append(num_windows - sum(expected))
    return float(stats.chisquare([found[k] for k in range(10)], expected).pvalue)


def p_of_gaps(arrivals_s: list[float]) -> float:
    """Return p of a chi-square test of the gaps against an exponential distribution, in 20 equal bins."""
    gaps = [b - a for a, b in itertools.pairwise([0.0, *arrivals_s])]
    found = Counter(min(19, int(20 * -math.expm1(-RATE_PER_S * gap))) for gap in gaps)
    return float(stats.chisquare([found[k] for k in range(20)]).pvalue)


def test_arrivals_at_a_rate_are_poisson() -> None:
    """Test over ten seeds: no p is below 1 in 10,000, and the median p is not a sign of a bias either."""
    drawn = [times_s(OpenLoop(RATE_PER_S), seed) for seed in SEEDS]
    for test in (p_of_window_counts, p_of_gaps):
        found = sorted(test(arrivals_s) for arrivals_s in drawn)
        assert found[0] > 1e-4, found
        assert 0.1 < found[5] < 0.9, found


def test_the_chi_square_test_refuses_what_is_not_poisson() -> None:
    even = [number / RATE_PER_S for number in range(int(RATE_PER_S * SECONDS))]
    assert p_of_window_counts(even) < 1e-9
    assert p_of_gaps(even) < 1e-9
    assert p_of_window_counts(times_s(OpenLoop(RATE_PER_S, 3), 0)) < 1e-9


@pytest.mark.parametrize("burst_size", [2.0, 8.0])
def test_bursts_keep_the_rate_and_have_the_size(burst_size: float) -> None:
    """Allow four standard errors, of each of five seeds."""
    for seed in range(5):
        arrivals_s = times_s(OpenLoop(1000.0, burst_size), seed)
        bursts = [len(list(group)) for _, group in itertools.groupby(arrivals_s, key=lambda at: round(at, 6))]
        error = 4 * burst_size / math.sqrt(len(bursts))
        assert sum(bursts) / len(bursts) == pytest.approx(burst_size, abs=error)
        assert len(arrivals_s) / SECONDS == pytest.approx(1000.0, rel=error / burst_size * 1.5)


def test_the_same_seed_gives_the_same_arrivals_and_another_gives_others() -> None:
    load = OpenLoop(10.0)
    assert times_s(load, 1) == times_s(load, 1) != times_s(load, 2)


@pytest.mark.parametrize("num_processes", [1, 2, 3, 7])
def test_the_clients_of_all_processes_are_all_clients(num_processes: int) -> None:
    for num_clients in (1, 2, 5, 64):
        shares = [ClosedLoop(num_clients, 0.5).share(rank, num_processes) for rank in range(num_processes)]
        assert sum(share.num_clients for share in shares) == num_clients
        assert max(s.num_clients for s in shares) - min(s.num_clients for s in shares) <= 1


def test_a_trace_begins_at_zero_and_knows_comments(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_text("# arrivals\n10.5\n\n10.5\n11.25 # a late one\n")
    assert read_trace(path) == Trace((0.0, 0.0, 0.75))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("1\nx\n", "line 2: must be a time in seconds, not before the line above, got 'x'"),
        ("2\n1\n", "line 2: must be a time in seconds, not before the line above, got '1'"),
        ("nan\n", "line 1"),
        ("# none\n", "has no times"),
    ],
)
def test_a_wrong_trace_is_refused_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said.replace("'", ".")):
        read_trace(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "none")


def test_poisson_is_no_worse_after_being_shared_out() -> None:
    """Put every third of three processes' requests together again: they are what one process would send."""
    load, whole = OpenLoop(50.0), list(itertools.islice(OpenLoop(50.0).times_s(3), 300))
    parts = [list(itertools.islice(load.times_s(3), rank, 300, 3)) for rank in range(3)]
    assert sorted(itertools.chain(*parts)) == whole
    assert random.Random(3).expovariate(50.0) == whole[0]
