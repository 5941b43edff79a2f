"""``python -m ppo_conformance`` is the command ``conformance``."""

import sys

from ppo_conformance.cli import main

sys.exit(main())
