"""Speed, utilization and memory on a GPU: python -m benchmarks.gpu."""
