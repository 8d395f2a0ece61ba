"""Parallel and distributed training of PyTorch models on Ray: one model, every scheme.

>>> import orchestray
>>> run = orchestray.train("configs/train/digits.yaml", overrides=["train.epochs=3"])  # doctest: +SKIP
>>> run.result["final"]["validation"]["accuracy"]  # doctest: +SKIP
0.96
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestray.moved import install as _find_moved_modules

if TYPE_CHECKING:
    from orchestray.platform.data.by_length import ByLength
    from orchestray.platform.data.endless import Endless
    from orchestray.platform.data.images import decode_images, image_folder
    from orchestray.platform.data.in_order import InOrder
    from orchestray.platform.data.mix import Mix
    from orchestray.platform.data.ragged import pad_lists
    from orchestray.platform.data.source import Streamed
    from orchestray.platform.data.tensors import stack_columns, to_tensor
    from orchestray.search.api import search
    from orchestray.search.results.run import SearchRun, load_search
    from orchestray.serving.api import serve
    from orchestray.trainers.driver.compressed_run import compress
    from orchestray.trainers.driver.training import train
    from orchestray.trainers.planning.plan import plan
    from orchestray.trainers.saved.run import Run, load_run

_find_moved_modules()

__version__ = "0.2.0"
__all__ = [
    "ByLength",
    "Endless",
    "InOrder",
    "Mix",
    "Run",
    "SearchRun",
    "Streamed",
    "__version__",
    "compress",
    "decode_images",
    "image_folder",
    "load_run",
    "load_search",
    "pad_lists",
    "plan",
    "search",
    "serve",
    "stack_columns",
    "to_tensor",
    "train",
]

_HOMES = {
    "ByLength": "orchestray.platform.data.by_length",
    "Endless": "orchestray.platform.data.endless",
    "InOrder": "orchestray.platform.data.in_order",
    "Mix": "orchestray.platform.data.mix",
    "Run": "orchestray.trainers.saved.run",
    "SearchRun": "orchestray.search.results.run",
    "Streamed": "orchestray.platform.data.source",
    "compress": "orchestray.trainers.driver.compressed_run",
    "decode_images": "orchestray.platform.data.images",
    "image_folder": "orchestray.platform.data.images",
    "load_run": "orchestray.trainers.saved.run",
    "load_search": "orchestray.search.results.run",
    "pad_lists": "orchestray.platform.data.ragged",
    "plan": "orchestray.trainers.planning.plan",
    "search": "orchestray.search",
    "serve": "orchestray.serving.api",
    "stack_columns": "orchestray.platform.data.tensors",
    "to_tensor": "orchestray.platform.data.tensors",
    "train": "orchestray.trainers.driver.training",
}


def __getattr__(name: str) -> Any:
    """Load a public name when it is first asked for: importing the package stays quick."""
    if name not in _HOMES:
        raise AttributeError(f"module 'orchestray' has no attribute {name!r}")
    from importlib import import_module

    home = import_module(_HOMES[name])
    # A package that can be called is itself what is asked for: so it is one thing, whatever was imported before.
    return home if _HOMES[name] == f"orchestray.{name}" else getattr(home, name)
