"""The event loop and the threads of an endpoint."""
