"""Run directories: the files of a run, how they are written during training, and how they are read."""
