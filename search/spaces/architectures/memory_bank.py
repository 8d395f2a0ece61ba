"""Networks that read memory banks and write to them: the space of SMASH.

A. Brock, T. Lim, J. M. Ritchie and N. Weston, "SMASH: One-Shot Model Architecture Search through HyperNetworks", ICLR
2018, section 3.1. A block has a few banks of one height and width, all empty but the first. An op concatenates the
banks that it reads, and maps them to a few channels by a 1 x 1 convolution. It convolves these, and adds the result to
the banks that it writes. One bank makes a residual network. An empty bank for each op, which reads all others, makes a
dense one. Between blocks, all banks that are not empty are concatenated, mapped to the next block's first bank by a
1 x 1 convolution, and pooled.

The paper's ops have at most four convolutions, in groups, and its banks may differ in width within a block. Here a
block's banks have one width, and convolutions have no groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from orchestray.platform.errors import ConfigError
from orchestray.search.spaces.architectures.base import Genome
from orchestray.search.spaces.architectures.choices import Choose, ComposedSpace
from orchestray.search.spaces.architectures.plan import INPUT, Draft, Plan

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Op:
    """An op of a block. Banks count from 0."""

    reads: tuple[int, ...]
    writes: tuple[int, ...]
    units: int
    """Channels of the 1 x 1 convolution, in units of the space."""
    convolutions: tuple[tuple[int, int], ...]
    """Kernel size and dilation of each convolution after it."""


@dataclass(frozen=True)
class Block:
    """A block: banks of one height and width, and the ops on them, in order."""

    channels: int
    """Channels of each bank."""
    ops: tuple[Op, ...]

    @property
    def filled(self) -> tuple[int, ...]:
        """Banks that are not empty at the end."""
        return tuple(sorted({0, *(bank for op in self.ops for bank in op.writes)}))


@dataclass(frozen=True)
class GeneratedWeight:
    """The place of a 1 x 1 convolution's weight in the code of an architecture."""

    name: str
    """Name of the weight, [outputs, inputs, 1, 1], in the network."""
    rows: slice
    """Rows of the code, each for some of the outputs."""
    columns: tuple[int, ...]
    """Columns of the code, each for the inputs of one unit."""


@dataclass(frozen=True)
class MemoryBankCode:
    """An architecture as a tensor (section 3.2), and the parts of it that describe each generated weight."""

    cells: np.ndarray
    """[features, rows, columns] of 0 and 1. A column is a unit of channels of a bank, the same for all ops; the rows of
    an op are those of its 1 x 1 convolution's outputs. A cell whose bank the op does not read is 0.
    """
    generated: tuple[GeneratedWeight, ...]


@dataclass(frozen=True)
class SharedWeight:
    """The part of a weight, learned once for all networks, that one network uses."""

    name: str
    """Name under which the networks share it."""
    inputs: tuple[int, ...] | None = None
    """Input channels that belong to the network's banks; None: the first ones."""


class MemoryBank(ComposedSpace):
    """A space of blocks of memory banks. The choices are the banks, width and ops of each block, and each op's banks,
    bottleneck and convolutions.
    """

    def __init__(
        self,
        *,
        blocks: int = 2,
        banks: int = 3,
        channels: Sequence[int] = (4, 8),
        unit: int = 4,
        max_ops: int = 3,
        max_units: int = 2,
        max_convolutions: int = 2,
        kernels: Sequence[int] = (3, 5),
        dilations: Sequence[int] = (1, 2),
    ) -> None:
        """
        Args:
            blocks: number of blocks, each of half the height and width of the one before.
            banks: largest number of banks of a block.
            channels: widths of a bank to choose from, multiples of `unit`.
            unit: channels of a unit: a weight of a 1 x 1 convolution is generated in patches of unit x unit.
            max_ops: largest number of ops of a block.
            max_units: largest number of units of an op's 1 x 1 convolution.
            max_convolutions: largest number of convolutions after it.
            kernels: their sizes to choose from, odd.
            dilations: their dilations to choose from.

        Raises:
            ConfigError: an argument is out of its range.
        """
        for name, value in (("channels", channels), ("kernels", kernels), ("dilations", dilations)):
            if not value or min(value) < 1 or len(set(value)) < len(value):
                raise ConfigError(
                    f"search.architecture.{name}: must be different numbers of at least 1, got {list(value)}"
                )
        if any(kernel % 2 == 0 for kernel in kernels):
            raise ConfigError(f"search.architecture.kernels: must be odd, got {list(kernels)}")
        self.blocks, self.banks, self.channels, self.unit = blocks, banks, tuple(sorted(channels)), unit
        self.max_ops, self.max_units, self.max_convolutions = max_ops, max_units, max_convolutions
        self.kernels, self.dilations = tuple(sorted(kernels)), tuple(sorted(dilations))
        for name in ("blocks", "banks", "unit", "max_ops", "max_units", "max_convolutions"):
            if getattr(self, name) < 1:
                raise ConfigError(f"search.architecture.{name}: must be at least 1, got {getattr(self, name)}")
        if any(width % unit for width in channels):
            raise ConfigError(
                f"search.architecture.channels: must be multiples of the unit, {unit}, got {list(channels)}; change "
                "them or search.architecture.unit"
            )

    # -- networks ----------------------------------------------------------------------------------------------------

    def answer(self, choose: Choose) -> list[Block]:
        """Return the blocks."""
        return [self._block(choose, f"block{index}") for index in range(self.blocks)]

    def blocks_of(self, genome: Genome) -> list[Block]:
        """Return the blocks of a genome.

        Raises:
            ConfigError: the genome does not belong to this space.
        """
        pick = self._answers(genome)
        return self.answer(lambda name, options: options[pick(name, options)])

    def _block(self, choose: Choose, name: str) -> Block:
        num_banks = int(choose(f"{name}.banks", range(1, self.banks + 1)))
        channels = int(choose(f"{name}.channels", self.channels))
        filled = {0}
        ops = []
        for index in range(int(choose(f"{name}.ops", range(1, self.max_ops + 1)))):
            ops.append(self._op(choose, f"{name}.op{index}", filled, num_banks))
            filled |= set(ops[-1].writes)
        return Block(channels, tuple(ops))

    def _op(self, choose: Choose, name: str, filled: set[int], num_banks: int) -> Op:
        reads = _banks(choose(f"{name}.reads", _subsets(tuple(sorted(filled)))))
        writes = _banks(choose(f"{name}.writes", _subsets(tuple(range(num_banks)))))
        units = int(choose(f"{name}.units", range(1, self.max_units + 1)))
        convolutions = tuple(
            (
                int(choose(f"{name}.kernel{index}", self.kernels)),
                int(choose(f"{name}.dilation{index}", self.dilations)),
            )
            for index in range(int(choose(f"{name}.convolutions", range(1, self.max_convolutions + 1))))
        )
        return Op(reads, writes, units, convolutions)

    def compose(self, choose: Choose) -> Plan:
        blocks = self.answer(choose)
        draft = Draft()
        value = draft.step("conv", INPUT, name="stem", shared="stem", channels=blocks[0].channels, kernel=3)
        for index, block in enumerate(blocks):
            if index:
                name = f"to_block{index}"
                value = draft.step("fit", value, name=name, shared=name, channels=block.channels)
                value = draft.step("average_pool", value, name=f"{name}_pool", kernel=3, stride=2)
            value = self._written(draft, value, index, block)
        return draft.plan(value)

    def _written(self, draft: Draft, value: int, index: int, block: Block) -> int:
        """Return the value of all banks of a block, concatenated."""
        banks: dict[int, int] = {0: value}
        for number, op in enumerate(block.ops):
            name = f"block{index}_op{number}"
            read = draft.concat([banks[bank] for bank in op.reads], f"{name}_reads")
            inner = op.units * self.unit
            made = draft.step("conv", read, name=f"{name}_squeeze", channels=inner, kernel=1)
            for place, (kernel, dilation) in enumerate(op.convolutions):
                wide = block.channels if place == len(op.convolutions) - 1 else inner
                shared = f"block{index}_convolution{place}"
                more = {"channels": wide, "kernel": kernel, "dilation": dilation}
                made = draft.step("conv", made, name=f"{name}_convolution{place}", shared=shared, **more)
            for bank in op.writes:
                banks[bank] = draft.add([banks[bank], made], f"{name}_to{bank}") if bank in banks else made
        return draft.concat([banks[bank] for bank in block.filled], f"block{index}_banks")

    def count(self) -> int:
        """Return the number of genomes."""
        of_op: int = self.max_units * sum(
            (len(self.kernels) * len(self.dilations)) ** number for number in range(1, self.max_convolutions + 1)
        )

        @cache
        def ways(ops: int, filled: int, num_banks: int) -> int:
            """Return the number of lists of this many ops, with `filled` banks that are not empty before them."""
            if not ops:
                return 1
            subsets = range(1, 2**num_banks)
            after = (filled | written for written in subsets)
            return ((1 << filled.bit_count()) - 1) * of_op * sum(ways(ops - 1, full, num_banks) for full in after)

        of_block = len(self.channels) * sum(
            ways(ops, 1, banks) for banks in range(1, self.banks + 1) for ops in range(1, self.max_ops + 1)
        )
        return int(of_block**self.blocks)

    # -- what a HyperNet needs ---------------------------------------------------------------------------------------

    def code(self, genome: Genome) -> MemoryBankCode:
        """Return the architecture as a tensor.

        The features of a cell describe its op: banks read, banks written, units, number of convolutions, and their
        kernels and dilations. The others say where the cell is: the bank of its column, its unit in that bank, its row
        in the op, the op's block and number. The paper leaves these to the borders of the tensor.
        """
        slots = self.channels[-1] // self.unit
        rows: list[np.ndarray] = []
        generated = []
        for index, block in enumerate(self.blocks_of(genome)):
            for number, op in enumerate(block.ops):
                about = self._about(op, index, number)
                columns = tuple(bank * slots + at for bank in op.reads for at in range(block.channels // self.unit))
                name = f"steps.block{index}_op{number}_squeeze.0.weight"
                generated.append(GeneratedWeight(name, slice(len(rows), len(rows) + op.units), columns))
                for row in range(op.units):
                    line = np.zeros((self.num_features, self.banks * slots), np.float32)
                    for column in columns:
                        places = [*divmod(column, slots), row]
                        sizes = [self.banks, slots, self.max_units]
                        line[:, column] = np.concatenate([about, *map(_one_hot, places, sizes)])
                    rows.append(line)
        return MemoryBankCode(np.stack(rows, axis=1), tuple(generated))

    def shared(self, genome: Genome) -> Mapping[str, SharedWeight]:
        """Return the weights that are not generated, by the names of their modules in the network."""
        blocks = self.blocks_of(genome)
        found = {step.name: SharedWeight(step.shared or step.name) for step in self.plan(genome).steps}
        largest = self.channels[-1]
        for index, block in enumerate(blocks):
            inputs = tuple(bank * largest + at for bank in block.filled for at in range(block.channels))
            name = "head" if index == len(blocks) - 1 else f"to_block{index + 1}"
            found[name] = SharedWeight(name, inputs)
        return found

    def largest(self, input_shape: Sequence[int], num_outputs: int) -> nn.ModuleDict:
        """Return the modules of all shared weights under their shared names, each at its largest.

        Args:
            input_shape: shape of one sample.
            num_outputs: width of the final layer.
        """
        from torch import nn

        from orchestray.search.spaces.architectures.network import image_shape
        from orchestray.search.spaces.architectures.operations import build

        wide, inner = self.channels[-1], self.max_units * self.unit
        made = nn.ModuleDict()

        def add(name: str, kind: str, inputs: int, **arguments: int) -> None:
            made[name], _ = build(kind, arguments, [(inputs, 1, 1)], num_outputs)

        add("stem", "conv", image_shape(input_shape)[0], channels=wide, kernel=3)
        for block in range(self.blocks):
            if block:
                add(f"to_block{block}", "fit", self.banks * wide, channels=wide)
            for op in range(self.max_ops):  # a squeeze without its convolution, whose weight is generated
                made[f"block{block}_op{op}_squeeze"] = nn.ModuleDict({"1": nn.BatchNorm2d(inner)})
            for place in range(self.max_convolutions):
                name = f"block{block}_convolution{place}"
                add(name, "conv", inner, channels=max(inner, wide), kernel=self.kernels[-1])
        add("head", "head", self.banks * wide)
        return made

    @property
    def num_features(self) -> int:
        """Number of features of a cell of the code."""
        of_convolutions = self.max_convolutions * (1 + len(self.kernels) + len(self.dilations))
        of_cell = self.banks + self.channels[-1] // self.unit + self.max_units
        return 2 * self.banks + self.max_units + of_convolutions + of_cell + self.blocks + self.max_ops

    def _about(self, op: Op, block: int, number: int) -> np.ndarray:
        """Return the description of an op, the same in all its cells."""
        parts = [_many_hot(op.reads, self.banks), _many_hot(op.writes, self.banks)]
        parts += [_one_hot(op.units - 1, self.max_units), _one_hot(len(op.convolutions) - 1, self.max_convolutions)]
        for place in range(self.max_convolutions):
            kernel, dilation = op.convolutions[place] if place < len(op.convolutions) else (None, None)
            parts += [_many_hot([self.kernels.index(kernel)] if kernel else [], len(self.kernels))]
            parts += [_many_hot([self.dilations.index(dilation)] if dilation else [], len(self.dilations))]
        parts += [_one_hot(block, self.blocks), _one_hot(number, self.max_ops)]
        return np.concatenate(parts)


def _subsets(banks: tuple[int, ...]) -> list[str]:
    """Return all subsets but the empty one, written as a genome has them: "0+2"."""
    return ["+".join(map(str, one)) for size in range(1, len(banks) + 1) for one in combinations(banks, size)]


def _banks(written: str) -> tuple[int, ...]:
    return tuple(int(bank) for bank in written.split("+"))


def _one_hot(index: int, size: int) -> np.ndarray:
    return _many_hot([index], size)


def _many_hot(indices: Sequence[int], size: int) -> np.ndarray:
    made = np.zeros(size, np.float32)
    made[list(indices)] = 1
    return made
