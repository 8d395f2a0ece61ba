"""An endpoint as an application of Ray Serve."""
