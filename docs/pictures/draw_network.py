"""Draws docs/pictures/network.svg: `python docs/pictures/draw_network.py`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from orchestray.search.spaces.architectures.cell import Cell
from orchestray.search.spaces.drawing.draw import draw

space = Cell(nodes=3, reductions=0, channels=16)
genome = space.sample(np.random.default_rng(5))
picture = draw(space.graph(genome), "A network of one cell with three nodes", is_file=True)
Path(__file__).with_name("network.svg").write_text(picture + "\n", encoding="utf-8")
