"""Methods for hyper-parameters."""
