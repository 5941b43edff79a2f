"""Small games of several turns, each with a scripted expert."""
