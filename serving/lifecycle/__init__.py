"""The life of an endpoint's command: it starts an endpoint in this process or under Ray Serve, changes it, and ends."""
