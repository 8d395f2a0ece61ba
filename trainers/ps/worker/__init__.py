"""Workers under parameter servers."""
