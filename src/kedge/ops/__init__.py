"""Tensor operations with backward passes of their own: log-probabilities, and CPU kernels."""
