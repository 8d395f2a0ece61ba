"""A space of one's own in a few lines: one or two towers of convolutions, whose results are added."""

from __future__ import annotations

from orchestray.search.spaces.architectures.choices import Choose, ComposedSpace
from orchestray.search.spaces.architectures.plan import INPUT, Draft, Plan


class Towers(ComposedSpace):
    """Towers of one or two layers; which choices come up depends on those made before."""

    def compose(self, choose: Choose) -> Plan:
        draft = Draft()
        towers = []
        for tower in range(choose("towers", [1, 2])):
            value = INPUT
            for layer in range(choose(f"depth{tower}", [1, 2])):
                kernel = choose(f"kernel{tower}.{layer}", [1, 3])
                channels = 8 if tower == 0 else choose(f"channels{tower}.{layer}", [4, 8])
                value = draft.step("conv", value, channels=channels, kernel=kernel)
            towers.append(draft.fit(value, channels=8, halvings=0, name=f"fit{tower}"))
        return draft.plan(draft.add(towers))
