"""Replicas of a model: in this process, or as Ray Serve deployments that take whole batches."""
