"""The base of training: the protocols of networks and exchanges, the forward pass, random numbers, settings."""
