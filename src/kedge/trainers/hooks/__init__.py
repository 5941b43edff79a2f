"""What happens beside training: logging, warnings, evaluations, checkpoints."""
