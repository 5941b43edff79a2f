"""Models with a value head, references and reward adapters for the step API."""
