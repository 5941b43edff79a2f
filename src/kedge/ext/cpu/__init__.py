"""CPU kernels, each with a plain PyTorch fallback.  KEDGE_CPU_KERNELS=0 turns them off."""
