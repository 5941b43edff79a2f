"""Ray: engines, learners and reward workers as actors, wherever the cluster has room for them.

Nothing here imports Ray before it is used.
"""
