"""The processes of servers and workers."""
