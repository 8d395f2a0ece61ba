"""Exchanges that shard optimizer state, gradients or parameters over the replicas (ZeRO)."""
