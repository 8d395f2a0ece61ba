"""Serving of trained models over HTTP, on Ray Serve."""

if __name__ != "orchestray.serving":
    raise ImportError("import orchestray.serving, not serving: under the bare name its modules would be loaded twice")
