"""A small space of cells, each trained once: methods are compared in seconds against the known best."""
