"""Batches on their way to a device and back: two in flight, each stream waiting for just what it needs."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from orchestray.serving.models.served import ServedModel
from orchestray.serving.models.signature import Tensors, TensorSpec
from orchestray.serving.models.transfer import StreamedTransfer
from orchestray.serving.replicas.batch_thread import BatchThread
from support.recorded_device import RecordedDevice

ONE_BATCH = [
    "inputs copies",
    "inputs records",
    "model waits for inputs",
    "computes",
    "model records",
    "answers waits for model",
    "answers copies",
    "answers records",
    "CPU waits for answers",
]
SPECS = (TensorSpec("x", "float32", (3,)),)


class Transferred:
    """Batches of `2 x + 1` on a recorded device, each run on a thread of its own."""

    def __init__(self) -> None:
        self.device = RecordedDevice()
        self.transfer = StreamedTransfer(SPECS, self.device)
        self.threads = ThreadPoolExecutor(4)

    def forward(self, inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], None]:
        self.device.write("computes")
        return {"y": 2 * inputs["x"] + 1}, None

    def run(self, rows: np.ndarray, size: int) -> np.ndarray:  # type: ignore[type-arg]
        answers, _ = self.transfer.run([{"x": row} for row in rows], size, self.forward)
        return answers["y"]

    def start(self, rows: np.ndarray, size: int) -> Future[np.ndarray]:  # type: ignore[type-arg]
        return self.threads.submit(self.run, rows, size)


def rows_of(number: int, num_rows: int = 2) -> np.ndarray:  # type: ignore[type-arg]
    return np.random.default_rng(number).random((num_rows, 3), dtype=np.float32)


def test_a_batch_passes_its_streams_in_order_and_the_cpu_waits_once() -> None:
    batches = Transferred()
    assert np.array_equal(batches.run(rows_of(0), 4), 2 * rows_of(0) + 1)
    assert batches.device.log == ONE_BATCH


def test_the_second_batch_is_launched_while_the_first_is_computed_and_the_third_waits_for_its_slot() -> None:
    batches = Transferred()
    device = batches.device
    device.is_computed.clear()
    started = []
    for number in range(3):
        started.append(batches.start(rows_of(number), 2))
        device.await_log("CPU waits for answers", min(2, number + 1))
    assert device.log == ONE_BATCH * 2
    assert not any(each.done() for each in started)
    device.is_computed.set()
    for number, each in enumerate(started):
        assert np.array_equal(each.result(60), 2 * rows_of(number) + 1)
    assert device.log == ONE_BATCH * 3


def test_answers_stay_what_they_are_when_batches_of_other_sizes_use_the_memory_again() -> None:
    batches = Transferred()
    sizes = (1, 4, 2, 8, 8, 1, 3)
    answers = [batches.run(rows_of(size, size), size) for size in sizes]
    for size, answer in zip(sizes, answers, strict=True):
        assert np.array_equal(answer, 2 * rows_of(size, size) + 1)


def test_a_batch_that_fails_is_waited_for_and_leaves_its_slot_to_others() -> None:
    batches = Transferred()

    def fail(inputs: dict[str, Tensor]) -> tuple[dict[str, Tensor], None]:
        raise ValueError("no")

    for _ in range(3):
        with pytest.raises(ValueError, match="no"):
            batches.transfer.run([{"x": rows_of(0)[0]}], 1, fail)
    assert batches.device.log.count("CPU waits for model") == 3
    assert np.array_equal(batches.run(rows_of(1), 2), 2 * rows_of(1) + 1)


def test_inputs_of_several_types_share_one_memory() -> None:
    specs = (TensorSpec("a", "float64", (3,)), TensorSpec("b", "bool", ()), TensorSpec("c", "int64", (2, 2)))
    samples: list[Tensors] = [
        {"a": np.full(3, row + 0.5), "b": np.array(row == 1), "c": np.full((2, 2), row)} for row in range(3)
    ]
    transfer = StreamedTransfer(specs, RecordedDevice())
    half = torch.bfloat16
    answers, _ = transfer.run(samples, 4, lambda given: ({**given, "d": given["a"].to(half)}, None))
    for name in ("a", "b", "c"):
        assert np.array_equal(answers[name], np.stack([sample[name] for sample in samples]))
        assert answers[name].dtype == samples[0][name].dtype
    assert answers["d"].dtype == np.float32


def test_a_replica_of_a_gpu_has_two_batches_in_flight_and_one_of_a_cpu_has_one() -> None:
    async def scenario() -> None:
        device = RecordedDevice()
        served = ServedModel(nn.Identity(), torch.zeros(3), accelerator=device)
        assert served.num_in_flight == 2
        device.log.clear()
        device.is_computed.clear()
        thread = BatchThread(served)
        batches = [[served.signature.parse([float(number)] * 3)] for number in range(3)]
        running = asyncio.gather(*(thread.run(batch) for batch in batches))
        await asyncio.to_thread(device.await_log, "CPU waits for answers", 2)
        assert thread.busy_s > 0
        device.is_computed.set()
        for number, (answer,) in enumerate(await running):
            assert isinstance(answer, dict)
            assert answer["outputs"].tolist() == [float(number)] * 3
        assert thread.busy_s == 0
        thread.close()

    asyncio.run(scenario())
    assert ServedModel(nn.Identity(), torch.zeros(3)).num_in_flight == 1
