"""Spaces of architectures: genomes, plans, and the networks built from them."""
