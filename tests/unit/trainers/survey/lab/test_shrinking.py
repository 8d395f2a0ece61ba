"""Networks that are small by design: sizes, times and accuracies of the table, beside those of plain convolutions."""

from __future__ import annotations

from typing import Any

import pytest

from orchestray.platform.run.tensor_file import pack
from orchestray.trainers.survey.lab import shrinking
from orchestray.trainers.tasks.small_networks import CONVOLUTIONS, SmallDigits


def test_each_network_has_its_size_time_and_accuracy_beside_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrinking, "_EPOCHS", 2)  # what they learn in more is a test of the networks
    exhibit = shrinking.small_networks(rounds=3)
    rows: dict[Any, dict[str, Any]] = {row[0]: dict(zip(exhibit.columns, row, strict=True)) for row in exhibit.rows}
    assert list(rows) == list(CONVOLUTIONS)
    for kind, row in rows.items():
        state = SmallDigits(kind).build_model().state_dict()
        assert row["file, bytes"] == len(pack(state))
        assert row["plain / size"] == rows["plain"]["file, bytes"] / row["file, bytes"]
        assert row["plain / time"] == rows["plain"]["32 images, ms"] / row["32 images, ms"] > 0
        assert row["points"] == 100 * (row["accuracy"] - rows["plain"]["accuracy"])
        assert row["accuracy"] > 0.15  # by chance a tenth is right
    assert rows["separable"]["plain / size"] > 4
    assert rows["tensor_train"]["plain / size"] > 4
    assert rows["plain"]["products an image"] > 4 * rows["separable"]["products an image"]
    # A tensor train composes the whole kernel: it has fewer weights, and as many products.
    assert rows["tensor_train"]["products an image"] == rows["plain"]["products an image"]
