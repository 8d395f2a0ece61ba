"""Training of networks whose layers compute with few bits: weights, inputs and gradients are quantized in each pass."""
