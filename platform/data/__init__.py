"""The data plane: rows in Arrow, their order, and each replica's share of them as tensors."""
