"""The states of trials: where they are kept and how they are found and moved."""
