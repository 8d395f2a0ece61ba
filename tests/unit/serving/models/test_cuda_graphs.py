"""Models called by recorded graphs: the same answers, each size recorded once, and what cannot be recorded runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from orchestray.serving.models.cuda_graphs import Call, Recorded
from orchestray.serving.models.served import ServedModel


def doubled(inputs: Tensor) -> dict[str, Tensor]:
    return {"outputs": 2 * inputs}


class Recorder:
    """A recorder as CUDA's, on a CPU: what is recorded reads and writes the same memory at each call."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, model: Call, inputs: Tensor) -> Call:
        self.sizes.append(len(inputs))
        taken, given = inputs.clone(), model(inputs)

        def replay(inputs: Tensor) -> dict[str, Tensor]:
            taken.copy_(inputs)
            for name, tensor in model(taken).items():
                given[name].copy_(tensor)
            return given

        return replay


def test_each_size_is_recorded_once_and_others_are_called_as_they_are() -> None:
    recorder = Recorder()
    recorded = Recorded(doubled, (1, 4), recorder)
    for size in (4, 3, 1, 4, 1, 3):
        inputs = torch.rand(size, 2)
        assert torch.equal(recorded(inputs)["outputs"], 2 * inputs)
    assert recorder.sizes == [4, 1]


def test_several_inputs_are_recorded_by_their_number_of_samples() -> None:
    sizes: list[int] = []

    def record(model: Call, inputs: dict[str, Tensor]) -> Call:
        sizes.append(len(inputs["a"]))
        return model

    recorded = Recorded(lambda inputs: {"outputs": inputs["a"] - inputs["b"]}, (2,), record)
    for size in (2, 3, 2):
        a, b = torch.rand(2, size, 3)
        assert torch.equal(recorded({"a": a, "b": b})["outputs"], a - b)
    assert sizes == [2]


def test_an_answer_stays_what_it_is_when_the_next_batch_is_run() -> None:
    recorded = Recorded(doubled, (2,), Recorder())
    first = recorded(torch.ones(2, 3))["outputs"]
    recorded(torch.zeros(2, 3))
    assert torch.equal(first, torch.full((2, 3), 2.0))


def test_a_model_that_no_graph_can_hold_is_run_without_and_tried_once(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(model: Call, inputs: Tensor) -> Call:
        raise RuntimeError("operation not permitted when stream is capturing")

    recorded = Recorded(doubled, (2,), refuse)
    for _ in range(2):
        assert torch.equal(recorded(torch.ones(2, 3))["outputs"], torch.full((2, 3), 2.0))
    assert caplog.text.count("no CUDA graph could be made for batches of 2") == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_compiled_model_answers_by_graphs_what_it_answers_without() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    plain = ServedModel(model, torch.zeros(4), device=torch.device("cuda"))
    graphed = ServedModel(model, torch.zeros(4), device=torch.device("cuda"), compile=True, pad_to=(1, 2, 4))
    graphed.warm_up(4)
    for size in (1, 2, 3, 4):
        samples = [plain.signature.parse(torch.rand(4).tolist()) for _ in range(size)]
        for one, other in zip(plain.run(samples), graphed.run(samples), strict=True):
            assert isinstance(one, dict)
            assert isinstance(other, dict)
            torch.testing.assert_close(torch.tensor(one["outputs"]), torch.tensor(other["outputs"]))
