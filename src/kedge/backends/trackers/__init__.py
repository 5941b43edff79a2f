"""Where metrics and tables go."""
