"""Ray backend: learners, rollout engines, reward workers and the reference as actors.

launch        runs a job on every rank, with rollout engines, reward and reference workers
LaunchLimits  timeouts

Ray is only imported when it is used.
"""

from kedge.ext.ray.launch import LaunchLimits, launch

__all__ = ["LaunchLimits", "launch"]
