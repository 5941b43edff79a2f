"""Memory and cost estimates."""
