"""Search over hyper-parameters and architectures, on Ray Tune."""

if __name__ != "orchestray.search":
    raise ImportError("import orchestray.search, not search: under the bare name its modules would be loaded twice")
