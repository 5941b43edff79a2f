"""Models with a value head, references and reward adapters of the step API."""
