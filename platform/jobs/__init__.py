"""Commands as jobs of a Ray cluster."""

if __name__ != "orchestray.platform.jobs":
    raise ImportError("import orchestray.platform.jobs: under another name its modules would be loaded twice")
