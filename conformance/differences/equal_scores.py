"""Two groups of eight responses: one with equal scores, one with scores 1 and 0.

By hand: the first group has advantage 0 whatever the score.  In float32 the sum of eight times 0.3
rounds, so the mean is not 0.3; the rest, divided by std + epsilon, is what is printed.
"""

import sys

import numpy as np
from ppo_conformance.runner import Adapter

for path in sys.argv[1:]:
    adapter = Adapter.load(path)
    for score in (0.3, 10.1, 1000.9):
        x = np.array([score] * 8 + [1, 0] * 4, np.float32)
        group, valid = np.repeat([0, 1], 8), np.ones(16, bool)
        out = np.asarray(adapter.functions["group_normalize"](x, group, valid, "group"))
        print(adapter.library, adapter.version, score, abs(out[:8]).max().round(4))
