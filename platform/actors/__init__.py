"""Gangs: actors that start together, meet, die and are replaced."""

if __name__ != "orchestray.platform.actors":
    raise ImportError("import orchestray.platform.actors: under another name its modules would be loaded twice")
