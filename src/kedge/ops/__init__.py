"""Tensor operations with custom backward passes: log-probabilities and CPU kernels."""
