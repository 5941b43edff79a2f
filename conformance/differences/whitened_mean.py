"""Whitened advantages of two responses of three tokens: is their mean 0?

By hand: 1, 1, 1, 2, 2, 2 have mean 1.5 and standard deviation 0.5477, so +-0.913 with mean 0.
"""

import sys

import numpy as np
from ppo_conformance.runner import Adapter

x = np.array([[1, 1, 1], [2, 2, 2]], np.float32)
for path in sys.argv[1:]:
    adapter = Adapter.load(path)
    out = np.asarray(adapter.functions["whiten"](x, x > 0, np.zeros(2, int), True))
    print(adapter.library, adapter.version, out.ravel().round(3), "mean", out.mean().round(3))
