"""The learner: forward passes, log-probabilities, optimizer, state, sharding."""
