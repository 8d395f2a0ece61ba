"""The costs of a model and of a run of it, before they are paid."""
