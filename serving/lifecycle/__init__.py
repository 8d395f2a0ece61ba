"""The processes of an endpoint: the HTTP front, the replicas, and changes to a running endpoint.

The front (`endpoint`, `run`) is the command's own process: uvicorn and the one queue of each version. With `replicas:
1` the model runs in it too, on a thread of its own. Measured for a POST answered at once, on two cores: 0.23 ms and
6,668 requests/s (32 connections) in this form; 5.9 ms and 304/s behind Ray Serve's own proxy. Behind its HAProxy mode
it was 0.52 ms and 2,440/s; that mode's ports and files are shared by a machine unless configured.

Other replicas (`ray_replicas`, `ray_replica`) are Ray Serve deployments: Serve places, restarts and scales them. Each
connects to the front (`pool`, `replica`, `wire`) and gets whole batches, one frame of raw tensors each way. A replica
that is killed is noticed as its connection ends, and another runs its batch.

If one process cannot take all requests (`http.fronts`), the fronts are Ray Serve deployments too (`fronts`,
`ray_front`). They are behind Serve's proxy, each with queues of its own. The command's process keeps the list of them
(`directory`). Every replica connects to every front, and grants itself to the one whose oldest request has waited
longest (`shared_replica`).
"""
