"""Solvers: methods that choose a step from values and derivatives of the loss at more than one place."""
