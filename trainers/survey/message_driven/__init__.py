"""Training driven by messages between the nodes of a network (AMPNet)."""
