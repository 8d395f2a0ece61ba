"""Spaces small enough to be walked, and large ones to be drawn from."""

from __future__ import annotations

from typing import Any

SPACES: dict[str, tuple[str, dict[str, Any]]] = {
    "chain": ("chain", {}),
    "chain with skips": ("chain", {"skips": True, "strides": [1, 2], "max_depth": 8, "max_halvings": 3}),
    "chain of features": ("chain", {"layers": ["dense", "dropout"], "min_depth": 0, "max_dense": 4}),
    "cell": ("cell", {"channels": 4}),
    "cell of one stack": ("cell", {"nodes": 2, "operations": ["identity", "conv_3x3"], "reductions": 0, "channels": 4}),
    "cell with pools": ("cell", {"nodes": 3, "cells": 2, "reduction": "pool", "reductions": 2, "channels": 4}),
    "cell, reduced alike": ("cell", {"nodes": 3, "reduction": "same", "channels": 4}),
    "genetic": ("genetic", {"channels": [4, 4, 8]}),
    "hierarchical": ("hierarchical", {"channels": 4, "motifs": [3], "nodes": [3, 4]}),
    "hierarchical of four levels": (
        "hierarchical",
        {"channels": 4, "motifs": [2, 2], "nodes": [3, 2, 3], "reductions": 0},
    ),
    "memory_bank": ("memory_bank", {"channels": [2, 4], "unit": 2}),
    "modules": ("modules", {"channels": [4, 8]}),
}
"""Name and arguments of spaces to draw from, each a program of choices."""

GROWING: dict[str, tuple[str, dict[str, Any]]] = {
    "layer_graph": ("layer_graph", {"first_channels": 2, "max_channels": 8}),
    "layer_graph of one layer": ("layer_graph", {"first_channels": 2, "max_layers": 1, "start_mutations": 2}),
    "topology": ("topology", {"inputs": 6, "outputs": 3, "activations": ["sigmoid", "relu"]}),
    "painted": ("painted", {}),
}
"""Those whose genomes grow by mutations of their own."""

ENUMERATED: dict[str, tuple[str, dict[str, Any]]] = {
    "chain": ("chain", {"max_depth": 2, "channels": [4], "kernels": [1], "widths": [4], "rates": [0.5]}),
    "chain with skips": (
        "chain",
        {"layers": ["conv"], "skips": True, "min_depth": 2, "max_depth": 3, "channels": [4, 8], "kernels": [1]},
    ),
    "cell": ("cell", {"nodes": 2, "operations": ["identity", "conv_1x1"], "reductions": 0, "channels": 4}),
    "cells of one node": ("cell", {"nodes": 1, "operations": ["identity", "max_3x3"], "channels": 4}),
    "genetic": ("genetic", {"nodes": [4, 2], "channels": [4, 4]}),
    "hierarchical": (
        "hierarchical",
        {"operations": ["conv_1x1", "identity"], "motifs": [1], "nodes": [3, 2], "reductions": 0, "channels": 4},
    ),
    "memory_bank": (
        "memory_bank",
        {"blocks": 1, "banks": 2, "channels": [2, 4], "unit": 2, "max_ops": 2, "max_units": 1, "max_convolutions": 1}
        | {"kernels": [3], "dilations": [1]},
    ),
    "modules": (
        "modules",
        {
            "num_modules": 1,
            "max_nodes": 2,
            "max_layers": 2,
            "channels": [4],
            "kernels": [1],
            "rates": [0.0],
            "max_halvings": 1,
        },
    ),
}
"""Name and arguments of spaces of some hundreds of genomes at most."""
