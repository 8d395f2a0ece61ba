"""Methods and trials on Ray Tune."""
