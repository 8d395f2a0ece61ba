"""A recorded computation has the work of closed forms and the depth of its longest chain, and nothing is left out."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable

import networkx as nx
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

from orchestray.trainers.analysis.cost import Cost
from orchestray.trainers.analysis.flops import flops_of
from orchestray.trainers.analysis.graph import OperatorGraph
from orchestray.trainers.analysis.trace import traced
from orchestray.trainers.survey.operators import closed_forms
from orchestray.trainers.survey.operators.closed_forms import ConvolutionShape
from orchestray.trainers.survey.operators.reductions import chain, tree

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward")


def on_meta(module: nn.Module) -> nn.Module:
    return module.to("meta")


def training(module: nn.Module, *shape: int) -> OperatorGraph:
    """Return the graph of a forward and a backward pass on `meta`."""
    x = torch.zeros(shape, device="meta", requires_grad=True)
    return traced(lambda: module(x).sum().backward())


def products_of(graph: OperatorGraph) -> int:
    return sum(each.cost.multiplications for each in graph.operations if each.name in PRODUCTS)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "linear": lambda: (nn.Sequential(nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, 3)), (4, 7)),
    "convolutions": lambda: (
        nn.Sequential(
            *(nn.Conv2d(3, 8, 3, padding=1, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(8, 4, 3), nn.AvgPool2d(2), nn.ConvTranspose2d(4, 2, 3, stride=2)),
        ),
        (2, 3, 17, 19),
    ),
    "attention": lambda: (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (2, 5, 8)),
}


@pytest.mark.parametrize("name", MODELS)
def test_products_of_matrices_and_convolutions_are_those_that_torch_counts_forward_and_backward(name: str) -> None:
    module, shape = MODELS[name]()
    graph = training(on_meta(module), *shape)
    x = torch.zeros(shape, device="meta", requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        module(x).sum().backward()
    assert products_of(graph) == counter.get_total_flops() // 2
    assert flops_of(graph) == counter.get_total_flops()
    assert graph.uncounted == {}


def test_each_gradient_of_a_convolution_in_groups_has_the_products_of_its_forward_pass() -> None:
    graph = training(
        on_meta(nn.Conv2d(8, 4, 3, groups=2)), 2, 8, 4, 5
    )  # torch's own counter has twice those of weights
    forward, backward = (each.cost.multiplications for each in graph.operations if each.name.startswith("convolution"))
    assert (forward, backward) == (2 * 4 * 2 * 3 * 4 * 9, 2 * forward)


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrences_are_counted_where_torch_s_own_counter_sees_none_on_a_cpu(make: type[nn.RNNBase]) -> None:
    module = on_meta(make(8, 16, 2))
    graph = traced(lambda: module(torch.zeros(5, 3, 8, device="meta")))
    gates = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}[make]
    assert products_of(graph) == 5 * 3 * gates * 16 * ((8 + 16) + (16 + 16))
    assert graph.uncounted == {}


@pytest.mark.parametrize(("samples", "inputs", "outputs"), [(1, 1, 1), (4, 7, 5), (16, 100, 3)])
def test_a_fully_connected_layer_has_the_work_and_the_depths_of_table_4(
    samples: int, inputs: int, outputs: int
) -> None:
    graph = training(on_meta(nn.Linear(inputs, outputs, bias=False)), samples, inputs)
    table = closed_forms.fully_connected(samples, inputs, outputs)
    forward, *gradients = (each for each in graph.operations if each.name == "mm")
    assert (forward.cost.multiplications, forward.cost.depth) == (table["y"].work, table["y"].depth + 1)
    found = sorted((each.cost.multiplications, each.cost.depth) for each in gradients)
    assert found == sorted((table[name].work, table[name].depth + 1) for name in ("dw", "dx"))


@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (5, 2)])
def test_a_convolution_has_the_work_and_the_depths_of_tables_4_and_6(kernel: tuple[int, int]) -> None:
    shape = ConvolutionShape(2, 6, 4, 9, 8, kernel)
    graph = training(on_meta(nn.Conv2d(6, 4, kernel, bias=False)), 2, 6, 9, 8)
    table = closed_forms.convolution(shape)
    forward, backward = (each for each in graph.operations if each.name.startswith("convolution"))
    assert closed_forms.direct(shape) == table["y"]
    assert (forward.cost.multiplications, forward.cost.depth) == (table["y"].work, table["y"].depth + 1)
    assert backward.cost.multiplications == table["dw"].work + table["dx"].work
    assert backward.cost.depth == 1 + max(table["dw"].depth, table["dx"].depth)


def by_values(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of two matrices by its scalar operations: each product, and a tree of additions over them."""
    return tree([a[:, inner, None] * b[inner] for inner in range(a.shape[1])], torch.add)


@pytest.mark.parametrize(("samples", "inputs", "outputs"), [(1, 1, 1), (4, 7, 5), (16, 100, 3)])
def test_a_fully_connected_layer_carried_out_value_by_value_has_the_work_and_the_depth_that_are_counted_for_it(
    samples: int, inputs: int, outputs: int
) -> None:
    """Count the operations of the outputs and both gradients, and those on their longest path."""
    x, weight, grad = torch.randn(samples, inputs), torch.randn(outputs, inputs), torch.randn(samples, outputs)
    graph = training(on_meta(nn.Linear(inputs, outputs, bias=False)), samples, inputs)
    forward, *gradients = (each.cost for each in graph.operations if each.name == "mm")
    one_by_one = []
    for a, b in ((x, weight.T), (grad.T, x), (grad, weight)):
        found: list[Tensor] = []
        counted = traced(lambda a=a, b=b, found=found: found.append(by_values(a, b)))
        torch.testing.assert_close(found[0], a @ b, rtol=1e-4, atol=1e-4)
        one_by_one.append((counted.work, counted.depth))
    assert one_by_one[0] == (forward.work, forward.depth)
    assert sorted(one_by_one[1:]) == sorted((each.work, each.depth) for each in gradients)


@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (5, 2)])
def test_a_convolution_carried_out_value_by_value_has_the_work_and_the_depth_that_are_counted_for_it(
    kernel: tuple[int, int],
) -> None:
    """Count the operations of the definition: products, and trees over rows, columns and channels of a kernel."""
    x, weight = torch.randn(2, 6, 9, 8), torch.randn(4, 6, *kernel)
    down, across = kernel
    height, width = 9 - down + 1, 8 - across + 1
    y = functional.conv2d(x, weight)

    def outputs() -> Tensor:
        products = [
            [
                [
                    x[:, None, channel, row : row + height, column : column + width]
                    * weight[:, channel, row, column, None, None]
                    for row in range(down)
                ]
                for column in range(across)
            ]
            for channel in range(6)
        ]
        return tree([tree([tree(rows, torch.add) for rows in columns], torch.add) for columns in products], torch.add)

    def of_weight() -> Tensor:
        """Return the gradient of the weights, if that of the outputs is `y`: sums over rows, columns and samples."""
        windows = x.unfold(2, height, 1).unfold(3, width, 1)  # samples, channels, kernel, outputs
        products = windows[:, None] * y[:, :, None, None, None]
        by_row = tree(products.unbind(-2), torch.add)
        return tree(tree(by_row.unbind(-1), torch.add).unbind(0), torch.add)

    def of_inputs() -> Tensor:
        """Return the gradient of the inputs: sums over rows, columns and output channels."""
        padded = functional.pad(y, (across - 1, across - 1, down - 1, down - 1))
        windows = padded.unfold(2, 9, 1).unfold(3, 8, 1)  # samples, output channels, kernel turned round, inputs
        products = windows[:, :, None] * weight.flip(2, 3)[None, :, :, :, :, None, None]
        by_row = tree(products.unbind(3), torch.add)
        return tree(tree(by_row.unbind(3), torch.add).unbind(1), torch.add)

    found: list[Tensor] = []
    counted = [traced(lambda way=way: found.append(way())) for way in (outputs, of_weight, of_inputs)]
    gradients = torch.ops.aten.convolution_backward(
        y, x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False]
    )
    for one, exact in zip(found, (y, gradients[1], gradients[0]), strict=True):
        torch.testing.assert_close(one, exact, rtol=1e-4, atol=1e-3)
    graph = training(on_meta(nn.Conv2d(6, 4, kernel, bias=False)), 2, 6, 9, 8)
    forward, backward = (each.cost for each in graph.operations if each.name.startswith("convolution"))
    assert (counted[0].work, counted[0].depth) == (forward.work, forward.depth)
    assert backward.depth == max(counted[1].depth, counted[2].depth)
    # The gradient of the inputs is counted without products with padding, which are done here.
    assert backward.work - counted[1].work == 2 * forward.multiplications - x.numel()


@pytest.mark.parametrize("side", range(2, 8))
def test_pooling_has_the_work_and_the_depths_of_table_4(side: int) -> None:
    graph = training(nn.MaxPool2d(side), 2, 3, 2 * side, 2 * side)
    num_outputs = 2 * 3 * 2 * 2
    table = closed_forms.pooling(num_outputs, (side, side))
    forward, backward = (each for each in graph.operations if each.name.startswith("max_pool"))
    assert (forward.cost.work, forward.cost.depth) == table["y"]
    assert (backward.cost.work, backward.cost.depth) == table["dx"]
    graph = training(nn.AvgPool2d(side), 2, 3, 2 * side, 2 * side)
    forward, backward = (each for each in graph.operations if each.name.startswith("avg_pool"))
    # A mean has the sums of a maximum, and a factor after them.
    assert (forward.cost.additions, forward.cost.multiplications) == (table["y"].work, num_outputs)
    assert forward.cost.depth == table["y"].depth + 1
    assert backward.cost.depth == 2  # whatever the kernel: O(1)


@pytest.mark.parametrize("kernel", [*((side, side) for side in range(2, 8)), (2, 5), (7, 3)])
def test_a_tree_of_maxima_over_rows_and_then_columns_is_max_pooling_with_the_work_and_the_depth_of_table_4(
    kernel: tuple[int, int],
) -> None:
    """Count the comparisons that the tree really makes, and those on its longest path."""
    down, across = kernel
    x = torch.randn(2, 3, 2 * down, 2 * across, generator=torch.Generator().manual_seed(0))
    found: list[Tensor] = []

    def pool() -> None:
        rows = tree([x[:, :, row::down] for row in range(down)], torch.maximum)
        found.append(tree([rows[..., column::across] for column in range(across)], torch.maximum))

    counted = traced(pool)
    assert torch.equal(found[0], functional.max_pool2d(x, kernel))
    assert {each.name for each in counted.operations if each.cost.work} == {"maximum"}
    table = closed_forms.pooling(found[0].numel(), kernel)
    assert (counted.work, counted.depth) == table["y"]
    ready_made = traced(lambda: functional.max_pool2d(x, kernel))
    assert (ready_made.work, ready_made.depth) == table["y"]


def of_both_passes(module: nn.Module, shape: list[int]) -> tuple[Cost, Cost]:
    """Return the costs of a layer itself, forward and backward, without those of the loss."""
    graph = training(on_meta(module), *shape)
    (backward,) = (each for each in graph.operations if each.name.endswith("_backward"))
    forward = max((each for each in graph.operations if each is not backward), key=lambda each: each.cost.work)
    return forward.cost, backward.cost


@pytest.mark.parametrize("make", [nn.Sigmoid, nn.Tanh, nn.ReLU])
@pytest.mark.parametrize("dimension", range(4))
def test_activations_cost_an_operation_a_value_forward_and_backward_at_the_same_depth_for_any_size(
    make: type[nn.Module], dimension: int
) -> None:
    sizes = [2, 4, 8, 8]
    twice = [size * (1 + (place == dimension)) for place, size in enumerate(sizes)]
    small, large = (of_both_passes(make(), shape) for shape in (sizes, twice))
    assert closed_forms.activation(512) == (small[0].work, small[0].depth)
    assert closed_forms.activation(1024) == (large[0].work, large[0].depth)
    assert large[1].work == 2 * small[1].work  # the slope of work over each size is 1
    assert small[1].work % 512 == 0
    assert small[1].depth == large[1].depth <= 3


@pytest.mark.parametrize("dimension", range(4))
def test_batch_normalisation_grows_by_a_level_when_the_values_of_a_channel_double_forward_and_backward(
    dimension: int,
) -> None:
    sizes = [2, 4, 8, 8]
    twice = [size * (1 + (place == dimension)) for place, size in enumerate(sizes)]
    for small, large in zip(
        *(of_both_passes(nn.BatchNorm2d(shape[1]), shape) for shape in (sizes, twice)), strict=True
    ):
        assert large.depth - small.depth == (dimension != 1)
        assert 1.9 <= large.work / small.work <= 2.1


def test_batch_normalisation_carried_out_value_by_value_has_the_counted_work_and_a_level_more_for_twice_as_many() -> (
    None
):
    """Count trees over the values of a channel and over their squares, and what follows them."""
    weight, bias = torch.rand(3), torch.rand(3)
    by_values, whole = [], []
    for samples in (4, 8, 16):
        x = torch.randn(samples, 3, 2, 2)
        found: list[Tensor] = []
        of_channels = x.transpose(0, 1).flatten(1).unbind(1)

        def normalise(values: tuple[Tensor, ...] = of_channels, found: list[Tensor] = found) -> None:
            mean = tree(values, torch.add) / len(values)
            square = tree([each * each for each in values], torch.add) / len(values)
            inverse = torch.rsqrt(square - mean * mean + 1e-5)
            found.extend((each - mean) * inverse * weight + bias for each in values)

        by_values.append(traced(normalise))
        exact = functional.batch_norm(x, None, None, weight, bias, training=True)
        torch.testing.assert_close(torch.stack(found, 1), exact.transpose(0, 1).flatten(1), rtol=1e-3, atol=1e-4)
        whole.append(of_both_passes(nn.BatchNorm2d(3), [samples, 3, 2, 2])[0])
    assert [each.work for each in by_values] == [each.work for each in whole]
    for counted in (by_values, whole):
        assert [larger.depth - smaller.depth for smaller, larger in itertools.pairwise(counted)] == [1, 1]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 100, 257, 1000])
def test_a_sum_in_a_chain_and_in_a_tree_is_the_same_by_the_same_work_at_different_depths(count: int) -> None:
    values = torch.randint(-(2**40), 2**40, (count,), generator=torch.Generator().manual_seed(count)).unbind()
    wanted = sum(int(value) for value in values)
    for reduce, depth in ((chain, count - 1), (tree, math.ceil(math.log2(count)))):
        found: list[Tensor] = []
        graph = traced(lambda reduce=reduce, found=found: found.append(reduce(values, torch.add)))
        assert int(found[0]) == wanted
        assert (graph.work, graph.depth) == (count - 1, depth)


def test_a_sum_of_torch_has_the_work_and_the_depth_of_a_tree() -> None:
    for count in range(1, 1001):
        total = traced(lambda count=count: torch.ones(count, device="meta").sum())
        assert (total.work, total.depth) == (count - 1, math.ceil(math.log2(count)))


def test_the_depth_is_that_of_the_longest_path_which_the_critical_path_names() -> None:
    module, shape = MODELS["convolutions"]()
    graph = training(on_meta(module), *shape)
    network = nx.DiGraph()
    for number, each in enumerate(graph.operations):
        network.add_edge(("begin", number), ("end", number), weight=each.cost.depth)
        network.add_edges_from((("end", need), ("begin", number), {"weight": 0}) for need in each.needs)
    assert graph.depth == nx.dag_longest_path_length(network)
    path = graph.critical_path()
    assert sum(graph.operations[number].cost.depth for number in path) == graph.depth
    assert all(before in graph.operations[after].needs for before, after in itertools.pairwise(path))


def test_a_value_written_in_place_is_needed_by_what_reads_it_through_any_view() -> None:
    def compute() -> Tensor:
        x = torch.ones(8, device="meta")
        x[:4].exp_()
        return x.reshape(2, 4).t() + 1

    graph = traced(compute)
    names = [each.name for each in graph.operations]
    assert names[-2:] == ["exp_", "add"]
    assert len(names) - 2 in graph.operations[-1].needs


def test_layers_and_the_backward_pass_are_told_apart() -> None:
    graph = training(on_meta(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))), 2, 3)
    found = {(each.layer, each.is_backward) for each in graph.operations if each.name in PRODUCTS}
    assert found == {(f"Sequential.{number}", is_backward) for number in (0, 1) for is_backward in (False, True)}


def test_gradients_of_modules_side_by_side_are_those_of_the_module_that_made_their_node() -> None:
    class Beside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            query = self.query(x)
            torch.zeros(3, device="meta")  # an operation without a node
            return query * self.key(x) + self.value(x).relu_()

    graph = training(on_meta(Beside()), 2, 3)
    found = Counter((each.layer, each.is_backward) for each in graph.operations if each.name in PRODUCTS)
    assert found == {
        (f"Beside.{name}", is_backward): 1 + is_backward
        for name in ("query", "key", "value")
        for is_backward in (False, True)
    }


def test_a_gradient_that_a_forward_pass_takes_is_of_the_forward_pass() -> None:
    class Force(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.energy = nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            energy = self.energy(x).tanh().sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]

    graph = training(on_meta(Force()), 2, 3)
    found = Counter((each.layer, each.is_backward) for each in graph.operations if each.name in PRODUCTS)
    assert found[("Force.energy", False)] == 2  # its outputs, and the force
    assert found[("Force.energy", True)] > 0


def test_an_operation_is_of_the_module_that_runs_it_whatever_names_it_has() -> None:
    class Caller(nn.Module):
        def __init__(self, called: nn.Module) -> None:
            super().__init__()
            self.called = [called]  # not its own

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.called[0](x)
            return out

    linear = nn.Linear(3, 3)
    wrapped = nn.Sequential(linear)
    model = nn.Sequential()
    for name, part in (("wrapped", wrapped), ("l", linear), ("caller_of_a_long_name", Caller(linear))):
        model.add_module(name, part)
    graph = training(on_meta(model), 2, 3)
    owners = Counter(each.layer for each in graph.operations if each.name in PRODUCTS)
    assert owners == {"Sequential.wrapped.0": 9}  # the first name, as `named_modules` has it


@pytest.mark.parametrize(
    "compute",
    [
        lambda a, b: a @ b,
        lambda a, b: a @ b[:, 0],
        lambda a, b: torch.dot(a[0], b[:, 0]),
        lambda a, b: torch.addmm(a @ b, a, b),
        lambda a, b: torch.addmv((a @ b)[:, 0], a, b[:, 0]),
        lambda a, b: torch.addcmul(a, a, a),
        lambda a, b: a.sum(0),
        lambda a, b: a.mean(0),
        lambda a, b: torch.linalg.vector_norm(a, dim=0),
        lambda a, b: a.cumsum(0),
        lambda a, b: a.index_add(0, torch.zeros(3, dtype=torch.int64, device="meta"), a[:3]),
    ],
    ids=["mm", "mv", "dot", "addmm", "addmv", "addcmul", "sum", "mean", "norm", "cumsum", "index_add"],
)
def test_a_complex_operation_has_the_real_ones_that_it_is_made_of(compute: Callable[[Tensor, Tensor], Tensor]) -> None:
    last = {}
    for dtype in (torch.float32, torch.complex64):
        factors = torch.empty(8, 5, dtype=dtype, device="meta"), torch.empty(5, 3, dtype=dtype, device="meta")
        last[dtype] = traced(lambda factors=factors: compute(*factors)).operations[-1]  # type: ignore[misc]
    real, of_complex = last[torch.float32].cost, last[torch.complex64].cost
    if last[torch.float32].name in ("mean", "linalg_vector_norm"):  # factors that are real, or squares of both parts
        assert of_complex.multiplications == 2 * real.multiplications
        assert of_complex.additions >= 2 * real.additions
        return
    assert of_complex.multiplications == 4 * real.multiplications
    assert of_complex.additions == 2 * (real.additions + real.multiplications)


def test_the_gradients_of_an_embedding_are_its_own_whatever_comes_after_it() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.cells = nn.Embedding(7, 3), nn.LSTM(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.cells(self.words(x))[0]
            return out

    module = on_meta(Recurrent())
    x = torch.zeros(5, 2, dtype=torch.int64, device="meta")
    graph = traced(lambda: module(x).sum().backward())
    owners = {each.layer for each in graph.operations if each.name == "embedding_dense_backward"}
    assert owners == {"Recurrent.words"}


@pytest.mark.parametrize(
    "move",
    [
        torch.clone,
        lambda x: x.t().contiguous(),
        lambda x: x.to(torch.float64),
        lambda x: torch.empty_like(x).copy_(x),
        torch.zeros_like,
        lambda x: torch.empty_like(x).fill_(1.0),
    ],
    ids=["clone", "contiguous", "other type", "copy", "zeros", "fill"],
)
def test_what_moves_values_has_bytes_and_no_work(move: Callable[[Tensor], Tensor]) -> None:
    x = torch.zeros(3, 4, device="meta")
    graph = traced(lambda: move(x))
    assert graph.operations
    assert graph.operations[-1].num_bytes > 0
    assert graph.work == 0
    assert graph.uncounted == {}


def test_an_operation_without_a_formula_is_named_and_never_a_silent_zero() -> None:
    graph = traced(lambda: torch.linalg.qr(torch.zeros(4, 4, device="meta")))
    assert graph.uncounted == {"linalg_qr": 1}
    assert traced(lambda: torch.linalg.qr(torch.eye(4))).uncounted == {"linalg_qr": 1}
    sparse = torch.eye(4).to_sparse()
    assert "mm of sparse_coo tensors" in traced(lambda: sparse @ torch.eye(4)).uncounted
