"""One network for all chains: each child is in it, computes the same taken out, and shares what is the same."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from orchestray.platform.errors import ConfigError
from orchestray.search.registry.methods import make_method
from orchestray.search.spaces.architectures.chain import Chain

SMALL: dict[str, Any] = {"max_depth": 3, "channels": [4, 8], "kernels": [1, 3], "widths": [8], "rates": [0.5]}
SPACES: dict[str, dict[str, Any]] = {
    "images": SMALL,
    "strides": {**SMALL, "strides": [1, 2], "min_depth": 0},
    "features": {**SMALL, "layers": ["dense", "dropout"], "max_dense": 3},
}


@pytest.mark.parametrize("name", SPACES)
def test_every_child_computes_taken_out_what_it_computed_inside(name: str) -> None:
    space = Chain(**SPACES[name])
    net = space.supernet((64,), 5).eval()
    rng = np.random.default_rng(0)
    for _ in range(40):
        genome = space.sample(rng)
        child = space.build(genome, (64,), 5).eval()
        child.load_state_dict(net.child_state(genome))
        inputs = torch.randn(3, 64)
        torch.testing.assert_close(child(inputs), net(inputs, genome))


def test_chains_that_begin_alike_share_those_tensors_and_no_others() -> None:
    space = Chain(**SMALL)
    net = space.supernet((64,), 5)
    conv = {"kind": "conv", "channels": 8, "kernel": 3}
    a = space.genome_from([conv, {"kind": "conv", "channels": 4, "kernel": 1}])
    b = space.genome_from([conv, {"kind": "separable", "channels": 4, "kernel": 1}])
    of_a, of_b = net.child_modules(a), net.child_modules(b)
    common = of_a.keys() & of_b.keys()
    assert all(of_a[key] is of_b[key] for key in common)
    assert {key.split("_")[0] for key in common} == {"layer0", "global", "head"}
    net(torch.randn(2, 64), a).sum().backward()
    touched = {key for key, module in net.shared.items() if any(p.grad is not None for p in module.parameters())}
    assert touched == {key for key, module in of_a.items() if list(module.parameters())}


def test_chains_with_skips_share_nothing_and_say_so() -> None:
    with pytest.raises(ConfigError, match="skips"):
        Chain(skips=True).supernet((64,), 5)


def test_darts_has_no_edges_to_weigh_in_a_chain_and_says_so() -> None:
    with pytest.raises(ConfigError, match="take the space cell"):
        make_method("darts", space={}, architecture=Chain(**SMALL), trials=2, steps_per_trial=2)
