"""Servers of parameter shards."""
