"""The coordinator of a parameter-server run: which worker computes which share, and what has been applied."""
