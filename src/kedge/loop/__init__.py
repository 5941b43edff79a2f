"""The training loop: rollouts, experience, optimizer steps."""
