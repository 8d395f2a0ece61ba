"""Evolution of architectures."""
