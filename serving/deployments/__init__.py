"""The processes of an endpoint: the HTTP front, the replicas, and how a running one is changed.

The front (`live`, `running`) is the command's own process: uvicorn and the one queue of each version. With
`replicas: 1` the model runs in it too, on a thread of its own. Measured for a POST answered at once, on two cores:
0.23 ms and 6,668 requests/s (32 connections) so; 0.52 ms and 2,440/s behind Ray Serve's HAProxy mode, whose ports and
files are one set a machine unless told otherwise; 5.9 ms and 304/s behind Serve's own proxy.

Other replicas (`ray_replicas`, `ray_replica`) are Ray Serve deployments: Serve places, restarts and scales them. Each
connects to the front (`pool`, `replica`, `wire`) and is given whole batches, a frame of raw tensors there and one back:
a replica that is killed is noticed as its connection ends, and its batch is run by another.

Where one process cannot take all requests (`http.fronts`), the fronts are Ray Serve deployments too (`fronts`,
`ray_front`), behind Serve's proxy, each with queues of its own. The command's process keeps the list of them
(`directory`); every replica connects to every front, and grants itself to the one whose oldest request has waited
longest (`shared_replica`).
"""
