"""Searches in virtual time: the methods are asked, and nothing is trained."""
