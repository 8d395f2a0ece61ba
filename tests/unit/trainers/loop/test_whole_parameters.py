"""Optimizers that have to see whole parameters, on workers that hold parts of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.platform.comm.solo import SoloCollective
from orchestray.trainers.core.exchange import OptimizedTensor
from orchestray.trainers.layout.tensor_slice import TensorSlice
from orchestray.trainers.loop.whole_parameters import with_whole_parameters
from orchestray.trainers.optim.clipping import SpreadSums
from orchestray.trainers.optim.factory import make_optimizer
from orchestray.trainers.optim.optimizers import SGD, Optimizer
from support.threads import run_replicas
from support.training import furthest, same_bits

SHAPES = {"a": (8, 6), "b": (5, 7), "c": (6, 6), "d": (3,)}
LR = 0.01


def plain_tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}


class Worker:
    """A worker that holds some rows of each parameter, or columns of the second."""

    def __init__(self, world: Collective, *, copies: int = 1, kind: str = "soap") -> None:
        """
        Args:
            world: all workers.
            copies: number of workers that hold each part; the first one counts it.
            kind: type of the optimizer.
        """
        count, index = world.size // copies, world.rank // copies
        self.pieces = {
            name: TensorSlice.whole(name, shape).chunk(name == "b", index, count).counted(world.rank % copies == 0)
            for name, shape in SHAPES.items()
        }
        self.world = world
        self.optimizer: Optimizer = make_optimizer(kind, lr=LR)
        self.begin()

    def begin(self) -> None:
        """Begin from the first weights, with the optimizer that there is."""
        self.tensors = self.of(plain_tensors(0))
        updates = [OptimizedTensor(name, tensor, self.pieces[name]) for name, tensor in self.tensors.items()]
        self.optimizer = with_whole_parameters(self.optimizer, SpreadSums(updates, self.world, dtypes_of(self.tensors)))
        self.optimizer.init(self.tensors.items())
        self.optimizer.join(SoloCollective())

    def of(self, plain: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: piece.take(plain[name]) for name, piece in self.pieces.items()}

    def step(self, number: int, unused: tuple[str, ...] = ()) -> None:
        grads = self.of(plain_tensors(number))
        given = [None if name in unused else grads[name] for name in self.tensors]
        self.optimizer.step(list(self.tensors.values()), given, LR)


def dtypes_of(tensors: dict[str, Tensor]) -> dict[str, torch.dtype]:
    return {name: tensor.dtype for name, tensor in tensors.items()}


def moved_alone(num_steps: int, unused: tuple[str, ...] = ()) -> Worker:
    worker = Worker(SoloCollective())
    for number in range(1, num_steps + 1):
        worker.step(number, unused)
    return worker


@pytest.mark.parametrize(("size", "copies"), [(2, 1), (3, 1), (4, 2)])
def test_each_holder_has_its_part_of_the_whole_parameters_step(size: int, copies: int) -> None:
    """Cut parameters into more parts than some have rows, and have two workers hold each part."""

    def run(world: Collective) -> bool:
        worker = Worker(world, copies=copies)
        for number in (1, 2, 3):
            worker.step(number)
        return same_bits(worker.tensors, worker.of(expected))

    expected = moved_alone(3).tensors
    assert all(run_replicas(size, run))


def test_one_worker_has_the_state_of_a_parameter_and_the_parameters_are_spread() -> None:
    def run(world: Collective) -> tuple[dict[str, Tensor], list[str]]:
        worker = Worker(world)
        worker.step(1)
        wanted = [f"{name}.{slot}" for name in SHAPES for slot in worker.optimizer.slots_of(name)]
        return worker.optimizer.state_tensors(), wanted

    (first, of_first), (second, of_second) = run_replicas(2, run)
    assert first.keys() <= set(of_first)
    assert second.keys() <= set(of_second)
    assert {key.partition(".")[0] for key in first} == {"a", "d"}  # 48 and 3 of 122 elements
    assert {key.partition(".")[0] for key in second} == {"b", "c"}
    assert same_bits(first | second, moved_alone(1).optimizer.state_tensors())


def test_copies_of_a_part_share_the_parameters_among_all_workers() -> None:
    def run(world: Collective) -> set[str]:
        worker = Worker(world, copies=2)
        worker.step(1)
        return {key.partition(".")[0] for key in worker.optimizer.state_tensors()}

    assert run_replicas(4, run) == [{"a"}, {"c"}, {"b"}, {"d"}]


def test_a_parameter_that_no_worker_uses_keeps_value_and_state_and_one_holder_is_enough() -> None:
    def run(world: Collective) -> tuple[dict[str, Tensor], bool]:
        worker = Worker(world)
        worker.step(1, unused=("a", "b"))
        untouched = all(torch.equal(worker.tensors[name], worker.of(plain_tensors(0))[name]) for name in ("a", "b"))
        is_expected = same_bits(worker.tensors, worker.of(alone.tensors))
        worker.step(2, unused=("c",) if world.rank else ())
        moves = not torch.equal(worker.tensors["c"], worker.of(alone.tensors)["c"])
        return worker.optimizer.state_tensors(), untouched and is_expected and moves

    alone = moved_alone(1, unused=("a", "b"))
    for state, is_right in run_replicas(2, run):
        assert is_right
        assert {int(value) for key, value in state.items() if key in ("a.step", "b.step")} == {1}


def test_parts_of_what_moves_element_by_element_stay_where_they_are() -> None:
    """Have Muon move vectors by AdamW, each worker its elements."""

    def run(world: Collective) -> set[str]:
        worker = Worker(world, kind="muon")
        worker.step(1)
        return {key.partition(".")[0] for key in worker.optimizer.state_tensors()}

    assert run_replicas(2, run) == [{"a", "d"}, {"b", "c", "d"}]


@pytest.mark.parametrize("kind", ["muon", "soap"])
def test_an_optimizer_begins_again_after_a_lost_worker_and_sends_as_much_as_before(kind: str) -> None:
    def run(world: Collective) -> tuple[int, int]:
        worker = Worker(world, kind=kind)
        sent = []
        for _ in range(2):
            before = world.bytes_sent
            worker.step(1)
            sent.append((world.bytes_sent - before, {name: tensor.clone() for name, tensor in worker.tensors.items()}))
            worker.begin()
        (first, weights), (second, again) = sent
        assert same_bits(weights, again)
        return first, second

    for first, second in run_replicas(2, run):
        assert first == second > 0


def test_a_step_whose_parts_do_not_arrive_changes_nothing() -> None:
    def run(world: Collective) -> bool:
        worker = Worker(world)
        worker.step(1)
        world.barrier()
        if world.rank == 1:
            world.abort()
            return True
        before = {name: tensor.clone() for name, tensor in worker.tensors.items()}
        state = {name: tensor.clone() for name, tensor in worker.optimizer.state_tensors().items()}
        with pytest.raises(PeerLostError):
            worker.step(2)
        return same_bits(before, worker.tensors) and same_bits(state, worker.optimizer.state_tensors())

    assert all(run_replicas(2, run))


class Pairs(SGD):
    """An optimizer that moves "a" with "d"."""

    takes_parts = False

    def moves_with(self, name: str) -> str:
        return "d" if name == "a" else name

    def names(self) -> set[str]:
        return set(self._names)


@pytest.mark.parametrize("is_cut", [True, False])
def test_parameters_that_move_together_have_one_owner(is_cut: bool) -> None:
    """Cut each parameter into two parts, or give the workers whole ones."""

    def run(world: Collective) -> tuple[set[str], bool]:
        plain, grads = plain_tensors(0), plain_tensors(1)
        pieces = {name: TensorSlice.whole(name, shape) for name, shape in SHAPES.items()}
        for place, (name, piece) in enumerate(pieces.items()):
            size, here = piece.shape[0], place % 2 == world.rank
            pieces[name] = piece.chunk(0, world.rank, 2) if is_cut else piece.narrow(0, (0, size if here else 0))
        tensors = {name: piece.take(plain[name]) for name, piece in pieces.items()}
        pairs = Pairs()
        updates = [OptimizedTensor(name, tensor, pieces[name]) for name, tensor in tensors.items()]
        optimizer = with_whole_parameters(pairs, SpreadSums(updates, world, dtypes_of(tensors)))
        optimizer.init(tensors.items())
        optimizer.step(list(tensors.values()), [piece.take(grads[name]) for name, piece in pieces.items()], LR)
        expected = {name: piece.take(plain[name] - LR * grads[name]) for name, piece in pieces.items()}
        return pairs.names(), furthest(tensors, expected) <= 1e-15

    (first, is_right), (second, is_right_too) = run_replicas(2, run)
    assert is_right
    assert is_right_too
    assert first | second == set(SHAPES)
    assert not first & second
    assert {"a", "d"} <= first or {"a", "d"} <= second


def test_whole_parameters_stay_where_they_are_and_replicas_share_their_decompositions() -> None:
    def run(world: Collective) -> list[int]:
        tensor = plain_tensors(0)["a"]
        piece = TensorSlice.whole("a", SHAPES["a"], is_counted=world.rank == 0)
        sent = []
        for replicas in (SoloCollective(), world):
            soap = make_optimizer("soap", lr=LR)
            sums = SpreadSums([OptimizedTensor("a", tensor, piece)], world, {"a": tensor.dtype})
            optimizer = with_whole_parameters(soap, sums)
            optimizer.init([("a", tensor)])
            optimizer.join(replicas)
            before = world.bytes_sent
            optimizer.step([tensor], [plain_tensors(1)["a"]], LR)
            sent.append(world.bytes_sent - before)
        return sent

    assert run_replicas(2, run) == [[0, 8 * 8 * 8], [0, 8 * 6 * 6]]
