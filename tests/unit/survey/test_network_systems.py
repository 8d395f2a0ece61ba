"""Group C: networks divided over workers, each system by the check the survey names for it.

Partitions of neurons, images and branches are in test_network_partitions.py, networks made to be divided in
test_divided_networks.py.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import statistics
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from orchestray.platform.comm.collective import Collective
from orchestray.trainers.parallel.pipeline.schedules import make_programs, placement
from orchestray.trainers.parallel.pipeline.simulation import simulate
from orchestray.trainers.parallel.tensor.plan import find_plan
from support.layouts import held_elements, layout_settings, train_laid_out
from support.patience import PATIENCE_S
from support.pipelines import mlp, one_process, pipelined, points, same_gradients, share_of
from support.split_training import Run, check_same, split_by
from support.threads import run_replicas
from support.training import Rows, digits, same_bits

FLOAT_BYTES = 8
ROOT = Path(__file__).parents[3]
CLOSE: Any = {"rtol": 1e-12, "atol": 1e-12}


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(*layers).double()


# -- layers divided over workers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
def test_model_parallelism_is_the_whole_network_with_one_of_p_parts_of_its_weights_a_worker(size: int) -> None:
    model = of(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 32))
    plan = find_plan(model, size=size)
    assert set(plan) == {"0", "2", "4"}  # every layer
    plain, workers = check_same(model, plan, size, Run(random(6, 16)))
    for worker in workers:
        assert plain.num_held / size <= worker.num_held <= plain.num_held / size + 64  # a bias may be whole
        assert worker.outputs.shape == plain.outputs.shape  # of the whole minibatch, on each of them


@pytest.mark.parametrize("size", [2, 3, 4])
def test_fc_all_to_all_communication_of_split_layers_is_a_block_from_each_to_each_other(size: int) -> None:
    depth, samples, width = 3, 5, 2
    model = of(*(nn.Linear(width * size, width * size) for _ in range(depth)))
    x = random(samples, width * size)

    def worker(group: Collective) -> int:
        local = copy.deepcopy(model)
        split_by(local, {str(layer): "output_gathered" for layer in range(depth)}, group)
        with torch.no_grad():
            torch.testing.assert_close(local(x), model(x), **CLOSE)
        return group.bytes_sent

    block_bytes = samples * width * FLOAT_BYTES
    assert sum(run_replicas(size, worker)) == depth * size * (size - 1) * block_bytes


@pytest.mark.parametrize("size", [2, 3, 5])
def test_neighborhood_collectives_send_a_message_to_each_neighbour_whatever_the_number_of_workers(size: int) -> None:
    model = of(nn.Conv2d(1, 2, 3, padding=1), nn.Tanh(), nn.MaxPool2d(3, 1, 1))
    x = random(2, 1, 4 * size, 5)

    def worker(group: Collective) -> list[set[int]]:
        sent: list[set[int]] = []
        start = group.start_exchange

        def exchange(send: Any, receive: Any) -> Any:
            sent.append({peer for peer, tensor in send.items() if tensor.numel()})
            return start(send, receive)

        group.start_exchange = exchange  # type: ignore[method-assign]
        local = copy.deepcopy(model)
        split_by(local, {"": "height"}, group)
        with torch.no_grad():
            torch.testing.assert_close(local(x), model(x), **CLOSE)
        return sent

    for rank, sent in enumerate(run_replicas(size, worker)):
        assert sent == [{rank - 1, rank + 1} & set(range(size))] * 2  # for the convolution, and for the pooling


# -- layers placed on workers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("widths", "second", "held"),
    [([16, 8, 4], "1", [136, 36]), ([16, 8, 4, 4], "1", [136, 56]), ([16, 8, 4, 4], "2", [172, 20])],
)
def test_manual_device_placement_is_the_local_model(widths: list[int], second: str, held: list[int]) -> None:
    def task() -> Rows:
        rng = np.random.default_rng(0)
        layers = lambda: nn.Sequential(*itertools.starmap(nn.Linear, itertools.pairwise(widths)))  # noqa: E731
        return Rows(rng.normal(size=(48, 16)), rng.integers(0, 4, 48), layers)

    placed = layout_settings({"pipeline": 2, "split": [second]})
    local, found = train_laid_out(task, layout_settings()), train_laid_out(task, placed)
    assert found.losses == local.losses
    assert same_bits(found.weights, local.weights)
    assert held_elements(task, placed)[1] == held  # weights and biases of the layers before the named one, and after


class AtWork:
    """A counter of the watched layers that compute at the same time while the model trains."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now = 0
        self.most = 0
        self.times: dict[str, list[tuple[float, float]]] = defaultdict(list)
        """By layer, when each pass began and ended, in seconds of the clock on the wall."""
        self._began_s: dict[str, float] = {}

    def watch(self, name: str, layer: nn.Module) -> None:
        # A validation has no backward pass to wait for: its micro-batches may follow each other.
        layer.register_forward_pre_hook(lambda called, _: self._begin(name) if called.training else None)
        layer.register_forward_hook(lambda called, *_: self._end(name) if called.training else None)
        layer.register_full_backward_pre_hook(lambda *_: self._begin(name))
        layer.register_full_backward_hook(lambda *_: self._end(name))

    def _begin(self, name: str) -> None:
        with self._lock:
            self._now += 1
            self.most = max(self.most, self._now)
            self._began_s[name] = time.perf_counter()

    def _end(self, name: str) -> None:
        with self._lock:
            self._now -= 1
            self.times[name].append((self._began_s.pop(name), time.perf_counter()))

    def busy_s(self, name: str) -> float:
        return sum(end_s - begin_s for begin_s, end_s in self.times[name])

    @property
    def wall_s(self) -> float:
        spans = [span for of_layer in self.times.values() for span in of_layer]
        return max(end_s for _, end_s in spans) - min(begin_s for begin_s, _ in spans)


@pytest.mark.filterwarnings("ignore:Full backward hook")  # the first layer's input needs no gradient
def test_naive_layer_per_device_split_has_one_of_five_devices_at_work_at_a_time() -> None:
    model, at_work = of(*(nn.Linear(32, 32) for _ in range(5))), AtWork()
    share = share_of([16] * 3, points(32))
    plain = one_process(model, [share])
    for name, layer in model.named_children():
        at_work.watch(name, layer)
    results = pipelined(model, [share], "naive", 5)
    assert same_gradients(results, plain)
    assert [len(result.gradients[0]) for result in results] == [2] * 5  # a layer each
    # Each waits for the one before: together they are as slow as one that does it all, and slower by what they send.
    assert [len(passes) for passes in at_work.times.values()] == [3 * 2] * 5  # forward and backward
    assert at_work.most == 1
    busy_s = [at_work.busy_s(name) for name in at_work.times]
    assert sum(busy_s) < at_work.wall_s  # of one that does it all nothing else is asked than these passes
    assert statistics.mean(busy_s) / at_work.wall_s < 1 / 5
    programs = make_programs("naive", 5, 1, 3)
    simulated = simulate(programs, placement("naive", 5, 1), forward_s=1, backward_s=2)
    assert simulated.busy_s == (simulated.span_s / 5,) * 5
    assert simulated.span_s == 5 * 3 * (1 + 2)


def test_naive_layer_per_device_split_was_measured_to_be_no_faster_than_one_process() -> None:
    measured = json.loads((ROOT / "benchmarks" / "results" / "naive_split.json").read_text(encoding="utf-8"))
    of = {each["name"]: each["values"] for each in measured["measurements"]}
    one, five = (of[f"{side}: first step to last"] for side in ("one process", "a layer a worker"))
    assert len(one) == len(five) >= 3
    assert max(one) < min(five)
    assert of["one process: validation loss"] == pytest.approx(of["a layer a worker: validation loss"])
    # One of five computes at a time; what is sent takes time, too.
    assert all(0.1 < share <= 0.2 for share in of["a layer a worker: part of the time in which a worker computes"])


@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_the_latency_of_one_sample_is_a_pass_of_each_stage_after_the_other_there_and_back(num_stages: int) -> None:
    model, at_work = of(*(nn.Linear(8, 8) for _ in range(num_stages))), AtWork()
    for name, layer in model.named_children():
        at_work.watch(name, layer)
    pipelined(model, [share_of([1], points(8))], "1f1b", num_stages)
    begun = sorted((begin_s, int(name)) for name, passes in at_work.times.items() for begin_s, _ in passes)
    assert [stage for _, stage in begun] == [*range(num_stages), *reversed(range(num_stages))]
    assert at_work.most == 1


class Meeting(nn.Module):
    """A layer that goes on when the other stage computes as well."""

    def __init__(self, meets: set[int], barrier: threading.Barrier) -> None:
        super().__init__()
        self._meets, self._barrier, self._calls = meets, barrier, itertools.count()

    def __deepcopy__(self, memo: Any) -> Meeting:
        return Meeting(self._meets, self._barrier)

    def forward(self, x: Tensor) -> Tensor:
        if next(self._calls) in self._meets:
            with contextlib.suppress(threading.BrokenBarrierError):
                self._barrier.wait(PATIENCE_S)
        return x * 1


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_pipelining_by_overlap_computes_different_micro_batches_at_once_and_changes_no_bit(schedule: str) -> None:
    met = threading.Event()
    barrier = threading.Barrier(2, met.set)

    def look(network: Any, collective: Collective) -> None:
        back = network._backward

        def goes_back(*arguments: Any) -> None:
            if collective.rank == 0 and not met.is_set():
                barrier.abort()  # the first stage waits for the second one, which would wait for it
            back(*arguments)

        network._backward = goes_back

    # The first stage is at micro-batch 1 while the second one is at micro-batch 0.
    layers = [nn.Linear(5, 5), Meeting({1}, barrier), nn.Linear(5, 5), Meeting({0}, barrier)]
    share = share_of([2, 2], points(5))
    model = of(*layers)
    plain = of(nn.Linear(5, 5), nn.Identity(), nn.Linear(5, 5), nn.Identity())
    plain.load_state_dict(model.state_dict())
    results = pipelined(model, [share], schedule, 2, watch=look)
    assert met.is_set()
    assert same_gradients(results, one_process(plain, [share]))


def test_pipeline_weight_caching_moves_no_weight_bytes_after_the_start() -> None:
    width, samples, num_steps, num_micro_batches = 5, 2, 3, 4
    addresses: dict[int, list[list[int]]] = {0: [], 1: []}
    sent: dict[int, int] = {}

    def look(network: Any, collective: Collective) -> None:
        backward, groups_bytes = network.backward, collective.bytes_sent

        def noting(*arguments: Any, **options: Any) -> float:
            loss: float = backward(*arguments, **options)
            addresses[collective.rank].append([p.data_ptr() for p in network.model.parameters()])
            by_link = network.usage().bytes_by_link
            sent[collective.rank] = sent.get(collective.rank, 0) + sum(by_link.values())
            assert collective.bytes_sent == groups_bytes  # nothing but through the links of the stages
            return loss

        network.backward = noting

    shares = [share_of([samples] * num_micro_batches, points(width))] * num_steps
    pipelined(mlp(7, width), shares, "1f1b", 2, watch=look)
    # One activation forward, its gradient back: what is sent has nothing to do with the weights.
    activations = num_steps * num_micro_batches * samples * width * FLOAT_BYTES
    assert sent == {0: activations, 1: activations}
    assert all(found == [found[0]] * num_steps for found in addresses.values())


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_pipeline_weight_memory_is_divided_over_the_stages_as_evenly_as_layers_allow(num_stages: int) -> None:
    hidden = [64] * 7
    settings = layout_settings({"pipeline": num_stages, "split": "equal"})
    whole, parts = held_elements(lambda: digits(hidden=hidden), settings)
    linear = (layer for layer in digits(hidden=hidden).build_model() if isinstance(layer, nn.Linear))
    layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in linear]
    assert sum(parts) == whole == sum(layers)  # nothing is held twice
    # No cut of the layers anywhere has a smaller largest part.
    cuts = itertools.combinations(range(1, len(layers)), num_stages - 1)
    bounds = ([0, *cut, len(layers)] for cut in cuts)
    assert max(parts) == min(max(sum(layers[a:b]) for a, b in itertools.pairwise(bound)) for bound in bounds)
