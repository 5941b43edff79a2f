"""Formulas: functions of tensors that import nothing but torch."""
