"""Simulation: a clock in virtual time, a simulated network, and programs that run in virtual time."""
