"""A response of one token with loss 4 and one of three tokens with loss 0: their mean over tokens.

By hand: 4 / 4 = 1, in one micro-batch or in two.  The mean of two means is (4 + 0) / 2 = 2.
"""

import sys

import numpy as np
from ppo_conformance.runner import Adapter

losses = np.array([[4, 0, 0], [0, 0, 0]], np.float32)
mask = np.array([[1, 0, 0], [1, 1, 1]], bool)
for path in sys.argv[1:]:
    adapter = Adapter.load(path)
    for cut in ([0, 0], [0, 1]):
        out = adapter.functions["aggregate"](losses, mask, np.array(cut), "token_mean", 3)
        print(adapter.library, adapter.version, "micro-batches", 1 + max(cut), float(out))
