"""Servers that agree by Paxos on which of them serves which shard, and a simulated network to try them on."""
