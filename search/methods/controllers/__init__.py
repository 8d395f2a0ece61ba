"""Methods that learn what to build: controllers and surrogates."""
