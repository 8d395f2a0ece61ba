"""Group C: partitions of a network's neurons, images and branches, each by the check the survey names for it.

Cannon's algorithm and the 1.5-dimensional product are in tests/unit/trainers/survey/test_matmul.py; channels, tiles of
an image and "one weird trick" in the files of their styles beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d

from orchestray.platform.comm.collective import Collective
from orchestray.trainers.parallel.tensor.branches import Branches
from orchestray.trainers.parallel.tensor.locality import LocallyConnected2d, Tiled, TiledConv2d
from orchestray.trainers.survey.matmul import all_to_all_layer, redundant_layer
from orchestray.trainers.tasks.digits_networks import LocallyConnectedDigits
from orchestray.trainers.tasks.inception import inception
from support.layouts import layout_settings, train_laid_out
from support.split_training import Run, check_same, train_split
from support.threads import run_replicas
from support.training import digits

FLOAT_BYTES = 8


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of(*layers: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*layers).double()


# -- branches ----------------------------------------------------------------------------------------------------------


OPERATIONS = ("start_all_reduce", "all_gather", "start_reduce_scatter", "start_all_gather", "start_exchange")


def counting(events: dict[int, list[str]]) -> Any:
    """Note every operation among the workers."""

    def prepare(_: nn.Module, collective: Collective) -> None:
        noted = events.setdefault(collective.rank, [])
        for operation in OPERATIONS:
            original = getattr(collective, operation)

            def call(*arguments: Any, original: Any = original, operation: str = operation) -> Any:
                noted.append(operation)
                return original(*arguments)

            setattr(collective, operation, call)

    return prepare


def test_inception_branch_parallelism_has_only_two_synchronization_points() -> None:
    """Train blocks of four paths by a worker a path: they meet at the concatenation, and before the paths."""
    events: dict[int, list[str]] = {}
    run = Run(random(2, 1, 8, 8), num_steps=1, before=counting(events))
    _, workers = check_same(of(*inception([8, 12], 3, side=8)), {"2": "branches", "4": "branches"}, 4, run)
    assert list(events.values()) == [["start_exchange"] * 2 + ["start_all_reduce"] * 2] * 4
    for block in ("2.branches.", "4.branches."):
        held = [
            [name for name, value in w.gradients.items() if name.startswith(block) and value.numel()] for w in workers
        ]
        paths = [{name.split(".")[2] for name in names} for names in held]
        assert sorted(paths, key=min) == [{"0"}, {"1"}, {"2"}, {"3"}]
    for merge, expected in (("concat", "start_exchange"), ("sum", "start_all_reduce")):
        events.clear()
        branches: list[nn.Module] = [nn.Conv2d(2, 2, 1) for _ in range(4)]
        model = of(Branches(branches, merge))  # type: ignore[arg-type]
        train_split(model, {"0": "branches"}, 4, Run(random(2, 2, 4, 4), num_steps=1, before=counting(events)))
        # The merge, and the sum of the gradients of the input.
        assert list(events.values()) == [[expected, "start_all_reduce"]] * 4


def test_parallel_towers_send_bytes_only_at_the_merge() -> None:
    samples, size, side = 2, 2, 6
    tower = [
        nn.Sequential(nn.Conv2d(1, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2))
        for _ in range(2)
    ]
    model = of(Branches(tower), nn.Flatten())
    run = Run(random(samples, 1, side, side), inputs_need_gradient=False)
    _, workers = check_same(model, {"0": "branches"}, size, run)
    for worker in workers:
        assert worker.bytes_sent == (size - 1) * samples * 4 * (side // 2) ** 2 * FLOAT_BYTES  # its tower's output


# -- locality ----------------------------------------------------------------------------------------------------------


def test_locally_connected_networks_send_no_gradients_between_tiles() -> None:
    model = of(LocallyConnected2d(2, 3, (12, 6), 3), nn.Tanh(), LocallyConnected2d(3, 2, (10, 4), 3))
    plain, workers = check_same(model, {"": "height"}, 2, Run(random(2, 2, 12, 6), inputs_need_gradient=False))
    for worker in workers:
        assert worker.split is not None
        assert not worker.split.partial  # no gradient is added up: 0 bytes
        # What is sent is a row of the second layer's inputs and of the first one's, the gradients of the former, and
        # the outputs to be put together: activations, none of whose sizes has to do with the weights.
        rows, outputs = 2 * (2 * 6 + 2 * 3 * 4), 2 * 2 * 4 * 2
        assert worker.bytes_sent == (rows + outputs) * FLOAT_BYTES
    # And a worker holds the weights of its rows alone.
    assert sum(worker.num_held for worker in workers) == plain.num_held
    assert max(worker.num_held for worker in workers) == plain.num_held // 2


def test_coates_lcn_model_parallel_cluster_sends_far_less_than_the_same_size_cnn() -> None:
    """Count the bytes of steps on three workers: of local layers over tiles, and of as many weights in convolutions."""
    width = 192

    def cnn() -> Any:
        return digits(model="cnn", hidden=[width, width + 8])

    def local() -> Any:
        return LocallyConnectedDigits(48)

    num_weights, num_same = (sum(p.numel() for p in task().build_model().parameters()) for task in (local, cnn))
    assert num_same == pytest.approx(num_weights, rel=0.05)

    def sent(task: Callable[[], Any], network: Mapping[str, Any]) -> float:
        settings = layout_settings({"microbatches": 1, **network}, steps=2, validate_every_steps=2)
        return train_laid_out(task, settings).lines[0]["bytes_sent"]  # type: ignore[no-any-return]

    of_local = sent(local, {"tensor": 3})
    assert 0 < of_local < 0.1 * sent(cnn, {"data": 3})
    assert of_local < 0.1 * sent(cnn, {"tensor": 3, "plan": "spatial"})  # tiles of the images for both


def test_tiled_networks_send_no_halo_and_share_weights_between_tiles_as_designed() -> None:
    for num_tiles in (2, 4):
        torch.manual_seed(0)
        kinds: list[nn.Module] = [nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh()) for _ in range(2)]
        model = of(Tiled(kinds, num_tiles))
        run = Run(random(2, 1, 12, 5), inputs_need_gradient=False)
        x, height = run.inputs, 12 // num_tiles
        tiles = [kinds[tile % 2](x[:, :, tile * height : (tile + 1) * height]) for tile in range(num_tiles)]
        torch.testing.assert_close(model(x), torch.cat(tiles, 2))
        plain, workers = check_same(model, {"": "height"}, 2, run)
        assert plain.num_held == 2 * (2 * 9 + 2)  # two kinds of tile, whatever the number of tiles
        for worker in workers:
            assert worker.bytes_sent == 2 * 2 * 6 * 5 * FLOAT_BYTES  # the output is put together, nothing else is sent


def test_tiled_convolutions_have_the_weights_of_a_place_again_every_few_places() -> None:
    x, size, rows = random(2, 3, 7, 6), (7, 6), 5
    for tile in (1, 2, 3, 9):
        layer = of(TiledConv2d(tile, 3, 4, size, 3))[0]
        assert isinstance(layer, TiledConv2d)
        places = min(tile, rows) * min(tile, 4)
        assert sum(parameter.numel() for parameter in layer.parameters()) == places * 4 * (3 * 9 + 1)
        # By definition: at each place, of the convolution with that place's weights, the output there.
        expected = torch.empty(2, 4, rows, 4, dtype=torch.float64)
        for row in range(rows):
            for column in range(4):
                weight, bias = (values[row % tile, column % tile] for values in (layer.weight, layer.bias))
                expected[:, :, row, column] = conv2d(x, weight.view(4, 3, 3, 3), bias)[:, :, row, column]
        torch.testing.assert_close(layer(x), expected)
    assert layer.weight.shape == LocallyConnected2d(3, 4, size, 3).weight.shape  # a tile of the output's size


def test_tiled_convolutions_over_workers_are_the_whole_and_send_a_halo_only_where_windows_overlap() -> None:
    x, sent = random(2, 2, 12, 6), []
    for stride in (1, 3):
        layer = TiledConv2d(2, 2, 3, (12, 6), 3, stride)
        model = of(layer)
        outputs = 2 * 3 * layer.output_size[0] // 2 * layer.output_size[1]
        plain, workers = check_same(model, {"": "height"}, 2, Run(x, inputs_need_gradient=False))
        assert [worker.num_held for worker in workers] == [plain.num_held] * 2  # what is tied is held by all
        sent.append([worker.bytes_sent - outputs * FLOAT_BYTES for worker in workers])
    overlapping, apart = sent
    assert apart == [0, 0]
    assert sum(overlapping) == 2 * 2 * 2 * 6 * FLOAT_BYTES  # samples, channels and columns of kernel - 1 rows


# -- neurons -----------------------------------------------------------------------------------------------------------


def counting_messages(group: Collective) -> list[int]:
    """Note how many tensors a worker sends, and to how many others."""
    sent: list[int] = []
    start = group.start_exchange

    def exchange(send: Any, receive: Any) -> Any:
        sent.append(len(send))
        return start(send, receive)

    group.start_exchange = exchange  # type: ignore[method-assign]
    return sent


WIDTH, SAMPLES, DEPTH = 2, 3, 3


def network(num_workers: int) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return weights of a few layers of WIDTH neurons a worker, inputs, and the network's outputs."""
    size = WIDTH * num_workers
    weights, x = [random(size, size, seed=layer) for layer in range(DEPTH)], random(SAMPLES, size, seed=9)
    y = x
    for weight in weights:
        y = torch.tanh(y @ weight.T)
    return weights, x, y


def blocks_of(values: Tensor, dim: int, *blocks: int) -> Tensor:
    return torch.cat([values.narrow(dim, WIDTH * block, WIDTH) for block in blocks], dim)


@pytest.mark.parametrize("num_workers", [2, 3, 4])
def test_fc_all_to_all_communication_sends_p_times_p_minus_1_messages_a_layer(num_workers: int) -> None:
    weights, x, y = network(num_workers)

    def worker(group: Collective) -> list[int]:
        sent, rank = counting_messages(group), group.rank
        block = blocks_of(x, 1, rank)
        for weight in weights:
            block = torch.tanh(all_to_all_layer(blocks_of(weight, 0, rank), block, group))
        assert torch.allclose(block, blocks_of(y, 1, rank), rtol=1e-12, atol=1e-12)
        return sent

    per_layer = [sum(of_layer) for of_layer in zip(*run_replicas(num_workers, worker), strict=True)]
    assert per_layer == [num_workers * (num_workers - 1)] * DEPTH


@pytest.mark.parametrize("num_workers", [2, 3, 4, 5])
def test_redundant_computation_partition_computes_twice_and_sends_less(num_workers: int) -> None:
    weights, x, y = network(num_workers)

    def worker(group: Collective) -> tuple[int, int, int]:
        sent, own = counting_messages(group), (group.rank, (group.rank + 1) % num_workers)
        blocks, num_products = blocks_of(x, 1, *own), 0
        for weight in weights:
            rows = blocks_of(weight, 0, *own)
            num_products += rows.numel() * SAMPLES
            blocks = torch.tanh(redundant_layer(rows, blocks, group))
        assert torch.allclose(blocks, blocks_of(y, 1, *own), rtol=1e-12, atol=1e-12)
        return sum(sent), num_products, group.bytes_sent

    results = run_replicas(num_workers, worker)
    messages = sum(sent for sent, _, _ in results)
    assert messages == DEPTH * num_workers * -(-(num_workers - 2) // 2)
    assert messages < DEPTH * num_workers * (num_workers - 1)
    assert sum(products for _, products, _ in results) == 2 * sum(weight.numel() * SAMPLES for weight in weights)
    block_bytes = SAMPLES * WIDTH * FLOAT_BYTES
    assert {sent for _, _, sent in results} == {DEPTH * (num_workers - 2) * block_bytes}  # one block less than plainly
