"""A machine in numbers: how fast it computes, copies, sends and writes, measured once and kept in a file."""
