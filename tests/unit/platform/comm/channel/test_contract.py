"""Promises of every channel, whatever carries it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from orchestray.platform.comm.channel import Channel, ChannelClosedError, ChannelMismatchError, ChannelTimeoutError

if TYPE_CHECKING:
    from support.channel_pair import Pair

LARGE = 3_000_017  # elements: more than every inline limit and ring, and no multiple of a slot

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool,
]  # fmt: skip


def sample(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


def nothing(_: Channel) -> None:
    """Do nothing, as the program of an end."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_receiver_that_knows_nothing_gets_the_same_dtype_shape_and_values(pair: Pair, dtype: torch.dtype) -> None:
    sent = [sample(dtype, shape) for shape in [(), (0,), (3, 0, 2), (1,), (7, 5), (100_003,)]]

    def sender(end: Channel) -> None:
        for tensor in sent:
            end.send(tensor)

    _, received = pair.run(sender, lambda end: [end.recv().tensor for _ in sent])
    for got, tensor in zip(received, sent, strict=True):
        assert (got.dtype, got.shape) == (dtype, tensor.shape)
        assert torch.equal(got, tensor)


def test_tag_meta_and_many_tensors_of_all_sizes_travel_in_one_message(pair: Pair) -> None:
    sent = [torch.arange(n) for n in (0, 1, 5000, 2, LARGE, 3, 70_000)]
    meta = {"clock": 7, "names": ["a", "b"], "nested": {"x": None}}
    _, message = pair.run(lambda end: end.send(sent, tag="push", meta=meta), lambda end: end.recv(tag="push"))
    assert (message.tag, message.meta) == ("push", meta)
    assert all(torch.equal(a, b) for a, b in zip(message.tensors, sent, strict=True))


def test_a_message_may_carry_no_tensor(pair: Pair) -> None:
    _, message = pair.run(lambda end: end.send([], tag="stop"), lambda end: end.recv())
    assert (message.tag, message.tensors) == ("stop", ())


def test_a_header_of_many_tensors_is_longer_than_a_frame_and_arrives(pair: Pair) -> None:
    sent = [torch.full((1, 2, 3), float(i)) for i in range(4000)]
    _, message = pair.run(lambda end: end.send(sent), lambda end: end.recv())
    assert all(torch.equal(a, b) for a, b in zip(message.tensors, sent, strict=True))


@pytest.mark.parametrize("size", [10, LARGE])
def test_tensors_that_are_not_contiguous_are_sent_and_filled(pair: Pair, size: int) -> None:
    sent = torch.arange(2 * size).reshape(size, 2).t()
    target = torch.zeros(size, 3, dtype=torch.int64).t()[:2]
    assert not sent.is_contiguous()
    assert not target.is_contiguous()
    _, message = pair.run(lambda end: end.send(sent), lambda end: end.recv(into=target))
    assert message.tensor is target
    assert torch.equal(target, sent)


def test_lazily_conjugated_and_negated_tensors_are_sent_as_what_they_mean(pair: Pair) -> None:
    plain = torch.tensor([1 + 2j, 3 - 4j])
    conjugated, negated = plain.conj(), plain.conj().imag
    assert conjugated.is_conj()
    assert negated.is_neg()
    _, message = pair.run(lambda end: end.send([conjugated, negated]), lambda end: end.recv())
    assert message.tensors[0].tolist() == [1 - 2j, 3 + 4j]
    assert message.tensors[1].tolist() == [-2, 4]


def test_into_fills_the_very_memory_of_parameters(pair: Pair) -> None:
    small, large = torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(LARGE))
    addresses = small.data_ptr(), large.data_ptr()
    sent = [torch.ones(4), torch.rand(LARGE)]
    pair.run(lambda end: end.send(sent), lambda end: end.recv(into=[small, large]))
    assert (small.data_ptr(), large.data_ptr()) == addresses
    assert torch.equal(small, sent[0])
    assert torch.equal(large, sent[1])


@pytest.mark.parametrize("size", [8, LARGE])
def test_a_sent_tensor_may_be_changed_after_send(pair: Pair, size: int) -> None:
    def sender(end: Channel) -> None:
        tensor = torch.ones(size)
        for _ in range(3):
            end.send(tensor)
            tensor.add_(1)

    def receiver(end: Channel) -> list[float]:
        return [float(t.min()) for t in (end.recv().tensor for _ in range(3))]

    assert pair.run(sender, receiver)[1] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("size", [16, LARGE])
def test_both_ends_send_and_receive_at_once(pair: Pair, size: int) -> None:
    def program(end: Channel) -> float:
        mine = torch.full((size,), 1.0 if end is pair.left else 2.0)
        total = 0.0
        for _ in range(3):
            sending = end.isend(mine)
            total += float(end.recv(into=torch.empty_like(mine)).tensor[-1])
            sending.wait()
        return total

    assert pair.run(program, program) == (6.0, 3.0)


def test_messages_and_receives_keep_their_order(pair: Pair) -> None:
    sizes = [3, LARGE, 5, 40_000, 2, 1]

    def sender(end: Channel) -> None:
        for handle in [end.isend(torch.full((n,), i)) for i, n in enumerate(sizes)]:
            handle.wait()

    def receiver(end: Channel) -> list[tuple[int, int]]:
        messages = [handle.wait() for handle in [end.irecv() for _ in sizes]]
        return [(int(m.tensor[0]), m.tensor.numel()) for m in messages]

    assert pair.run(sender, receiver)[1] == list(enumerate(sizes))


def test_counted_bytes_are_those_of_the_tensors(pair: Pair) -> None:
    sent = [torch.zeros(10, dtype=torch.bfloat16), torch.zeros(LARGE), torch.zeros(0), torch.zeros(3, dtype=torch.bool)]
    payload_bytes = 20 + 4 * LARGE + 3

    def sender(end: Channel) -> None:
        end.send(sent)
        end.send([])

    pair.run(sender, lambda end: [end.recv(), end.recv()])
    assert (pair.left.bytes_sent, pair.left.messages_sent) == (payload_bytes, 2)
    assert (pair.right.bytes_received, pair.right.messages_received) == (payload_bytes, 2)
    assert (pair.right.bytes_sent, pair.left.bytes_received) == (0, 0)
    assert pair.left.overhead_bytes_sent < 500


@pytest.mark.parametrize("size", [4, LARGE])
def test_a_message_that_does_not_fit_is_refused_and_the_channel_goes_on(pair: Pair, size: int) -> None:
    wanted = torch.zeros(size, 2)

    def sender(end: Channel) -> None:
        end.send(torch.ones(size))
        end.send(torch.ones(size, 2))

    def receiver(end: Channel) -> torch.Tensor:
        with pytest.raises(
            ChannelMismatchError, match=rf"right expected float32\[{size}, 2\] and got float32\[{size}\]"
        ):
            end.recv(into=wanted)
        assert not wanted.any()
        return end.recv(into=wanted).tensor

    assert pair.run(sender, receiver)[1].all()


def test_another_tag_than_the_expected_is_refused(pair: Pair) -> None:
    def receiver(end: Channel) -> None:
        with pytest.raises(ChannelMismatchError, match="right expected a message 'pull' and got 'push'"):
            end.recv(tag="pull")

    pair.run(lambda end: end.send(torch.ones(1), tag="push"), receiver)


def test_sparse_tensors_are_refused_before_anything_is_sent(pair: Pair) -> None:
    def sender(end: Channel) -> None:
        with pytest.raises(TypeError, match="dense tensors"):
            end.send(torch.ones(3).to_sparse())
        end.send(torch.ones(3))

    assert pair.run(sender, lambda end: end.recv())[1].tensor.shape == (3,)


def test_meta_that_is_not_json_is_refused_before_anything_is_sent(pair: Pair) -> None:
    def sender(end: Channel) -> None:
        with pytest.raises(TypeError, match="JSON"):
            end.send(torch.ones(3), meta={"when": object()})
        end.send(torch.ones(3))

    assert pair.run(sender, lambda end: end.recv())[1].meta == {}


def test_a_receive_that_timed_out_says_who_waited_for_whom_and_loses_nothing(pair: Pair) -> None:
    def receiver(end: Channel) -> torch.Tensor:
        with pytest.raises(
            ChannelTimeoutError, match=r"^right waited for left to send message 'go': nothing within 0.01 s"
        ):
            end.recv(tag="go", timeout_s=0.01)
        end.send(torch.zeros(1), tag="timed out")
        return end.recv(tag="go").tensor

    def sender(end: Channel) -> None:
        end.recv(tag="timed out")
        end.send(torch.ones(5), tag="go")

    assert pair.run(sender, receiver)[1].sum() == 5


def test_a_handle_whose_wait_timed_out_can_be_waited_for_again(pair: Pair) -> None:
    target = torch.zeros(LARGE)

    def receiver(end: Channel) -> None:
        handle = end.irecv(into=target)
        with pytest.raises(ChannelTimeoutError):
            handle.wait(0.01)
        assert not handle.done()
        end.send(torch.zeros(1))
        handle.wait()

    def sender(end: Channel) -> None:
        end.recv()
        end.send(torch.ones(LARGE))

    pair.run(sender, receiver)
    assert target.all()


def test_a_cancelled_receive_leaves_its_message_to_the_next(pair: Pair) -> None:
    def receiver(end: Channel) -> torch.Tensor:
        assert end.irecv().cancel()
        end.send(torch.zeros(1))
        return end.recv().tensor

    def sender(end: Channel) -> None:
        end.recv()
        end.send(torch.full((2,), 9))

    assert pair.run(sender, receiver)[1].tolist() == [9, 9]


def test_closing_ends_the_peers_pending_receive_and_its_next_send(pair: Pair) -> None:
    def closer(end: Channel) -> None:
        end.recv()
        end.close()

    def waiter(end: Channel) -> None:
        pending = end.irecv()
        end.send(torch.zeros(1))
        with pytest.raises(
            ChannelClosedError, match="the channel of right to left is closed: the peer closed it or died"
        ):
            pending.wait()
        for call in (lambda: end.send(torch.zeros(1)), end.recv):
            with pytest.raises(ChannelClosedError, match="right to left"):
                call()

    pair.run(closer, waiter)


def test_closing_ends_ones_own_pending_receive_and_may_be_done_twice(pair: Pair) -> None:
    def program(end: Channel) -> None:
        pending = end.irecv()
        end.close()
        end.close()
        with pytest.raises(
            ChannelClosedError, match="the channel of left to right is closed: it was closed at this end"
        ):
            pending.wait()
        for call in (lambda: end.send(torch.zeros(1)), end.recv):
            with pytest.raises(ChannelClosedError, match="closed at this end"):
                call()

    pair.run(program, nothing)


@pytest.mark.parametrize("size", [3, LARGE])
def test_what_was_sent_before_closing_can_still_be_received(pair: Pair, size: int) -> None:
    def sender(end: Channel) -> None:
        end.send(torch.ones(size))
        end.close()

    def receiver(end: Channel) -> torch.Tensor:
        got = end.recv().tensor
        with pytest.raises(ChannelClosedError):
            end.recv()
        return got

    assert pair.run(sender, receiver)[1].sum() == size
