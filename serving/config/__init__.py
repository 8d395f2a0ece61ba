"""The config of an endpoint: its models, its address, and its batching."""
