"""Trials that train shared weights for all networks of a space at once."""
