"""Exchanges that send compressed gradients or parameters."""
