"""open_instruct."""
