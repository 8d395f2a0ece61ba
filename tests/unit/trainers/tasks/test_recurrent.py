"""Recurrent language models: backpropagation through time, whole, cut, and over batches in streams."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.errors import ConfigError, DataError
from orchestray.platform.run.checkpoint import CheckpointWriter, latest_good
from orchestray.trainers.config.load import load_train_config
from orchestray.trainers.config.settings import ReplicaSettings
from orchestray.trainers.core.buffer_kinds import transient
from orchestray.trainers.loop.checkpoint_source import Loaded
from orchestray.trainers.survey.operators.bptt import elman_gradients
from orchestray.trainers.survey.operators.cells import CellWeights
from orchestray.trainers.tasks.python_source import PythonSource
from orchestray.trainers.tasks.recurrent import CELLS, RecurrentModel
from support.central_run import central_settings, train_central
from support.layouts import layout_settings, train_laid_out
from support.stateful import trained, trained_with_a_loss, whole_state
from support.training import furthest, same_bits

STREAMS, CONTEXT, STEPS = 6, 5, 4


def task(model: str = "lstm", **arguments: Any) -> Any:
    chosen = {"model": model, "context": CONTEXT, "width": 8, "depth": 2, "num_files": 3, "streams": STREAMS}
    return PythonSource(**{**chosen, **arguments})


def settings(data: int = 1, exchange: Any = None, **train: Any) -> ReplicaSettings:
    chosen = {"batch_size": STREAMS, "steps": STEPS, "optimizer": {"type": "adam", "lr": 0.01}, **train}
    return layout_settings({"data": data, "microbatches": None}, exchange, **chosen)


def model_of(cell: str, bptt: int | None = None, streams: int | None = None, depth: int = 1) -> RecurrentModel:
    torch.manual_seed(0)
    return RecurrentModel(cell, vocabulary=11, width=6, depth=depth, streams=streams, bptt=bptt).double()


def tokens(time: int) -> Tensor:
    return torch.randint(11, (3, time), generator=torch.Generator().manual_seed(1))


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


# -- the gradient ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("bptt", [1, 2, 3, 7, 8, 20, None])
def test_gradients_cut_after_the_sample_or_later_are_whole_and_cut_before_they_are_those_of_detached_parts(
    cell: str, bptt: int | None
) -> None:
    model, x = model_of(cell, bptt, depth=2), tokens(8)
    found = gradients(model, model(x).square().sum())
    whole = model_of(cell, depth=2)
    embedded, state, loss = whole.tokens(x), None, torch.zeros(()).double()
    for part in embedded.split(bptt or 8, dim=1):
        outputs, state = whole.layers(part, state)
        state = tuple(each.detach() for each in state) if cell == "lstm" else state.detach()
        loss = loss + whole.head(outputs).square().sum()
    parts = gradients(whole, loss)
    full = gradients(whole, whole(x).square().sum())
    assert all(torch.allclose(one, two, rtol=1e-12, atol=1e-12) for one, two in zip(found, parts, strict=True))
    is_whole = all(torch.allclose(one, two, rtol=1e-12, atol=1e-12) for one, two in zip(found, full, strict=True))
    assert is_whole == (bptt is None or bptt >= 8)


@pytest.mark.parametrize("bptt", [2, 5, None])
def test_the_gradient_of_elman_s_cell_is_the_chain_rule_written_out(bptt: int | None) -> None:
    model, x = model_of("elman", bptt), tokens(9)
    found = dict(zip(dict(model.named_parameters()), gradients(model, model(x).square().sum()), strict=True))
    inputs = model.tokens(x).detach().transpose(0, 1)
    outputs = model.layers(inputs.transpose(0, 1))[0].detach()
    leaf = outputs.clone().requires_grad_()
    (of_outputs,) = torch.autograd.grad(model.head(leaf).square().sum(), leaf)
    state = torch.zeros(3, 6, dtype=torch.float64)
    by_hand = elman_gradients(CellWeights.of_layer(model.layers), inputs, state, of_outputs.transpose(0, 1), bptt)
    torch.testing.assert_close(found["layers.weight_ih_l0"], by_hand.of_input, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found["layers.weight_hh_l0"], by_hand.of_state, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(found["layers.bias_hh_l0"], by_hand.bias, rtol=1e-10, atol=1e-12)


# -- streams -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", CELLS)
def test_a_stream_in_samples_is_the_stream_at_once_whatever_the_order_of_its_rows(cell: str) -> None:
    model, x, afresh = model_of(cell, streams=5, depth=2), tokens(12), model_of(cell, depth=2)
    rows = torch.tensor([4, 0, 2])
    pieces = []
    for number, part in enumerate(x.split(4, dim=1)):
        turned = torch.roll(torch.arange(3), number)  # another order of the streams in each batch
        out = model(part[turned], rows[turned], torch.full((3,), number == 0))
        pieces.append(out[torch.argsort(turned)])
    torch.testing.assert_close(torch.cat(pieces, dim=1), afresh(x), rtol=1e-12, atol=1e-12)
    assert not model.carried[[1, 3]].any()
    again = model(x[:, :4], rows, torch.ones(3, dtype=torch.bool))  # the next epoch begins with zeros
    torch.testing.assert_close(again, pieces[0], rtol=1e-12, atol=1e-12)
    before = model.carried.clone()
    model.eval()
    torch.testing.assert_close(model(x[:, 4:8], rows, torch.zeros(3).bool()), afresh(x[:, 4:8]))
    assert torch.equal(model.carried, before)  # evaluation begins afresh and leaves no trace


def test_streams_are_pieces_of_the_text_in_order_that_miss_no_byte() -> None:
    table = task().dataset("train").table
    plain = task(model="lstm", streams=None, context=1).dataset("train")["bytes"].combine_chunks().values.to_numpy()
    stream, begins = table["stream"].to_numpy(), table["begins"].to_numpy()
    rows = np.array(table["bytes"].to_pylist())
    num_samples = len(rows) // STREAMS
    assert stream.tolist() == list(range(STREAMS)) * num_samples
    assert begins.tolist() == [True] * STREAMS + [False] * (STREAMS * (num_samples - 1))
    for each in (0, STREAMS - 1):
        read = np.concatenate([rows[stream == each][:, :-1].ravel(), rows[stream == each][-1, -1:]])
        start = each * num_samples * CONTEXT
        assert np.array_equal(read, plain[start : start + len(read)])
    with pytest.raises(DataError, match="too few for a sample of 6 in each of 10000000 streams"):
        task(streams=10_000_000).dataset("train")


def plain_loop() -> list[float]:
    """Return the losses of truncated backpropagation through time, as it is written in plain PyTorch."""
    torch.manual_seed(0)
    own, model = task(), task(streams=None).build_model().double()
    table = own.dataset("train").table
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    state, losses = None, []
    for step in range(STEPS):
        batch = own.to_batch(table.slice(step * STREAMS, STREAMS))
        outputs, state = model.layers(model.tokens(batch["inputs"][0]), state)
        state = tuple(each.detach() for each in state)
        loss = own.loss(model.head(outputs), batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses


@cache
def one() -> Any:
    return train_laid_out(task, settings())


@pytest.mark.parametrize(
    ("data", "exchange", "train"),
    [
        (1, None, {}),
        (3, None, {}),
        (2, {"shard": "parameters"}, {}),
        (3, None, {"accumulate": 2}),
    ],
)
def test_states_go_on_in_each_stream_as_in_a_plain_loop_with_any_number_of_replicas(
    data: int, exchange: Any, train: dict[str, Any]
) -> None:
    found = train_laid_out(task, settings(data, exchange, **train))
    assert found.losses == pytest.approx(plain_loop(), rel=0, abs=1e-12)
    assert furthest(found.weights, one().weights) <= 1e-12
    assert not [event for event in found.events if event["event"] == "warning"]


def test_without_streams_another_loss_is_trained() -> None:
    """Check the control: states that did not go on would give other losses from the second step on."""
    own = task()
    afresh = PythonSource(model="lstm", context=CONTEXT, width=8, depth=2, num_files=3, streams=STREAMS)
    afresh.build_model = lambda: _forgetful(own.build_model())  # type: ignore[method-assign]
    found = train_laid_out(lambda: afresh, settings())
    assert found.losses[0] == pytest.approx(one().losses[0], rel=0, abs=1e-12)
    assert all(abs(x - y) > 1e-6 for x, y in zip(found.losses[1:], one().losses[1:], strict=True))


@pytest.mark.parametrize("bptt", [None, 2])
def test_without_streams_samples_are_shuffled_and_begin_afresh_with_any_number_of_replicas(bptt: int | None) -> None:
    def plain() -> Any:
        return task("gru", streams=None, bptt=bptt)

    single = train_laid_out(plain, settings())
    found = train_laid_out(plain, settings(2))
    assert found.losses == pytest.approx(single.losses, rel=0, abs=1e-12)
    assert furthest(found.weights, single.weights) <= 1e-12


def _forgetful(model: nn.Module) -> nn.Module:
    model.register_forward_pre_hook(lambda module, inputs: (inputs[0],))
    return model


@pytest.mark.parametrize("exchange", [None, {"shard": "optimizer"}])
def test_a_resumed_run_goes_on_with_the_states_of_its_streams(exchange: Any, tmp_path: Path) -> None:
    whole = train_laid_out(task, settings(2, exchange))
    first = replace(settings(2, exchange, steps=2), checkpoint_every_steps=100)
    train_laid_out(task, first, checkpoints=lambda: CheckpointWriter(tmp_path, keep=1))
    found, _ = latest_good(tmp_path)
    assert found is not None
    second = train_laid_out(task, settings(2, exchange), load=lambda: Loaded(found))
    assert second.losses == whole.losses[2:]
    assert same_bits(second.weights, whole.weights)
    alone = train_laid_out(task, settings(), load=lambda: Loaded(found))  # the states do not depend on the workers
    assert alone.losses == pytest.approx(whole.losses[2:], rel=0, abs=1e-12)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_run_that_loses_a_worker_has_the_states_of_one_that_does_not(lost: int) -> None:
    expected = trained(task(), settings(2))[0]
    for replica in trained_with_a_loss(task(), settings(2), lost=lost, at_step=4):
        assert same_bits(whole_state(replica), whole_state(expected))
        assert transient(replica.model)["carried"].any()


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        (
            ["task.streams=8"],
            r"task\.streams: a batch has the next sample of each stream, so it must be .* \(64\), got 8",
        ),
        (
            ["strategy.network.data=3"],
            r"task\.streams: must be a multiple of replicas times micro-batches \(3\), got 64",
        ),
        (["strategy.network.pipeline=2"], r"task\.streams: carries the states of streams in one model"),
        (
            ["strategy.exchange={type: averaging, every: 2}"],
            r"task\.streams: states go on in each stream, and averaging would",
        ),
        (["strategy.exchange={type: parameter_server}"], r"and parameter_server would take means"),
        (
            ["train.optimizer=null", "train.grad_clip=null", "train.solver={type: lbfgs}"],
            r"task\.streams: states go on with each look at a batch, and a solver looks at one several times",
        ),
        (
            ["train.batch_schedule={type: steps, every_steps: 9, max_batch_size: 128}"],
            r"task\.streams: a batch that grows would have several samples of a stream",
        ),
        (["task.model=transformer"], r"task\.streams: is for recurrent models"),
    ],
)
def test_a_config_under_which_states_could_not_go_on_is_refused(keys: list[str], text: str) -> None:
    config = Path(__file__).parents[4] / "configs/train/python-source-bptt.yaml"
    load_train_config(config)
    with pytest.raises(ConfigError, match=text):
        load_train_config(config, keys)


def test_a_model_with_such_states_is_refused_where_buffers_are_averaged(tmp_path: Path) -> None:
    text = r"strategy\.exchange\.type: {} takes means of buffers, and each row of 'carried'"
    with pytest.raises(ConfigError, match=text.format("averaging")):
        train_laid_out(task, settings(2, {"type": "averaging", "every": 2}))
    with pytest.raises(ConfigError, match=text.format("parameter_server")):
        train_central(lambda: task(streams=8), central_settings(2, batch_size=8), tmp_path)
