"""Trained models made smaller: pruned, with shared values, with convolutions in factors."""
