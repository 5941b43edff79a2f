"""Tool output between two turns: what reaches the first turn from the reward of the second one.

Three tokens of the policy, an observation of two tokens, one token of the policy with reward 1.
V = 0 on the policy's tokens and 10 on the observation; gamma 1, lambda 0.9.  By hand: the fourth
token of the policy has A = 1, and each one before it 0.9 of the next: 0.729, 0.81, 0.9, 1.
"""

import inspect
import sys

import numpy as np
from ppo_conformance.runner import Adapter

mask = np.array([[1, 1, 1, 0, 0, 1]], bool)
rewards = np.array([[0, 0, 0, 0, 0, 1]], np.float32)
values = np.array([[0, 0, 0, 10, 10, 0]], np.float32)
for path in sys.argv[1:]:
    adapter = Adapter.load(path)
    function, args = adapter.functions["gae"], (rewards, values, mask, 1.0, 0.9)
    asks = "attention_mask" in inspect.signature(function).parameters
    more = {"attention_mask": mask | True} if asks else {}
    out = function(*args, np.zeros(1, np.float32), **more)
    print(adapter.library, adapter.version, np.asarray(out["advantages"])[mask].round(4))
