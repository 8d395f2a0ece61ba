"""Exhibits of the survey that no training run uses."""
