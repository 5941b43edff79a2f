"""Four scores that are 0.3 + 0.6 or 0.9, added in float32: equal on paper, one unit apart.

By hand the advantages are 0.  A deviation of 3e-8 with an epsilon of 1e-4 makes them 0.0005, with
1e-6 up to 0.06, with 1e-8 or less about 1.5.
"""

import sys

import numpy as np
from ppo_conformance.runner import Adapter

low, high = np.float32(0.3) + np.float32(0.6), np.float32(0.9)
scores = np.array([high, high, low, high], np.float32)
for path in sys.argv[1:]:
    adapter = Adapter.load(path)
    zero, ones = np.zeros(4, int), np.ones(4, bool)
    for size in (1, 1000):
        x = scores if size == 1 else np.array([1000.9] * 4, np.float32)
        x[2] = np.nextafter(x[0], np.float32(0))
        out = adapter.functions["group_normalize"](x, zero, ones, "group")
        print(adapter.library, adapter.version, size, np.asarray(out).round(5))
