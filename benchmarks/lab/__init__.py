"""Tools that benchmarks and tests share: simulations in virtual time, theory, a table of trained networks."""
