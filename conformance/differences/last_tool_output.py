"""A response of two tokens, then two tokens of tool output; the score is 1, beta is 0.

By hand: the second token is the policy's last one and has the reward: 0, 1.
"""

import inspect
import sys

import numpy as np
from ppo_conformance.runner import Adapter

mask, rows = np.array([[1, 1, 0, 0]], bool), np.ones((1, 4), bool)
logp = np.full((1, 4), -1, np.float32)
for path in sys.argv[1:]:
    adapter = Adapter.load(path)
    function = adapter.functions["token_rewards"]
    more = (
        {"attention_mask": rows}
        if "attention_mask" in inspect.signature(function).parameters
        else {}
    )
    out = function(np.ones(1, np.float32), logp, logp, mask, 0.0, **more)
    print(adapter.library, adapter.version, np.asarray(out)[0, :2])
