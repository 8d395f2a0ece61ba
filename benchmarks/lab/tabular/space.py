"""The space whose cells the table holds."""

from __future__ import annotations

from orchestray.search.spaces.architectures.cell import Cell

OPERATIONS = ("identity", "conv_1x1", "conv_3x3", "average_3x3", "max_3x3")
NUM_NODES = 2
CHANNELS = 4


def table_cells() -> Cell:
    """Make the space of cells of 2 nodes and 5 operations, one on a stem of 4 channels, without reduction.

    Its 22,500 genomes build 2,450 different networks.
    """
    return Cell(nodes=NUM_NODES, operations=OPERATIONS, cells=1, channels=CHANNELS, reductions=0)
