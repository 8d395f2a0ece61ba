"""Data: pyarrow tables and datasets become batches of tensors, in an order that depends on seed and epoch alone."""

if __name__ != "orchestray.platform.data":
    raise ImportError("import orchestray.platform.data: under another name its modules would be loaded twice")
