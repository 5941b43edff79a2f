"""One word of probability e^-12 under the policy and e^-1 under the reference: k3 by hand.

q/p = e^11, so k3 = e^11 - 1 - 11 = 59862.1, and k1 = -11.
"""

import sys

import numpy as np
from ppo_conformance.runner import Adapter

for path in sys.argv[1:]:
    adapter = Adapter.load(path)
    for kind in ("k1", "k3"):
        args = (
            np.full((1, 1), -12, np.float32),
            np.full((1, 1), -1, np.float32),
            np.ones((1, 1), bool),
        )
        print(adapter.library, adapter.version, kind, float(adapter.functions["kl"](*args, kind)))
