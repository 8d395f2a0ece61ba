"""Exchanges: the ways in which the replicas of a model agree on its parameters."""
