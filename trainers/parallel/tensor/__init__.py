"""Tensor parallelism: the layers of one network are split over a group of
workers, without changes to the model's code.
"""

from __future__ import annotations

if __name__ != "orchestray.trainers.parallel.tensor":
    raise ImportError(
        "import orchestray.trainers.parallel.tensor: under another name its modules would be loaded twice"
    )
