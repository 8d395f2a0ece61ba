"""Trials that train weights for all networks of a space at once."""
