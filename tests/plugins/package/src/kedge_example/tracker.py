"""A tracker by name: ``--report_to listing``."""

from pathlib import Path


class Listing:
    """Writes the step and the score of each row of metrics to a file."""

    def __init__(self, args):
        self.file = Path(args.output_dir) / "listing.txt"

    def log(self, metrics, *, step):
        """Append a line."""
        if "objective/scores" in metrics:
            with self.file.open("a") as file:
                file.write(f"{step} {metrics['objective/scores']}\n")

    def table(self, name, rows, *, step):
        """Tables are left out."""

    def close(self):
        """Nothing is open."""
