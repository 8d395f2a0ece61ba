"""Run directories: what a training leaves behind, how it is written while training goes on, and how it is read back."""
