"""The decisions of a driver, and its record of losses. Imports no torch."""
