"""The text of a network of single nodes that a person reads."""

from __future__ import annotations

from orchestray.search.spaces.architectures.topology import Topology


def test_a_topology_is_told_by_its_hidden_nodes_and_the_connections_that_are_on() -> None:
    connections = [[0, 0, 3, 0.5, True], [1, 1, 3, 0.5, False], [2, 1, 4, 1.0, True], [3, 4, 3, 0.5, True]]
    assert Topology(inputs=2, outputs=1).text({"nodes": [[4, "sigmoid"]], "connections": connections}) == (
        "1 hidden nodes, 3 connections"
    )
