"""Parallel and distributed training of PyTorch models on Ray: one model, every scheme."""

__version__ = "0.1.0"
