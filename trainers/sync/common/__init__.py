"""Parts that several synchronous exchanges share."""
