"""Trained runs read back: models, comparisons, averages of checkpoints, export."""
