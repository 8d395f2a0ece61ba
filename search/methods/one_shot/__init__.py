"""Methods whose candidates share one set of weights."""
