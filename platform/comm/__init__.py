"""Communication between processes: collectives, process groups, channels, all-reduce algorithms."""
