"""Models: loading, layout of rows, adapters, heads."""
