"""``python -m kedge``: the same as ``kedge``; what ``accelerate launch -m kedge ...`` runs."""

import sys

from kedge.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
