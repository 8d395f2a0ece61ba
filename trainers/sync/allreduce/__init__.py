"""Exchanges that all-reduce gradients."""
