"""What comes before RL: supervised models, reward models, values, episodes of an expert."""
