"""The costs of a model, counted operation by operation: work, depth, bytes. It knows nothing of strategies."""
