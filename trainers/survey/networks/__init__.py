"""The networks of the survey's Table 5, to be built on any device, such as `meta`."""
