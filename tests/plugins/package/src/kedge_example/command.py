"""A command by name: ``kedge greet``."""

from kedge.cli.flags import Flags


def main(argv):
    """Say hello."""
    flags = Flags("kedge greet", "Says hello.")
    flags.add_argument("--name", default="world")
    print(f"hello {flags.parse_args(list(argv)).name}")
