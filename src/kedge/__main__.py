"""``python -m kedge``, the same as ``kedge``; also for ``accelerate launch -m kedge ...``."""

import sys

from kedge.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
