"""The web page that shows runs and searches."""
