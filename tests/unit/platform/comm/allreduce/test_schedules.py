"""All-reduce schedules: literal pictures, and what holds for any number of ranks and elements."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest

from orchestray.platform.comm.allreduce.placement import crossings, order_by_node, placed_schedule
from orchestray.platform.comm.allreduce.schedules import (
    ALGORITHMS,
    Step,
    is_power_of_two,
    num_levels,
    num_rounds,
    schedule,
    sent_elements,
)

Values = npt.NDArray[np.float64]
SIZES = range(1, 18)


def picture(algorithm: str, size: int, num_elements: int) -> list[str]:
    """Return a line a round: `a>b[i:j]+` for elements i to j from rank a to b, added there; `=` where copied."""
    lines: dict[int, list[str]] = {}
    programs = [schedule(algorithm, rank, size, num_elements) for rank in range(size)]
    for rank, program in enumerate(programs):
        for step in program:
            if step.send is None:
                continue
            peer, start, stop = step.send
            (taken,) = [s for s in programs[peer] if s.round == step.round and s.receive == (rank, start, stop)]
            sign = "+" if taken.combine == "add" else "="
            lines.setdefault(step.round, []).append(f"{rank}>{peer}[{start}:{stop}]{sign}")
    return [" ".join(lines[number]) for number in sorted(lines)]


PICTURES = {
    ("tree", 2): ["1>0[0:8]+", "0>1[0:8]="],
    ("tree", 3): ["1>0[0:8]+", "2>0[0:8]+", "0>2[0:8]=", "0>1[0:8]="],
    ("tree", 4): ["1>0[0:8]+ 3>2[0:8]+", "2>0[0:8]+", "0>2[0:8]=", "0>1[0:8]= 2>3[0:8]="],
    ("tree", 5): [
        "1>0[0:8]+ 3>2[0:8]+",
        "2>0[0:8]+",
        "4>0[0:8]+",
        "0>4[0:8]=",
        "0>2[0:8]=",
        "0>1[0:8]= 2>3[0:8]=",
    ],
    ("tree", 8): [
        "1>0[0:8]+ 3>2[0:8]+ 5>4[0:8]+ 7>6[0:8]+",
        "2>0[0:8]+ 6>4[0:8]+",
        "4>0[0:8]+",
        "0>4[0:8]=",
        "0>2[0:8]= 4>6[0:8]=",
        "0>1[0:8]= 2>3[0:8]= 4>5[0:8]= 6>7[0:8]=",
    ],
    ("butterfly", 2): ["0>1[0:8]+ 1>0[0:8]+"],
    ("butterfly", 3): ["0>1[0:8]+", "1>2[0:8]+ 2>1[0:8]+", "1>0[0:8]="],
    ("butterfly", 4): [
        "0>1[0:8]+ 1>0[0:8]+ 2>3[0:8]+ 3>2[0:8]+",
        "0>2[0:8]+ 1>3[0:8]+ 2>0[0:8]+ 3>1[0:8]+",
    ],
    ("butterfly", 5): [
        "0>1[0:8]+",
        "1>2[0:8]+ 2>1[0:8]+ 3>4[0:8]+ 4>3[0:8]+",
        "1>3[0:8]+ 2>4[0:8]+ 3>1[0:8]+ 4>2[0:8]+",
        "1>0[0:8]=",
    ],
    ("ring", 2): ["0>1[0:4]+ 1>0[4:8]+", "0>1[4:8]= 1>0[0:4]="],
    ("ring", 3): [
        "0>1[0:2]+ 1>2[2:5]+ 2>0[5:8]+",
        "0>1[5:8]+ 1>2[0:2]+ 2>0[2:5]+",
        "0>1[2:5]= 1>2[5:8]= 2>0[0:2]=",
        "0>1[0:2]= 1>2[2:5]= 2>0[5:8]=",
    ],
    ("rabenseifner", 2): ["0>1[4:8]+ 1>0[0:4]+", "0>1[0:4]= 1>0[4:8]="],
    ("rabenseifner", 3): [
        "0>1[0:8]+",
        "1>2[4:8]+ 2>1[0:4]+",
        "1>2[0:4]= 2>1[4:8]=",
        "1>0[0:8]=",
    ],
    ("rabenseifner", 4): [
        "0>1[4:8]+ 1>0[0:4]+ 2>3[4:8]+ 3>2[0:4]+",
        "0>2[2:4]+ 1>3[6:8]+ 2>0[0:2]+ 3>1[4:6]+",
        "0>2[0:2]= 1>3[4:6]= 2>0[2:4]= 3>1[6:8]=",
        "0>1[0:4]= 1>0[4:8]= 2>3[0:4]= 3>2[4:8]=",
    ],
    ("star", 3): ["1>0[0:8]+", "2>0[0:8]+", "0>1[0:8]=", "0>2[0:8]="],
}


@pytest.mark.parametrize(("algorithm", "size"), PICTURES)
def test_a_schedule_is_its_picture(algorithm: str, size: int) -> None:
    assert picture(algorithm, size, 8) == PICTURES[algorithm, size]


@pytest.mark.parametrize(
    ("algorithm", "rank", "steps"),
    [
        # Of eight, the distance grows 1, 2, 4 and what is sent shrinks 4, 2, 1 eighths; then all backwards.
        (
            "rabenseifner",
            5,
            [
                (0, (4, 0, 4), (4, 4, 8), "add"),
                (1, (7, 6, 8), (7, 4, 6), "add"),
                (2, (1, 4, 5), (1, 5, 6), "add"),
                (3, (1, 5, 6), (1, 4, 5), "copy"),
                (4, (7, 4, 6), (7, 6, 8), "copy"),
                (5, (4, 4, 8), (4, 0, 4), "copy"),
            ],
        ),
        ("butterfly", 5, [(k, (p, 0, 8), (p, 0, 8), "add") for k, p in enumerate((4, 7, 1))]),
        (
            "ring",
            6,
            [(k, (7, (6 - k) % 8, (6 - k) % 8 + 1), (5, (5 - k) % 8, (5 - k) % 8 + 1), "add") for k in range(7)]
            + [(7 + k, (7, (7 - k) % 8, (7 - k) % 8 + 1), (5, (6 - k) % 8, (6 - k) % 8 + 1), "copy") for k in range(7)],
        ),
    ],
)
def test_a_rank_of_eight_takes_its_steps(algorithm: str, rank: int, steps: list[tuple[object, ...]]) -> None:
    assert schedule(algorithm, rank, 8, 8) == steps


def carry_out(programs: list[list[Step]], given: list[Values]) -> list[Values]:
    """Execute the schedules of all ranks, round by round; the receiver of every message must expect it."""
    held = [values.copy() for values in given]
    for number in range(max((step.round for program in programs for step in program), default=-1) + 1):
        steps = {rank: step for rank, program in enumerate(programs) for step in program if step.round == number}
        on_wire = {
            (rank, step.send.peer): (
                step.send.start,
                step.send.stop,
                held[rank][step.send.start : step.send.stop].copy(),
            )
            for rank, step in steps.items()
            if step.send is not None
        }
        for rank, step in steps.items():
            if step.receive is None:
                continue
            start, stop, values = on_wire.pop((step.receive.peer, rank))
            assert (start, stop) == (step.receive.start, step.receive.stop)
            if step.combine == "add":
                held[rank][start:stop] += values
            else:
                held[rank][start:stop] = values
        assert on_wire == {}
    return held


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "star"])
def test_every_rank_ends_with_the_same_bits_which_are_the_sum(algorithm: str) -> None:
    rng = np.random.default_rng(0)
    for size in SIZES:
        for num_elements in (*range(20), 31, 32, 40):
            given = [rng.normal(size=num_elements) for _ in range(size)]
            programs = [schedule(algorithm, rank, size, num_elements) for rank in range(size)]
            assert all([s.round for s in p] == sorted({s.round for s in p}) for p in programs), "a step a round at most"
            held = carry_out(programs, given)
            assert all(np.array_equal(values, held[0]) for values in held)
            np.testing.assert_allclose(held[0], np.sum(given, axis=0), rtol=0, atol=1e-13)


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, "star"])
def test_the_longest_rank_takes_the_rounds_of_the_formula(algorithm: str) -> None:
    for size in SIZES:
        levels = {s.round for rank in range(size) for s in schedule(algorithm, rank, size, 64)}
        assert levels == set(range(num_rounds(algorithm, size))), "and no round is empty"
    formulas = {"tree": lambda p: 2 * np.log2(p), "butterfly": np.log2, "rabenseifner": lambda p: 2 * np.log2(p)}
    for size in (1, 2, 4, 8, 16):
        assert num_rounds(algorithm, size) == formulas.get(algorithm, lambda p: 2 * (p - 1))(size)


def test_ranks_that_are_no_power_of_two_cost_butterfly_and_rabenseifner_two_rounds_and_the_tree_one_level() -> None:
    for size in (3, 5, 6, 7, 9, 17):
        power = 1 << num_levels(size)
        assert not is_power_of_two(size)
        assert power < size < 2 * power
        for algorithm in ("butterfly", "rabenseifner"):
            assert num_rounds(algorithm, size) == num_rounds(algorithm, power) + 2
        assert num_rounds("tree", size) == num_rounds("tree", 2 * power)
        assert num_rounds("ring", size) == 2 * (size - 1)


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_ring_and_rabenseifner_send_2_p_minus_1_parts_of_p_and_butterfly_the_whole_each_round(size: int) -> None:
    num_elements = 7 * size
    for algorithm in ("ring", "rabenseifner"):
        assert sent_elements(algorithm, size, num_elements) == [2 * num_elements * (size - 1) // size] * size
    assert sent_elements("butterfly", size, num_elements) == [num_elements * num_rounds("butterfly", size)] * size


@pytest.mark.parametrize("size", SIZES)
def test_tree_ring_and_star_send_two_p_minus_1_times_the_tensor_together_whatever_its_size(size: int) -> None:
    for num_elements in range(41):
        for algorithm in ("tree", "ring", "star"):
            assert sum(sent_elements(algorithm, size, num_elements)) == 2 * (size - 1) * num_elements
        # Nothing is padded: of P segments that differ by an element at most, a rank leaves out one on each way round.
        cuts = [place * num_elements // size for place in range(size + 1)]
        segments = [after - before for before, after in itertools.pairwise(cuts)]
        assert max(segments) - min(segments) <= 1
        exact = [2 * num_elements - segments[(rank + 1) % size] - segments[(rank + 2) % size] for rank in range(size)]
        assert sent_elements("ring", size, num_elements) == (exact if size > 1 else [0])


@pytest.mark.parametrize("algorithm", ["tree", "butterfly", "star"])
def test_each_message_of_a_tree_and_a_butterfly_is_the_whole_tensor(algorithm: str) -> None:
    for size in (2, 4, 8, 16):
        messages = [step.send for rank in range(size) for step in schedule(algorithm, rank, size, 41) if step.send]
        assert {message.num_elements for message in messages} == {41}
        assert len(messages) == (size * num_rounds("butterfly", size) if algorithm == "butterfly" else 2 * (size - 1))


def test_what_is_folded_in_and_out_is_the_tensor_twice_by_each_of_the_pairs() -> None:
    # 6 ranks: 0>1 and 2>3 before, 1>0 and 3>2 after; 1, 3, 4, 5 do as 4 ranks.
    assert sent_elements("butterfly", 6, 8) == [8, 16 + 8, 8, 16 + 8, 16, 16]
    assert sent_elements("rabenseifner", 6, 8) == [8, 12 + 8, 8, 12 + 8, 12, 12]


@pytest.mark.parametrize("wrong", [("hypercube", 0, 2, 4), ("ring", 2, 2, 4), ("ring", -1, 2, 4), ("ring", 0, 2, -1)])
def test_impossible_schedules_are_refused(wrong: tuple[str, int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"There is no all-reduce 'hypercube'|no rank can have that"):
        schedule(*wrong)


def test_ranks_of_a_node_take_places_side_by_side_and_the_result_stays_the_sum() -> None:
    nodes = ["b", "a", "c", "b", "a", "b"]
    order = order_by_node(nodes)
    assert order == [0, 3, 5, 1, 4, 2]
    rng = np.random.default_rng(1)
    given = [rng.normal(size=11) for _ in nodes]
    for algorithm in ALGORITHMS:
        held = carry_out([placed_schedule(algorithm, rank, order, 11) for rank in range(6)], given)
        assert all(np.array_equal(values, held[0]) for values in held)
        np.testing.assert_allclose(held[0], np.sum(given, axis=0), rtol=0, atol=1e-13)


def test_a_ring_over_two_nodes_crosses_between_them_twice_a_round_and_not_at_every_rank() -> None:
    nodes, rounds = ["a", "b"] * 4, num_rounds("ring", 8)
    assert crossings("ring", nodes, order_by_node(nodes), 8) == (2 * rounds, 2 * rounds)
    assert crossings("ring", nodes, list(range(8)), 8) == (8 * rounds, 8 * rounds)
