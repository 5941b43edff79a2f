"""Faster products on CPUs: oneDNN, packed weights, native bfloat16."""
