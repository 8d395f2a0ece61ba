"""The search methods as Ray Tune searchers and schedulers, for a user's own `tune.Tuner`."""
