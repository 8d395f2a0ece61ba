"""Checks of a whole run before any process starts."""
