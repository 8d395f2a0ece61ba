"""A policy takes over what servers have learned, whatever options have occurred since."""

from __future__ import annotations

import torch

from orchestray.search.methods.controllers.policy import Policy, Vocabulary
from orchestray.search.methods.controllers.server import ParameterServer


def test_options_that_servers_have_no_room_for_yet_stay_as_they_begin() -> None:
    policy = Policy(Vocabulary(), hidden=3)
    server = ParameterServer(policy.parameters)
    policy.vocabulary.rows("first", range(10))
    policy.grow()
    server.push({name: torch.ones_like(tensor) for name, tensor in policy.parameters.items()}, [0], number=1)
    learned = server.fetch()
    policy.vocabulary.rows("second", range(100))  # more than the servers have room for
    policy.adopt(learned)
    untouched = Policy(policy.vocabulary, hidden=3).parameters
    for name, tensor in policy.parameters.items():
        moved = 11 if name.startswith("option.") else len(tensor)
        assert tensor.shape == untouched[name].shape
        assert torch.equal(tensor[moved:], untouched[name][moved:])
        assert not torch.isclose(tensor[:moved], untouched[name][:moved]).any()
