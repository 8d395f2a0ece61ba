"""What one trial does: a training run in parts, whose state can be handed to another."""
