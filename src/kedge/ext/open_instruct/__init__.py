"""Asynchronous PPO under the names of open-instruct."""
