"""The driver of a training run: starts workers, listens to them, replaces what dies, writes the run down."""

if __name__ != "orchestray.trainers.driver":
    raise ImportError("import orchestray.trainers.driver: under another name its modules would be loaded twice")
