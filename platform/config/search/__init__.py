"""What a search config may hold."""
