"""CPU kernels, each with a plain PyTorch fallback."""
