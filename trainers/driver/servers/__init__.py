"""The driver of parameter-server runs."""
