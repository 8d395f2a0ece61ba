"""The loop of one worker of a training run, and its parts. Imports no Ray."""

if __name__ != "orchestray.trainers.loop":
    raise ImportError("import orchestray.trainers.loop: under another name its modules would be loaded twice")
