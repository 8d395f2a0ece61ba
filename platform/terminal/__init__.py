"""Terminal output: live displays, plain lines, tables, plots and readable numbers."""
