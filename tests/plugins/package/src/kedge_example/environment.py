"""An environment by name: ``--environment doubling``."""


class Doubling:
    """The policy should double its response each turn; three turns."""

    def reset(self, *, seed, options):
        """Begin with one word."""
        self.turns = 0
        return f"w{3 + seed % 5}", {}

    def step(self, response):
        """Reward 1 for a response of at least as many tokens as turns."""
        self.turns += 1
        reward = float(len(response.ids) >= self.turns)
        return "again", reward, self.turns == 3, False, {"metrics": {"turns_seen": 1.0}}
