"""Models called by recorded graphs: the same answers, each size recorded once, and what cannot be recorded runs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from orchestray.serving.models import cuda_graphs
from orchestray.serving.models.cuda_graphs import Recorded
from orchestray.serving.models.served import ServedModel
from support.recorded_device import RecordedDevice


def doubled(inputs: Tensor) -> dict[str, Tensor]:
    return {"outputs": 2 * inputs}


def test_each_size_is_recorded_once_and_others_are_called_as_they_are() -> None:
    device = RecordedDevice()
    recorded = Recorded(doubled, (1, 4), device.record_graph)
    for size in (4, 3, 1, 4, 1, 3):
        inputs = torch.rand(size, 2)
        assert torch.equal(recorded(inputs)["outputs"], 2 * inputs)
    assert device.sizes == [4, 1]
    assert recorded.recorded == [1, 4]


def test_several_inputs_are_recorded_by_their_number_of_samples() -> None:
    device = RecordedDevice()
    recorded = Recorded(lambda inputs: {"outputs": inputs["a"] - inputs["b"]}, (2,), device.record_graph)
    for size in (2, 3, 2):
        a, b = torch.rand(2, size, 3)
        assert torch.equal(recorded({"a": a, "b": b})["outputs"], a - b)
    assert device.sizes == [2]


def test_batches_of_one_size_and_other_lengths_have_graphs_of_their_own() -> None:
    device = RecordedDevice()
    recorded = Recorded(doubled, (2,), device.record_graph)
    for length in (8, 1, 8, 16):
        inputs = torch.rand(2, length)
        assert torch.equal(recorded(inputs)["outputs"], 2 * inputs)
    assert device.sizes == [2, 2, 2]


def test_shapes_beyond_the_most_graphs_are_run_without_and_the_log_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graphs, "_MOST_GRAPHS", 2)
    device = RecordedDevice()
    recorded = Recorded(doubled, (2,), device.record_graph)
    for length in (1, 2, 3, 4, 3):
        inputs = torch.rand(2, length)
        assert torch.equal(recorded(inputs)["outputs"], 2 * inputs)
    assert device.sizes == [2, 2]
    assert caplog.text.count("there are 2 graphs already") == 1


def test_an_answer_stays_what_it_is_when_the_next_batch_is_run() -> None:
    recorded = Recorded(doubled, (2,), RecordedDevice().record_graph)
    first = recorded(torch.ones(2, 3))["outputs"]
    recorded(torch.zeros(2, 3))
    assert torch.equal(first, torch.full((2, 3), 2.0))


def test_a_model_that_no_graph_can_hold_is_run_without_and_tried_once(caplog: pytest.LogCaptureFixture) -> None:
    recorded = Recorded(doubled, (2,), RecordedDevice(lambda size: True).record_graph)
    for _ in range(2):
        assert torch.equal(recorded(torch.ones(2, 3))["outputs"], torch.full((2, 3), 2.0))
    assert caplog.text.count("no CUDA graph could be made for batches of 2") == 1
    assert recorded.refused == {2: "operation not permitted when stream is capturing 2"}
    assert recorded.recorded == []


# -- served ------------------------------------------------------------------------------------------------------------


class Cutting(nn.Module):
    """A model that keeps whether autocast caches what it casts."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.cached: set[bool] = set()

    def forward(self, inputs: Tensor) -> Tensor:
        self.cached.add(torch.is_autocast_cache_enabled())
        return self.linear(inputs)


class Forces(nn.Module):
    """A model that takes gradients itself, as one whose forces are those of an energy does."""

    def forward(self, positions: Tensor) -> Tensor:
        positions.requires_grad_()
        (gradient,) = torch.autograd.grad((positions**2).sum(), positions)
        return -gradient


class Named(nn.Module):
    def forward(self, inputs: Tensor) -> tuple[Tensor, list[str]]:
        return inputs, [str(float(row.sum())) for row in inputs]


def answers_of(served: ServedModel, rows: Tensor) -> Tensor:
    answers = served.run([served.signature.parse(row.tolist()) for row in rows])
    return torch.stack([torch.from_numpy(answer["outputs"]) for answer in answers if isinstance(answer, dict)])


@pytest.mark.parametrize("compiled_by", [False, "eager"])
def test_padding_is_not_answered_and_every_size_is_replayed(compiled_by: bool | str) -> None:
    device = RecordedDevice()
    model = nn.Linear(4, 3)
    served = ServedModel(model, torch.zeros(4), compile=compiled_by, graphs=True, pad_to=(1, 2, 4), accelerator=device)
    served.warm_up(4)
    assert device.sizes == [1, 4, 2]  # that of the example, then the largest first: they share its memory
    device.log.clear()
    rows = torch.rand(3, 4)
    torch.testing.assert_close(answers_of(served, rows), model(rows).detach())
    assert "replays 4" in device.log
    about = {"device": "cpu", "padded_to": [1, 2, 4], "cuda_graphs": [1, 2, 4], "without_cuda_graph": {}}
    assert served.signature.computing == about | ({"compiled_by": "eager"} if compiled_by else {})


def test_the_signature_says_which_sizes_have_no_graph_and_why() -> None:
    device = RecordedDevice(lambda size: size > 1)
    served = ServedModel(nn.Linear(4, 3), torch.zeros(4), graphs=True, pad_to=(1, 2), accelerator=device)
    served.warm_up(2)
    assert served.signature.computing["cuda_graphs"] == [1]
    assert served.signature.computing["without_cuda_graph"] == {
        "2": "operation not permitted when stream is capturing 2"
    }


def test_a_graph_holds_no_weights_that_autocast_casts_for_one_batch_alone() -> None:
    for graphs in (True, False):
        model = Cutting()
        accelerator = RecordedDevice()
        served = ServedModel(
            model, torch.zeros(4), precision="bfloat16", graphs=graphs, pad_to=(1,), accelerator=accelerator
        )
        served.warm_up(1)
        assert model.cached == {not graphs}


def test_a_model_that_takes_gradients_has_a_graph_of_each_size_and_each_batch_its_own_answers() -> None:
    served = ServedModel(Forces(), torch.zeros(3), graphs=True, pad_to=(1, 2), accelerator=RecordedDevice())
    served.warm_up(2)
    assert served.signature.computing["cuda_graphs"] == [1, 2]
    assert served.signature.computing["without_cuda_graph"] == {}
    for rows in (torch.rand(2, 3), torch.rand(1, 3), torch.rand(2, 3)):
        assert torch.equal(answers_of(served, rows), -2 * rows)


def test_a_model_that_answers_with_texts_is_run_without_a_graph_and_its_texts_are_answered() -> None:
    served = ServedModel(Named(), torch.zeros(2), graphs=True, pad_to=(1, 2), accelerator=RecordedDevice())
    served.warm_up(2)
    assert "texts" in served.signature.computing["without_cuda_graph"]["2"]
    (answer,) = served.run([served.signature.parse([1.0, 2.0])])
    assert isinstance(answer, dict)
    assert answer["outputs_1"] == "3.0"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_a_compiled_model_answers_by_graphs_what_it_answers_without() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    plain = ServedModel(model, torch.zeros(4), device=torch.device("cuda", 0))
    graphed = ServedModel(
        model, torch.zeros(4), device=torch.device("cuda", 0), compile=True, graphs=True, pad_to=(1, 2, 4)
    )
    graphed.warm_up(4)
    for size in (1, 2, 3, 4):
        samples = [plain.signature.parse(torch.rand(4).tolist()) for _ in range(size)]
        for one, other in zip(plain.run(samples), graphed.run(samples), strict=True):
            assert isinstance(one, dict)
            assert isinstance(other, dict)
            torch.testing.assert_close(torch.tensor(one["outputs"]), torch.tensor(other["outputs"]))
