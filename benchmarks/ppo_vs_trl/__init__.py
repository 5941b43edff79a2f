"""Whole PPO updates: Kedge and TRL 1.12, side by side."""
