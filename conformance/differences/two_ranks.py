"""Two processes with the values (1, 3) and (11, 13): whitened together and apart.

By hand: mean 7, squares 36 + 16 + 16 + 36 = 104, deviation (104 / 3)^0.5 = 5.888: -1.019, -0.679,
0.679, 1.019.  Every process by itself gives -0.707, 0.707 twice.
"""

import sys

import numpy as np
from ppo_conformance.runner import Adapter

x = np.array([[1, 3], [11, 13]], np.float32)
for path in sys.argv[1:]:
    adapter = Adapter.load(path)
    out = adapter.functions["whiten"](x, np.ones((2, 2), bool), np.array([0, 1]), True)
    print(adapter.library, adapter.version, np.asarray(out).ravel().round(4))
