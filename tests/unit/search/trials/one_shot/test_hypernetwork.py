"""The HyperNet: weights from the codes of memory banks, and shared weights cut to size."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from orchestray.search.methods.base import rng_of
from orchestray.search.spaces.architectures.memory_bank import MemoryBank
from orchestray.search.trials.one_shot.hypernetwork import HyperNet

SPACE = MemoryBank()
SHAPE, OUTPUTS = (8, 8), 10


def hyper_net(seed: int = 0) -> HyperNet:
    return HyperNet(SPACE, SHAPE, OUTPUTS, hidden=8, seed=seed)


def written(writer: HyperNet, genome: Any) -> dict[str, torch.Tensor]:
    return writer.write(genome, SPACE.build(genome, SHAPE, OUTPUTS))


@pytest.mark.parametrize("seed", range(4))
def test_every_weight_of_a_network_is_written_and_learned_through(seed: int) -> None:
    genome, writer = SPACE.sample(rng_of(seed)), hyper_net()
    network = SPACE.build(genome, SHAPE, OUTPUTS).train()
    weights = writer.write(genome, network)
    assert {name: w.shape for name, w in weights.items()} == {n: p.shape for n, p in network.named_parameters()}
    outputs = torch.func.functional_call(network, weights, (torch.randn(4, *SHAPE),))
    grads = torch.autograd.grad(outputs.square().sum(), list(writer.layers.parameters()), allow_unused=True)
    assert all(grad is not None and grad.any() for grad in grads)


def test_a_generated_weight_is_a_patch_of_each_cell_side_by_side_and_has_norm_1() -> None:
    genome, writer = SPACE.sample(rng_of(1)), hyper_net()
    code = SPACE.code(genome)
    patches = writer(torch.from_numpy(code.cells))
    weights = written(writer, genome)
    assert max(len(one.columns) for one in code.generated) > 1
    for one in code.generated:
        weight = weights[one.name][:, :, 0, 0].detach()
        assert float(weight.norm()) == pytest.approx(1.0)
        for row in range(one.rows.stop - one.rows.start):
            for column, of_code in enumerate(one.columns):
                patch = weight[4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
                cell = patches[:, one.rows.start + row, of_code].reshape(4, 4)
                torch.testing.assert_close(patch / patch.norm(), cell / cell.norm())


def test_what_an_op_writes_changes_its_own_weight_and_that_of_its_neighbours() -> None:
    genome = next(
        g for g in map(SPACE.sample, map(rng_of, range(99))) if g["block0.banks"] == 3 and g["block0.ops"] == 3
    )
    last = "block0.op2.writes"
    other = genome | {last: "0" if genome[last] != "0" else "1"}
    one, two = (written(hyper_net(), g) for g in (genome, other))
    for number in (1, 2):
        name = f"steps.block0_op{number}_squeeze.0.weight"
        assert not torch.equal(one[name], two[name]), name


def test_a_bank_has_the_same_columns_of_a_shared_weight_whichever_other_banks_there_are() -> None:
    space, writer = SPACE, hyper_net()
    ops = {"units": 1, "convolutions": 1, "kernel0": 3, "dilation0": 1}
    one_op = {f"block{block}.op0.{name}": value for block in (0, 1) for name, value in ops.items()}
    common = one_op | {f"block{b}.{k}": v for b in (0, 1) for k, v in {"banks": 3, "channels": 4, "ops": 1}.items()}
    common |= {"block0.op0.reads": "0", "block1.op0.reads": "0", "block1.op0.writes": "0"}
    few, many = common | {"block0.op0.writes": "2"}, common | {"block0.op0.writes": "1+2"}
    of_few, of_many = (
        written(writer, space.genome_of(space.decisions_of(g)))["steps.to_block1.0.weight"] for g in (few, many)
    )
    assert (of_few.shape[1], of_many.shape[1]) == (8, 12)
    torch.testing.assert_close(of_few, torch.cat([of_many[:, :4], of_many[:, 8:]], dim=1))


def test_a_smaller_kernel_is_the_middle_of_the_shared_one() -> None:
    genome = next(g for g in map(SPACE.sample, map(rng_of, range(99))) if g["block0.op0.kernel0"] == 5)
    name = "steps.block0_op0_convolution0.0.weight"
    writer = hyper_net()
    large, small = (written(writer, genome | {"block0.op0.kernel0": size})[name] for size in (5, 3))
    torch.testing.assert_close(small, large[:, :, 1:4, 1:4])
