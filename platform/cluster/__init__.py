"""The Ray cluster that a run works on."""

if __name__ != "orchestray.platform.cluster":
    raise ImportError("import orchestray.platform.cluster: under another name its modules would be loaded twice")
