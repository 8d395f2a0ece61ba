"""An endpoint as an application of Ray Serve.

The ingress is one process: uvicorn and the one queue of each version. With `replicas: 1` the model runs in it too, on a
thread of its own. Other replicas are deployments, which the ingress calls by their handles, whole batches at a time:
Serve places, restarts and scales them, and its router picks one that has no batch.

Requests reach the ingress at a port of its own, through Serve's proxy, or by its handle.
"""
