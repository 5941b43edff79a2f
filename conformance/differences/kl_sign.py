"""Three words, p = (0.7, 0.2, 0.1), q = (0.4, 0.4, 0.2): E_p of an estimator against KL(p || q).

By hand: KL = 0.7 ln 1.75 + 0.2 ln 0.5 + 0.1 ln 0.5 = 0.1838.  k1 and k3 have this mean.
"""

import sys

import numpy as np
from ppo_conformance import NotOffered
from ppo_conformance.runner import Adapter

p, q = np.array([0.7, 0.2, 0.1], np.float32), np.array([0.4, 0.4, 0.2], np.float32)
print("KL(p || q)", float((p * np.log(p / q)).sum()))
for path in sys.argv[1:]:
    adapter = Adapter.load(path)
    for kind in ("k1", "k2", "k3"):
        try:
            each = adapter.functions["kl"](
                np.log(p)[None], np.log(q)[None], np.ones((1, 3), bool), kind
            )
        except NotOffered:
            continue
        print(adapter.library, adapter.version, kind, float((p * np.asarray(each)[0]).sum()))
