"""The current process: its signals, sockets, threads, working directory and garbage collector."""
