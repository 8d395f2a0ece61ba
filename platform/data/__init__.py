"""Data: tables and datasets of pyarrow become batches of tensors, in an order that seed and epoch alone decide."""

if __name__ != "orchestray.platform.data":
    raise ImportError("import orchestray.platform.data: under another name its modules would be loaded twice")
