"""Models divided over several processes, forward only."""
