"""Tests that need a CUDA device: make test-gpu."""
