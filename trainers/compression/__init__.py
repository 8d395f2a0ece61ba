"""Compression of messages: float16, bfloat16, QSGD, TernGrad, one bit, top-k, thresholds, DGC, PowerSGD."""
