"""Formulas: pure functions of tensors that import only torch."""
