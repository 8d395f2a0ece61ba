"""Rows that are used in their own order in each epoch, for models that remember what came before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from orchestray.platform.data.arranging import Arranging

if TYPE_CHECKING:
    from orchestray.platform.data.order import Indices
    from orchestray.platform.data.rows import Rows


@dataclass(frozen=True)
class InOrder:
    """A table whose rows are trained on in their order: row 0 first, in every epoch and with every seed."""

    table: pa.Table


class InOrderSource(Arranging):
    """A source of rows in the order of a table in memory, which is one window; see `InOrder`."""

    def arrange(self, rows: Rows, permutation: Indices) -> Indices:
        return np.arange(len(permutation))
