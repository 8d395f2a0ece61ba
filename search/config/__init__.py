"""The sections of a search config, and the rules between them."""
