"""The protocol of parameter servers: messages, assignments, the partition of parameters, settings."""
