"""Exchanges that combine all workers' gradients by a robust rule."""
