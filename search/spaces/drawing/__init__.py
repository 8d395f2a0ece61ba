"""Drawings of networks."""
