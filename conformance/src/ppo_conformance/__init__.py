"""Check the arithmetic of any PPO for language models, and any reward function."""


class NotOffered(Exception):
    """Raised by an adapter's function where the library has no such option; the text says which."""
