"""The one loop: rollouts to experience to weight updates."""
