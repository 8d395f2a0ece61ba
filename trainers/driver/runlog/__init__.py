"""The log of a driver: metrics, events, kills, requests to scale, and the result."""
