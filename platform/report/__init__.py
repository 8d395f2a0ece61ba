"""Reading of finished runs: the contents of a run directory, timelines and pictures."""
