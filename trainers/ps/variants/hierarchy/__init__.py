"""Leaf servers between workers and shards (Rudra, Gaia)."""
