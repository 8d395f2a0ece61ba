"""Distributed SGD: optimizers, exchanges of parameters, the replica's loop."""

if __name__ != "orchestray.trainers":
    raise ImportError("import orchestray.trainers, not trainers: under the bare name its modules would be loaded twice")
