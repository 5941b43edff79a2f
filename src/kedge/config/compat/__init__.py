"""Option names of other libraries and of older versions."""
