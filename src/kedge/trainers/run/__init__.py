"""The run itself: training, evaluation, callbacks, checkpoints."""
