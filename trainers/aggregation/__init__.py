"""Aggregation of the gradients of several workers into one."""
