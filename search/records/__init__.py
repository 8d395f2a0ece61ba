"""What a search leaves behind."""
