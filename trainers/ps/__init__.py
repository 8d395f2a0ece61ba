"""Centralised training: servers hold the parameters, workers push gradients to them and pull parameters from them."""
