"""Training: the loop and everything it needs, from building a lap to saving checkpoints."""
