"""Exchanges whose replicas update their own models: averaging, elastic averaging, gossip, ensembles."""
