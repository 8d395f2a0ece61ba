"""Tuners that set an optimizer's own numbers while it trains."""
