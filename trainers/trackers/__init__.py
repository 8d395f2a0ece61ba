"""Trackers of experiments, which are fed with the metrics of a run while it goes on."""
