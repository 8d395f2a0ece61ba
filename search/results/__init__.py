"""The records, figures and report of a search."""
