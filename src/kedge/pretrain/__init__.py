"""Training before RL: supervised, reward and value models."""
