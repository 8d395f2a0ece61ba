"""Refusal of requests before they are read, if more come than can be answered."""
