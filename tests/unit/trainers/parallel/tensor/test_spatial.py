"""Tiles of an image with a halo are the whole image; what is sent is the halo."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from orchestray.platform.comm.collective import Collective, PeerLostError
from orchestray.platform.errors import ConfigError
from orchestray.trainers.parallel.tensor.branches import Branches
from orchestray.trainers.parallel.tensor.halo import Window, tiling_of
from orchestray.trainers.parallel.tensor.locality import LocallyConnected2d
from support.split_training import Run, check_same, split_by, train_split
from support.threads import run_replicas

FLOAT_BYTES = 8


def images(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def of(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*layers).double()


class Residual(nn.Module):
    """A block that is not a sequence."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1)
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(x + self.second(self.activation(self.norm(self.first(x)))))


LAYERS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "conv 3 pad 1": lambda: (nn.Conv2d(2, 3, 3, padding=1), images(2, 2, 11, 7)),
    "conv 5 pad 2 stride 2": lambda: (nn.Conv2d(2, 3, 5, stride=2, padding=2), images(2, 2, 19, 6)),
    "conv 1 stride 3": lambda: (nn.Conv2d(2, 3, 1, stride=3), images(2, 2, 17, 6)),
    "conv 2 no pad": lambda: (nn.Conv2d(2, 3, 2), images(2, 2, 12, 6)),
    "conv 1 pad 1": lambda: (nn.Conv2d(2, 3, 1, padding=1), images(2, 2, 12, 6)),
    "conv 3 dilation 2": lambda: (nn.Conv2d(2, 3, 3, padding=2, dilation=2, bias=False), images(2, 2, 13, 6)),
    "conv 4 same": lambda: (nn.Conv2d(2, 4, 4, padding="same", groups=2), images(2, 2, 13, 9)),
    "conv 3 x 5": lambda: (nn.Conv2d(2, 3, (3, 5), (2, 1), (1, 2)), images(2, 2, 14, 9)),
    "conv3d": lambda: (nn.Conv3d(2, 3, 3, padding=1), images(1, 2, 4, 9, 5)),
    "max pool 2": lambda: (nn.MaxPool2d(2), images(2, 2, 13, 8)),
    "max pool 3 stride 2 pad 1": lambda: (nn.MaxPool2d(3, 2, 1), images(2, 2, 14, 8)),
    "max pool ceil": lambda: (nn.MaxPool2d(3, 2, ceil_mode=True), images(2, 2, 14, 8)),
    "max pool dilated": lambda: (nn.MaxPool2d(2, 1, dilation=2), images(2, 2, 14, 8)),
    "average pool": lambda: (nn.AvgPool2d(3, 2, 1), images(2, 2, 13, 8)),
    "average pool without padding": lambda: (nn.AvgPool2d(3, 1, 1, count_include_pad=False), images(2, 2, 13, 8)),
    "average pool ceil": lambda: (nn.AvgPool2d(3, 2, 1, ceil_mode=True), images(2, 2, 14, 8)),
    "average pool divisor": lambda: (nn.AvgPool2d(3, 2, 1, divisor_override=5), images(2, 2, 14, 8)),
    "average pool 3d": lambda: (nn.AvgPool3d(2), images(1, 2, 4, 8, 4)),
    "locally connected": lambda: (LocallyConnected2d(2, 3, (11, 5), 3), images(2, 2, 11, 5)),
}


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_layer_on_tiles_is_the_layer_on_the_image(layer: str, size: int) -> None:
    module, inputs = LAYERS[layer]()
    check_same(of(module, nn.Tanh()), {"": "height"}, size, Run(inputs, num_steps=1))


@pytest.mark.parametrize("size", [2, 3])
def test_width_is_split_as_height_is(size: int) -> None:
    two = of(nn.Conv2d(2, 3, (5, 3), (1, 2), (2, 1)), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2, 1))
    check_same(two, {"": "width"}, size, Run(images(2, 2, 6, 15)))
    one = of(nn.Conv1d(2, 3, 5, padding=2), nn.BatchNorm1d(3), nn.PReLU(), nn.AvgPool1d(2), nn.MaxPool1d(3, 1, 1))
    check_same(one, {"": "width"}, size, Run(images(3, 2, 17)))


def network() -> nn.Sequential:
    return of(
        *(nn.Conv2d(1, 4, 5, padding=2, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.3)),
        *(nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.PReLU(4), nn.Dropout2d(0.3), nn.MaxPool2d(3, 2, 1)),
        *(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)),
    )


@pytest.mark.parametrize("size", [2, 3])
def test_a_network_split_by_height_trains_as_the_plain_one(size: int) -> None:
    _, workers = check_same(network(), {"": "height"}, size, Run(images(3, 1, 22, 10), num_steps=3))
    split = workers[0].split
    assert split is not None
    # Adaptive pooling and what follows see the whole image: their gradients are whole on every worker.
    assert split.partial == {"0.weight", "1.weight", "1.bias", "4.weight", "4.bias", "5.weight"}
    assert split.pieces == {}


@pytest.mark.parametrize("size", [2, 3])
def test_blocks_that_are_no_sequence_are_split(size: int) -> None:
    model = nn.Sequential()
    model.add_module("stem", of(nn.Conv2d(1, 3, 3, stride=2, padding=1), nn.ReLU()))
    model.add_module("blocks", of(Residual(3), nn.AvgPool2d(2), Residual(3)))
    model.add_module("head", of(nn.Flatten(), nn.Linear(3 * 36, 2)))
    for split in ("blocks", "blocks.0", "0:2", "") if size == 2 else ("blocks.0", ""):
        check_same(model, {split: "height"}, size, Run(images(2, 1, 24, 24)))


def test_images_of_several_sizes_and_evaluation_go_through_one_split_network() -> None:
    model = network()[:9]
    model.eval()

    def worker(collective: Collective) -> list[Tensor]:
        local = copy.deepcopy(model)
        split_by(local, {"": "height"}, collective)
        with torch.no_grad():
            return [local(images(count, 1, rows, 9)) for count, rows in ((2, 24), (1, 30), (2, 24), (0, 24))]

    plain = [model(images(count, 1, rows, 9)) for count, rows in ((2, 24), (1, 30), (2, 24), (0, 24))]
    for outputs in run_replicas(2, worker):
        for output, expected in zip(outputs, plain, strict=True):
            assert torch.allclose(output, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("size", "kernel"), [(2, 3), (3, 5), (3, 7)])
def test_spatial_partitioning_sends_the_halo_and_nothing_else(size: int, kernel: int) -> None:
    samples, channels, rows, columns = 2, 3, 12 * size, 10
    model = of(nn.Tanh(), nn.Conv2d(channels, channels, kernel, padding=kernel // 2), nn.Tanh())
    workers = train_split(model, {"": "height"}, size, Run(images(samples, channels, rows, columns), num_steps=1))
    for rank, worker in enumerate(workers):
        num_neighbours = (rank > 0) + (rank < size - 1)
        row_bytes = samples * channels * columns * FLOAT_BYTES
        halo = num_neighbours * (kernel // 2) * row_bytes
        # At the container's ends the image is cut and put together: an all-gather each, of one part to T - 1 others.
        ends = 2 * (size - 1) * rows // size * row_bytes
        assert worker.bytes_sent == 2 * halo + ends  # rows forward, their gradients back


def test_the_first_layer_sends_no_gradients_of_the_data() -> None:
    model = of(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh())
    run = Run(images(1, 1, 8, 5), num_steps=1, inputs_need_gradient=False)
    for worker in train_split(model, {"": "height"}, 2, run):
        assert worker.bytes_sent == 5 * FLOAT_BYTES + 4 * 5 * 2 * FLOAT_BYTES


class Noting:
    """A pending operation that notes when it was waited for."""

    def __init__(self, pending: Any, note: Callable[[str], None]) -> None:
        self._pending = pending
        self._note = note

    def wait(self) -> None:
        self._pending.wait()
        self._note("arrived")


def test_spatial_partitioning_computes_the_interior_before_the_halo_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    events: dict[str, list[str]] = {}

    def note(event: str) -> None:
        events.setdefault(threading.current_thread().name, []).append(event)

    convolve = functional.conv2d

    def noted(x: Tensor, *rest: Any) -> Tensor:
        y = convolve(x, *rest)
        if not x.is_meta:
            note(f"rows {y.shape[-2]}")
            y.register_hook(lambda gradient: note(f"gradient of {gradient.shape[-2]}"))  # type: ignore[no-untyped-call]
        return y

    # Patched where the layers on tiles look it up.
    from orchestray.trainers.parallel.tensor import tiles

    monkeypatch.setitem(tiles._CONVOLVE, 2, noted)

    def prepare(_: nn.Module, collective: Collective) -> None:
        start = collective.start_exchange

        def exchange(*tensors: Any) -> Noting:
            note("sent")
            return Noting(start(*tensors), note)

        monkeypatch.setattr(collective, "start_exchange", exchange)

    model = of(nn.Tanh(), nn.Conv2d(1, 1, 3, padding=1))
    train_split(model, {"": "height"}, 3, Run(images(1, 1, 15, 4), num_steps=1, before=prepare))
    middle = events["replica-1"]
    assert middle[:5] == ["sent", "rows 3", "arrived", "rows 1", "rows 1"]
    # Backward: the outer rows first, whose halo's gradients travel while the inner rows' are computed.
    backward = middle[5:]
    assert backward[:2] == ["gradient of 1", "gradient of 1"]
    assert backward[2:] == ["sent", "gradient of 3", "arrived"]


@pytest.mark.parametrize("rows", [7, 16, 23])
@pytest.mark.parametrize("window", [Window(3, 1, 1), Window(5, 2, 2), Window(4, 3, 0), Window(3, 2, 1, ceil_mode=True)])
def test_every_needed_row_is_own_or_a_neighbours_and_only_needed_rows_are_sent(window: Window, rows: int) -> None:
    tiling = tiling_of(window, rows, 2, "layer")
    for rank in range(2):
        needed = set(range(*tiling.needed[rank]))
        own, sent = set(range(*tiling.tiles[rank])), set(range(*tiling.halo(rank, 1 - rank)))
        assert needed <= own | sent
        assert sent <= needed - own
    taps = {
        row for output in range(window.output_size(rows)) for row in range(*window.rows((output, output + 1), rows))
    }
    assert taps <= {row for rank in range(2) for row in range(*tiling.needed[rank])}


# -- what cannot be split ----------------------------------------------------------------------------------------------


def refused(model: nn.Module, plan: dict[str, str], inputs: Tensor, size: int = 2) -> str:
    with pytest.raises(ConfigError) as caught:
        train_split(model, plan, size, Run(inputs, num_steps=1))
    return str(caught.value)


def test_tiles_smaller_than_the_halo_are_refused() -> None:
    text = refused(of(nn.Conv2d(1, 1, 9, padding=4)), {"": "height"}, images(1, 1, 9, 9), size=3)
    assert "a tile is smaller than the halo" in text
    assert "'0'" in text
    text = refused(of(nn.MaxPool2d(4)), {"": "height"}, images(1, 1, 9, 9), size=3)
    assert "the output has 2 rows, too few for 3 workers" in text


def test_what_does_not_work_on_tiles_is_refused_with_its_name() -> None:
    assert "'0' (GroupNorm) needs the whole image" in refused(
        of(nn.GroupNorm(1, 2)), {"": "height"}, images(1, 2, 8, 8)
    )
    circular = of(nn.Conv2d(1, 1, 3, padding=1, padding_mode="circular"))
    assert "pads with 'circular'" in refused(circular, {"": "height"}, images(1, 1, 8, 8))
    assert "use width" in refused(of(nn.Conv1d(1, 1, 3)), {"": "height"}, images(1, 1, 8))
    assert "returns indices" in refused(of(nn.MaxPool2d(2, return_indices=True)), {"": "height"}, images(1, 1, 8, 8))
    assert "single layer" in refused(of(nn.Conv2d(1, 1, 3)), {"0": "height"}, images(1, 1, 8, 8))
    assert "none of the 1 children" in refused(of(nn.ReLU()), {"3:4": "height"}, images(1, 1, 8, 8))


def test_locally_connected_layer_equals_the_naive_loop() -> None:
    torch.manual_seed(0)
    layer, x = LocallyConnected2d(2, 3, (6, 5), (3, 2), (1, 2)).double(), images(2, 2, 6, 5)
    assert layer.bias is not None
    expected = torch.zeros(2, 3, 4, 2, dtype=torch.float64)
    for row in range(4):
        for column in range(2):
            window = x[:, :, row : row + 3, 2 * column : 2 * column + 2].reshape(2, -1)
            expected[:, :, row, column] = window @ layer.weight[row, column].T + layer.bias[row, column]
    assert torch.allclose(layer(x), expected, rtol=1e-12, atol=1e-12)


# -- with what else there is -------------------------------------------------------------------------------------------


def test_a_neighbour_lost_within_a_layer_is_a_lost_peer() -> None:
    model = of(nn.Conv2d(1, 1, 3, padding=1), nn.Tanh(), nn.Conv2d(1, 1, 3, padding=1))

    def worker(collective: Collective) -> bool:
        local = copy.deepcopy(model)
        split_by(local, {"": "height"}, collective)
        if collective.rank == 1:
            local[1].register_forward_hook(lambda *_: collective.abort())
        with pytest.raises(PeerLostError):
            local(images(1, 1, 9, 4)).sum().backward()
        return True

    assert all(run_replicas(3, worker))


def test_in_mixed_precision_a_split_network_computes_what_the_plain_one_does() -> None:
    model = of(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 2, 3, padding=1)).float()
    model.append(Branches([nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 3, 1)]))
    inputs = images(2, 1, 12, 6).float()

    def outputs(network: nn.Module) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y: Tensor = network(inputs)
            y.float().square().mean().backward()
            return y

    def worker(collective: Collective) -> Tensor:
        local = copy.deepcopy(model)
        split_by(local, {"0:4": "height", "4": "branches"}, collective)
        return outputs(local)

    plain = outputs(copy.deepcopy(model))
    for found in run_replicas(2, worker):
        assert found.dtype == plain.dtype == torch.bfloat16
        assert torch.allclose(found.float(), plain.float(), atol=0.02)


def test_layers_of_an_area_may_be_computed_again_in_the_backward_pass() -> None:
    model = of(Residual(1), nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), Residual(2), nn.Tanh())

    def again(network: nn.Module, _: Collective) -> None:
        for index in (0, 3):
            part = network.get_submodule(str(index))
            part.forward = partial(checkpoint, part.forward, use_reentrant=False)

    for style in ("height", "batch"):
        check_same(model.eval(), {"": style}, 3, Run(images(4, 1, 9, 5), train=False, before=again))
