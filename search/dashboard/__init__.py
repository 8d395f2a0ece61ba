"""The web page over runs and searches."""
