"""DistBelief: workers that are groups of processes."""
