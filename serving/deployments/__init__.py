"""The processes of an endpoint: the HTTP front, the replicas, and how a running one is changed."""
