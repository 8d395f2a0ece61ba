"""A task with layers of unlike cost, written as any user's task file: `benchmarks/train/uneven.py:Uneven`."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from harness.tasks import Mlp


class Uneven(Mlp):
    """A few wide layers, and many narrow ones before or after them."""

    def __init__(
        self,
        heavy: str = "first",
        num_heavy: int = 6,
        num_light: int = 18,
        wide: int = 1024,
        narrow: int = 64,
        num_samples: int = 4096,
    ) -> None:
        """Make the layers; `heavy` says where the wide ones are: "first" or "last"."""
        if heavy not in ("first", "last"):
            raise ValueError(f"heavy must be 'first' or 'last', got {heavy!r}")
        widths = [wide] * (num_heavy + 1) + [narrow] * num_light
        super().__init__(widths if heavy == "first" else widths[::-1], num_samples)

    def build_model(self) -> nn.Module:
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(self.widths):
            layers.append(nn.Sequential(nn.Linear(inputs, outputs), nn.ReLU()))
        return nn.Sequential(*layers, nn.Linear(self.widths[-1], self.num_classes))
