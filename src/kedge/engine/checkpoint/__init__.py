"""What a run writes to resume: checkpoints and recorded rollouts."""
