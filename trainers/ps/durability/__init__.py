"""Parameter servers that survive: snapshots on disk, backup copies."""
