"""Variants of parameter-server training."""
