"""The network structure codes of BlockQNN: a block of layers, each given by its kind, its kernel and what feeds it.

Zhong et al., "Practical Block-wise Neural Network Architecture Generation" (CVPR 2018), table 1. Layer 0 is the block's
input. Outputs that no layer of the block takes are concatenated, and the block is stacked with pooling between.
"""

from __future__ import annotations

from orchestray.search.spaces.architectures.choices import Choose, ComposedSpace
from orchestray.search.spaces.architectures.plan import INPUT, Draft, Plan

KERNELS = {"convolution": (1, 3, 5), "max_pool": (3,), "average_pool": (3,), "identity": (), "add": (), "concat": ()}
"""Kinds of layers, with the kernels that each may have."""

_Code = tuple[str, int, int, int]
"""Kind of a layer, its kernel or 0, and the layers before it that feed it; 0 for the second where there is but one."""


class Blocks(ComposedSpace):
    """Blocks of at most `most_layers` layers, stacked `blocks` times."""

    def __init__(self, most_layers: int = 4, blocks: int = 2, channels: int = 8) -> None:
        self.most_layers, self.blocks, self.channels = most_layers, blocks, channels

    def compose(self, choose: Choose) -> Plan:
        return self._stacked(self._codes(choose))

    def answer(self, choose: Choose) -> list[_Code]:
        return self._codes(choose)

    def _codes(self, choose: Choose) -> list[_Code]:
        codes: list[_Code] = []
        for layer in range(1, self.most_layers + 1):
            kind = choose(f"{layer}.kind", [*KERNELS, "terminal"] if layer > 1 else ["convolution", "max_pool"])
            if kind == "terminal":
                break
            kernel = choose(f"{layer}.kernel", list(KERNELS[kind])) if len(KERNELS[kind]) > 1 else 0
            first = choose(f"{layer}.first", list(range(layer)))
            second = choose(f"{layer}.second", list(range(layer))) if kind in ("add", "concat") else 0
            codes.append((kind, kernel, first, second))
        return codes

    def _stacked(self, codes: list[_Code]) -> Plan:
        draft = Draft()
        value = draft.step("conv", INPUT, name="stem", channels=self.channels, kernel=3)
        for block in range(self.blocks):
            if block:
                value = draft.step("max_pool", value, kernel=3, stride=2)
            value = self._block(draft, codes, value, f"block{block}")
        return draft.plan(value)

    def _block(self, draft: Draft, codes: list[_Code], value: int, name: str) -> int:
        values, taken = [value], set[int]()
        for layer, (kind, kernel, first, second) in enumerate(codes, 1):
            step, fed = f"{name}_{layer}", values[first]
            taken |= {first, second} if kind in ("add", "concat") else {first}
            if kind == "convolution":
                made = draft.step("conv", fed, name=step, channels=self.channels, kernel=kernel)
            elif kind in ("max_pool", "average_pool"):
                made = draft.step(kind, fed, name=step, kernel=KERNELS[kind][0])
            elif kind == "add":
                made = draft.add([fed, values[second]], name=step) if first != second else fed
            elif kind == "concat":
                joined = draft.concat([fed, values[second]], name=step) if first != second else fed
                made = draft.fit(joined, self.channels, draft.forms[fed].halvings, f"{step}_fit")
            else:
                made = fed
            values.append(made)
        left = [values[layer] for layer in range(1, len(values)) if layer not in taken]
        out = draft.concat(list(dict.fromkeys(left)), name=f"{name}_out")
        return draft.fit(out, self.channels, draft.forms[out].halvings, f"{name}_fit")
