"""Two responses, of one and of three tokens, on policy, with advantages 1 and -1.

By hand (GSPO, eq. 5): the mean over responses of -s A is (-1 + 1) / 2 = 0.  Over tokens it is
(-1 + 3) / 4 = 0.5.
"""

import sys

import numpy as np
from ppo_conformance.runner import Adapter

logp = np.full((2, 3), -1, np.float32)
mask = np.array([[1, 0, 0], [1, 1, 1]], bool)
for path in sys.argv[1:]:
    adapter = Adapter.load(path)
    args = logp, logp, np.array([1, -1], np.float32), mask, 0.2, 0.2
    print(adapter.library, adapter.version, float(adapter.functions["gspo"](*args)["loss"]))
