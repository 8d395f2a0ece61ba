"""Gangs: actors that start together, meet, die and are replaced."""

if __name__ != "orchestray.platform.gang":
    raise ImportError("import orchestray.platform.gang: under another name its modules would be loaded twice")
