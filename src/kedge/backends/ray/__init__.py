"""Ray: engines, learners and reward workers as actors, wherever the cluster has room for them.

launch      a job on every rank, with engines and reward workers beside them
LaunchLimits      how long to wait

Nothing here imports Ray before it is used.
"""

from kedge.backends.ray.launch import LaunchLimits, launch

__all__ = ["LaunchLimits", "launch"]
