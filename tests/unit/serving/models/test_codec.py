"""A task's own form of requests and answers: what it returns is checked, and errors say whose they are."""

from __future__ import annotations

import asyncio
import gc
import pickle
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import torch

from orchestray.serving.batching import DeadlineError, QueueFullError
from orchestray.serving.batching.listener import SHED_EXPIRED, SHED_QUEUE_FULL
from orchestray.serving.models.codec import Codec
from orchestray.serving.models.errors import InputError, ModelError, RequestError
from orchestray.serving.models.signature import Signature, TensorSpec, boxed
from support.patience import PATIENCE_S

ONE = Signature("one", "1", (TensorSpec("inputs", "float32", (2,)),), (TensorSpec("outputs", "float32", (2,)),), None)
TWO = Signature(
    "two", "1", (TensorSpec("inputs_0", "float32", (1,)), TensorSpec("inputs_1", "int64", ())), ONE.outputs, None
)


def sample(signature: Signature, decode: Any, value: Any = "x") -> dict[str, Any]:
    found = asyncio.run(Codec(signature, decode).sample_of(value, field="inputs[3]"))
    return {name: array.tolist() for name, array in found.items()}


def answer(encode: Any, **outputs: Any) -> Any:
    arrays = {name: np.asarray(value, np.float32) for name, value in outputs.items()}
    answered = asyncio.run(Codec(ONE, None, encode).answer_of(arrays))
    return pickle.loads(pickle.dumps(answered))  # noqa: S301 - an application's handle sends it on


def test_what_a_task_decodes_is_a_sample_whatever_its_form() -> None:
    assert sample(ONE, lambda text: torch.tensor([float(len(text)), 1.0]), "abc") == {"inputs": [3.0, 1.0]}
    assert sample(ONE, lambda _: [1, 2]) == {"inputs": [1.0, 2.0]}
    assert sample(TWO, lambda _: (torch.ones(1, requires_grad=True), 2)) == {"inputs_0": [1.0], "inputs_1": 2}
    assert sample(TWO, lambda _: {"inputs_1": np.int32(2), "inputs_0": [1]}) == {"inputs_0": [1.0], "inputs_1": 2}


def test_the_only_input_may_be_decoded_by_its_name() -> None:
    assert sample(ONE, lambda _: {"inputs": torch.ones(2)}) == {"inputs": [1.0, 1.0]}
    assert sample(ONE, lambda _: (torch.ones(2),)) == {"inputs": [1.0, 1.0]}
    with pytest.raises(InputError, match=r"inputs\[3\]"):
        sample(ONE, lambda _: {"another": torch.ones(2)})
    with pytest.raises(InputError, match="wanted 2 values at most, got 3"):
        sample(TWO, lambda _: (torch.ones(1), 2, 3))


def test_a_sample_of_any_length_is_padded_for_a_model_that_takes_one_length() -> None:
    fixed = Signature(
        "fixed", "1", tuple(TensorSpec(name, "int64", (3,)) for name in ("ids", "mask")), ONE.outputs, None
    )
    codec = Codec(fixed, lambda ids: {"ids": ids, "mask": [1] * len(ids)}, padding={"ids": 9, "mask": 0})
    sample = asyncio.run(codec.sample_of([4, 5]))
    assert {name: array.tolist() for name, array in sample.items()} == {"ids": [4, 5, 9], "mask": [1, 1, 0]}
    with pytest.raises(InputError, match=r"inputs\.ids: wanted int64 of shape"):
        asyncio.run(codec.sample_of([1, 2, 3, 4]))
    with pytest.raises(InputError, match=r"inputs\.mask: wanted .*, got nothing"):
        asyncio.run(Codec(fixed, lambda ids: {"ids": ids}, padding={"ids": 9, "mask": 0}).sample_of([4]))
    alone = Signature("alone", "1", fixed.inputs[:1], ONE.outputs, None)
    sample = asyncio.run(Codec(alone, torch.tensor, padding={"ids": 9.0}).sample_of([4, 5]))
    assert sample["ids"].tolist() == [4, 5, 9]


def test_a_value_error_is_the_clients_and_any_other_the_tasks() -> None:
    def refuse(_: Any) -> Any:
        raise ValueError("wanted a text, got none")

    with pytest.raises(RequestError, match=r"^inputs\[3\]: wanted a text, got none$"):
        sample(ONE, refuse)
    with pytest.raises(ModelError, match="decode raised KeyError"):
        sample(ONE, lambda value: {}[value])
    with pytest.raises(ModelError, match="decode raised SystemExit"):
        sample(ONE, lambda _: sys.exit(1))
    with pytest.raises(InputError, match=r"inputs\[3\]: wanted float32 of shape \[2\]"):
        sample(ONE, lambda _: [1.0])
    with pytest.raises(InputError, match=r"inputs\[3\]\.inputs_1"):
        sample(TWO, lambda _: (torch.ones(1),))


def test_an_answer_is_what_the_task_encodes_as_json() -> None:
    assert answer(lambda outputs: {"first": outputs[0], "all": outputs.numpy()}, outputs=[1, 2]) == {
        "first": 1.0,
        "all": [1.0, 2.0],
    }
    assert answer(sorted, b=[1], a=[2]) == ["a", "b"]
    for wrong in (lambda _: object(), lambda outputs: outputs.none):
        with pytest.raises(ModelError, match="encode raised"):
            answer(wrong, outputs=[1, 2])


def test_one_number_a_sample_is_a_tensor_to_encode() -> None:
    for outputs in (np.float32(0.5), np.array(0.5, np.float32)):
        assert asyncio.run(Codec(ONE, None, lambda each: each.sigmoid().item()).answer_of({"outputs": outputs})) == (
            pytest.approx(0.6225, abs=1e-4)
        )
    is_large = {"outputs": np.zeros(2, np.float32), "is_large": np.bool_(True)}
    found = asyncio.run(Codec(ONE, None, lambda each: each["is_large"].logical_not().item()).answer_of(is_large))
    assert found is False


def test_texts_among_the_outputs_are_texts_to_encode() -> None:
    outputs = {"label": boxed("cat"), "score": np.float32(0.5)}
    encoded = asyncio.run(Codec(ONE, None, lambda found: [found["label"], found["score"]]).answer_of(outputs))
    assert encoded == ["cat", 0.5]
    assert asyncio.run(Codec(ONE).answer_of({"label": boxed({"a": 1})})) == {"a": 1}


def test_a_task_that_is_slow_is_not_waited_for_beyond_the_deadline_and_holds_up_no_answers() -> None:
    done = threading.Event()
    shed: list[str] = []
    codec = Codec(ONE, lambda _: done.wait() and [1, 2], lambda outputs: outputs, max_queue=100, on_shed=shed.append)

    async def ask() -> None:
        soon_s = asyncio.get_running_loop().time() + 0.05
        with pytest.raises(DeadlineError) as late:
            await codec.sample_of("x", deadline_s=soon_s)
        assert late.value.retry_after_s, "no earlier than what a call takes"
        waiting = [asyncio.create_task(codec.sample_of("x")) for _ in range(99)]
        await asyncio.sleep(0)
        await codec.answer_of({"outputs": np.ones(1, np.float32)})
        waiting.append(asyncio.create_task(codec.sample_of("x")))
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="100 requests wait"):
            await codec.sample_of("x")
        assert shed == [SHED_EXPIRED, SHED_QUEUE_FULL]
        done.set()
        assert len(await asyncio.gather(*waiting)) == 100
        assert (await codec.sample_of("x"))["inputs"].tolist() == [1.0, 2.0]

    try:
        asyncio.run(ask())
    finally:
        done.set()


_HANGS = """
import asyncio, threading
from orchestray.serving.models.codec import Codec

async def main():
    begun = asyncio.Event()
    loop = asyncio.get_running_loop()
    def decode(_):
        loop.call_soon_threadsafe(begun.set)
        threading.Event().wait()
    task = asyncio.create_task(Codec(None, decode).sample_of("x"))
    await begun.wait()
    task.cancel()

asyncio.run(main())
"""


def test_a_task_that_hangs_does_not_keep_its_process() -> None:
    subprocess.run([sys.executable, "-c", _HANGS], check=True, timeout=PATIENCE_S)


def test_threads_of_a_task_end_with_its_version() -> None:
    codec = Codec(ONE, lambda _: [1, 2], list)
    before = set(threading.enumerate())
    asyncio.run(codec.sample_of("x"))
    asyncio.run(codec.answer_of({"outputs": np.ones(2)}))
    threads = set(threading.enumerate()) - before
    assert len(threads) == 2
    del codec
    gc.collect()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
