"""The driver of a training run: starts workers, collects what they report, replaces lost ones, and records the run."""

if __name__ != "orchestray.trainers.driver":
    raise ImportError("import orchestray.trainers.driver: under another name its modules would be loaded twice")
