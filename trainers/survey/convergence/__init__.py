"""Bounds and rates of stochastic gradient descent, measured."""
