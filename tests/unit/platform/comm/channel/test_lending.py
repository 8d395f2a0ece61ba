"""Memory that two ends of a channel see at once."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from orchestray.platform.comm.channel import ChannelMismatchError, thread_pair
from orchestray.platform.comm.channel.blocks import SharedBlock, room_for

if TYPE_CHECKING:
    from orchestray.platform.comm.channel import Channel

Pair = tuple["Channel", "Channel"]
VALUES = torch.arange(1000, dtype=torch.float32)


def offered(pair: Pair) -> SharedBlock:
    block = SharedBlock.create(room_for([VALUES, VALUES]))
    assert pair[0].offer(block)
    return block


def told(sender: Channel, receiver: Channel, tensor: torch.Tensor) -> torch.Tensor:
    """Lend a tensor, and return it as the other end sees it after a message."""
    sender.send([], meta={"place": sender.lend(tensor)})
    return receiver.borrow(receiver.recv().meta["place"])


def test_a_tensor_in_an_offered_block_is_the_same_memory_at_both_ends(shared_memory_pair: Pair) -> None:
    left, right = shared_memory_pair
    mine = offered(shared_memory_pair).take(VALUES).copy_(VALUES)
    theirs = told(left, right, mine[10:90].view(8, 10))
    assert torch.equal(theirs, VALUES[10:90].view(8, 10))
    theirs.zero_()
    assert not mine[10:90].any()
    assert torch.equal(mine[90:], VALUES[90:])
    back = told(right, left, theirs)  # what the other end lent may be lent back, too
    assert back.data_ptr() == mine[10:90].data_ptr()


def test_only_dense_tensors_in_a_block_can_be_lent(shared_memory_pair: Pair) -> None:
    left, _ = shared_memory_pair
    block = offered(shared_memory_pair)
    square = block.take(VALUES).view(100, 10)
    assert left.lend(square) is not None
    assert left.lend(square.t()) is None
    assert left.lend(VALUES) is None


def test_offers_and_messages_come_in_their_order(shared_memory_pair: Pair) -> None:
    left, right = shared_memory_pair
    handles = [left.isend(torch.full((1_000_000,), float(number))) for number in range(3)]  # wait for the receiver
    block = SharedBlock.create(4096)
    handle = right.irecv()
    assert float(handle.wait().tensor[0]) == 0.0
    receives = [right.irecv() for _ in range(2)]
    assert left.offer(block)
    place = left.lend(block.take(VALUES[:4]).fill_(7.0))
    left.send([], meta={"place": place})
    assert [float(receive.wait().tensor[0]) for receive in receives] == [1.0, 2.0]
    assert right.borrow(right.recv().meta["place"]).tolist() == [7.0] * 4
    for sent in handles:
        sent.wait()
    assert left.messages_sent == right.messages_received == 4


@pytest.mark.parametrize(
    "place",
    [
        ["float32", [1000], 0, 1, 0],
        ["float32", [3000], 0, 0, 0],
        ["float32", [10], 0, 0, -40],
        ["float32", [10], 0, 0, 2],
        ["nothing", [10], 0, 0, 0],
        ["float32", [10], 1, 0, 0],
    ],
)
def test_a_place_outside_the_block_is_refused(shared_memory_pair: Pair, place: list[object]) -> None:
    left, right = shared_memory_pair
    offered(shared_memory_pair)
    left.send([])
    right.recv()
    with pytest.raises(ChannelMismatchError):
        right.borrow(place)


def test_blocks_are_gone_once_nobody_refers_to_them(shared_memory_pair: Pair) -> None:
    def num_mapped() -> int:
        gc.collect()
        return Path("/proc/self/maps").read_text().count("orchestray-block")

    left, right = shared_memory_pair
    others = num_mapped()
    block = offered(shared_memory_pair)
    theirs = told(left, right, block.take(VALUES))
    assert num_mapped() == others + 2
    left.close()
    right.close()
    del block, theirs
    assert num_mapped() == others


def test_a_block_that_cannot_be_mapped_closes_its_file_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made, closed = [], []
    create, close = os.memfd_create, os.close

    def refuse(*_: object, **__: object) -> None:
        raise OSError("no memory")

    monkeypatch.setattr(os, "memfd_create", lambda *given: made.append(create(*given)) or made[-1])
    monkeypatch.setattr(os, "close", lambda file: (closed.append(file), close(file)))
    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(OSError, match="no memory") as raised:
        SharedBlock.create(4096)
    del raised
    gc.collect()
    assert [file for file in closed if file in made] == made


def test_a_channel_that_cannot_lend_says_so() -> None:
    left, right = thread_pair()
    with left, right:
        block = SharedBlock.create(room_for([VALUES]))
        assert not left.lends
        assert not left.offer(block)
        assert left.lend(block.take(VALUES)) is None
        with pytest.raises(ChannelMismatchError, match="lends none"):
            right.borrow(["float32", [1], 0, 0, 0])


def test_memory_that_is_its_owners_shows_the_owners_changes_and_takes_nobody_elses(shared_memory_pair: Pair) -> None:
    left, right = shared_memory_pair
    block = SharedBlock.create(4 * mmap.PAGESIZE, is_mine=True)
    assert left.offer(block)
    mine = block.take(torch.zeros(mmap.PAGESIZE, dtype=torch.float32))
    theirs = told(left, right, mine)
    mine.fill_(1.0)
    assert torch.equal(theirs, mine)
    theirs[0] = 5.0
    assert mine[0] == 1.0
    mine.fill_(2.0)
    assert bool((theirs[mmap.PAGESIZE // 4 :] == 2.0).all())  # but for the page that was written to
    assert theirs[1] == 1.0
    assert torch.equal(told(left, right, mine), mine)  # until it is lent again
    with pytest.raises(OSError, match="not permitted"):
        mmap.mmap(block.file, block.num_bytes, flags=mmap.MAP_SHARED)
