"""Engines that run replicas: actors of our own, or Ray Train."""
