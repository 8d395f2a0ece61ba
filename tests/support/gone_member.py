"""A member of a gang that ends without a word, as one that the system kills for its memory does."""

from __future__ import annotations

import os
from typing import Any


def gone(_world: Any, _device: Any) -> None:
    os._exit(3)
