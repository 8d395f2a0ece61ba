"""One worker of a training run: its loop, and what the loop needs. Imports no Ray."""

if __name__ != "orchestray.trainers.replica":
    raise ImportError("import orchestray.trainers.replica: under another name its modules would be loaded twice")
