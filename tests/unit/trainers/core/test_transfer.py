"""Bringing a spread-out state together, and dealing it out, over real connections."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from orchestray.platform.comm.collective import Collective
from orchestray.platform.errors import CheckpointError
from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good, load_checkpoint, stream_checkpoint
from orchestray.trainers.core.exchange import LocalTensor
from orchestray.trainers.core.transfer import describe, scatter
from orchestray.trainers.layout.degrees import Layout
from orchestray.trainers.layout.groups import Groups
from orchestray.trainers.layout.tensor_slice import TensorSlice
from orchestray.trainers.loop.sharded_state import gather_plain, save
from support.threads import run_replicas

PLAIN = {
    "rows": torch.arange(24.0).reshape(6, 4),
    "columns": torch.arange(15, dtype=torch.float64).reshape(3, 5),
    "whole": torch.arange(7),
    "number": torch.tensor(3.0),
}


def held_by(rank: int, size: int) -> dict[str, LocalTensor]:
    pieces = {
        "rows": TensorSlice.whole("rows", (6, 4)).chunk(0, rank, size),
        "columns": TensorSlice.whole("columns", (3, 5)).chunk(1, rank, size),
        "whole": TensorSlice.whole("whole", (7,), is_counted=rank == size - 1),
        "number": TensorSlice.whole("number", ()),
    }
    return {f"my {name}": LocalTensor(piece.take(PLAIN[name]), piece) for name, piece in pieces.items()}


@pytest.mark.parametrize("size", [2, 3])
def test_pieces_come_together_on_rank_0(size: int) -> None:
    def member(world: Collective) -> dict[str, Tensor]:
        return gather_plain(world, held_by(world.rank, size))

    first, *others = run_replicas(size, member)
    assert first.keys() == PLAIN.keys()
    assert all(torch.equal(first[name], PLAIN[name]) and first[name].dtype == PLAIN[name].dtype for name in PLAIN)
    assert others == [{}] * (size - 1)


@pytest.mark.parametrize("size", [2, 3])
def test_every_worker_gets_the_pieces_it_wants(size: int) -> None:
    def member(world: Collective) -> bool:
        held = held_by(world.rank, size)
        wanted = {key: item.piece for key, item in held.items()}
        rows = [[name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for name, tensor in PLAIN.items()]
        source = (rows, iter(PLAIN.values())) if world.rank == 0 else None
        got = dict(scatter(world, source, wanted))
        assert got.keys() == held.keys()
        return all(torch.equal(got[key], held[key].tensor) for key in held)

    assert run_replicas(size, member) == [True] * size


def test_a_tensor_that_nobody_holds_whole_cannot_be_saved() -> None:
    def member(world: Collective) -> None:
        held = held_by(world.rank, 2)
        if world.rank == 1:
            del held["my rows"]
        with pytest.raises(CheckpointError, match="hold 12 of the 24 elements of 'rows'"):
            describe(world, held)

    run_replicas(2, member)


@pytest.mark.parametrize("limit_bytes", [1 << 20, 0], ids=["gathered", "streamed"])
def test_a_spread_out_state_is_saved_as_a_plain_one(tmp_path: Path, limit_bytes: int) -> None:
    def member(world: Collective) -> None:
        held = held_by(world.rank, 2)
        writer = CheckpointWriter(tmp_path, keep=1) if world.rank == 0 else None
        save(world, writer, 5, held, {}, {"position": {"step": 5}}, limit_bytes=limit_bytes)
        if writer is not None:
            writer.close()

    run_replicas(2, member)
    found, _ = latest_good(tmp_path)
    assert found is not None
    model, optimizer, state = load_checkpoint(found)
    assert model.keys() == PLAIN.keys()
    assert all(torch.equal(model[name], PLAIN[name]) for name in PLAIN)
    assert optimizer == {}
    assert state["position"] == {"step": 5}


def test_a_streamed_save_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    plain = {f"w{n}": torch.full((1000,), float(n)) for n in range(8)}
    alive: list[int] = []

    def member(world: Collective) -> None:
        held = {}
        for name, tensor in plain.items():
            piece = TensorSlice.whole(name, (1000,)).chunk(0, world.rank, 2)
            held[name] = LocalTensor(piece.take(tensor), piece)
        writer = Counting(tmp_path, alive) if world.rank == 0 else None
        save(world, writer, 1, held, {}, {}, limit_bytes=0)

    run_replicas(2, member)
    assert alive
    assert max(alive) == 1


class Counting(CheckpointWriter):
    """A writer that counts the whole tensors that are alive while they come."""

    def __init__(self, directory: Path, alive: list[int]) -> None:
        super().__init__(directory, keep=1)
        self._alive = alive

    def save_streamed(self, step, files, state) -> None:  # type: ignore[no-untyped-def, override]
        import weakref

        living: set[int] = set()

        def counted(produce):  # type: ignore[no-untyped-def]
            def run(take) -> None:  # type: ignore[no-untyped-def]
                def note(name: str, tensor: Tensor) -> None:
                    living.add(id(tensor))
                    weakref.finalize(tensor, living.discard, id(tensor))
                    self._alive.append(len(living))
                    take(name, tensor)

                produce(note)

            return run

        wrapped = {file: (layout, counted(produce)) for file, (layout, produce) in files.items()}
        super().save_streamed(step, wrapped, state)


def test_a_stream_of_a_damaged_file_ends_in_an_error(tmp_path: Path) -> None:
    with CheckpointWriter(tmp_path, keep=1) as writer:
        writer.save_async(1, {"w": torch.arange(100.0)}, {}, {}).wait()
    found, _ = latest_good(tmp_path)
    assert found is not None
    file = tmp_path / found.name / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    described, tensors = stream_checkpoint(found, "model.safetensors")
    assert described == [["w", "float32", [100]]]

    def read() -> Iterator[Tensor]:
        yield from tensors

    with pytest.raises(CheckpointError, match="checksum"):
        list(read())


def test_the_groups_of_a_layout_sum_over_their_own_axis() -> None:
    layout = Layout(data=2, tensor=2, pipeline=2)

    def member(world: Collective) -> list[float]:
        groups = Groups(layout, world)
        sums = []
        for group in (groups.data, groups.pipeline, groups.tensor, groups.model, groups.world):
            total = torch.tensor([float(10**world.rank)], dtype=torch.float64)
            group.all_reduce(total)
            sums.append(float(total))
        return sums

    for rank, sums in enumerate(run_replicas(8, member)):
        expected = [
            *(layout.group(rank, axis) for axis in ("data", "pipeline", "tensor")),
            layout.model_group(rank),
            list(range(8)),
        ]
        assert sums == [float(sum(10**r for r in ranks)) for ranks in expected]


def test_a_channel_joins_two_workers_of_a_layout() -> None:
    def member(world: Collective) -> float:
        groups = Groups(Layout(pipeline=2), world)
        channel = groups.channel(1 - world.rank, "activations")
        if world.rank == 0:
            channel.send(torch.full((3,), 7.0))
            sent = groups.bytes_sent
            assert sent == 12
            return 7.0
        return float(channel.recv().tensor[0])

    assert run_replicas(2, member) == [7.0, 7.0]
