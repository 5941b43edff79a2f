"""A rollout engine by name: ``--rollout_engine script``."""

from kedge.config.rollout_engines import RolloutEngineSpec
from kedge.engine import EmbeddedEngine


class Counted:
    """Samples with the policy's modules and counts the batches."""

    shares_weights, logprob_kind, batches = True, "sampled", 0

    def __init__(self, engine):
        self.engine = engine

    def generate(self, prompts, *, sampling, seed):
        """One response per row."""
        type(self).batches += 1
        return self.engine.generate(prompts, sampling=sampling, seed=seed)

    def load_weights(self, weights, version):
        """Nothing to copy: it reads the policy itself."""
        return self.engine.load_weights(weights, version)


def build(inputs, args):
    """Build the engine of a run."""
    return Counted(EmbeddedEngine(inputs.policy, pad_id=inputs.pad_id, tokenizer=inputs.tokenizer))


SPEC = RolloutEngineSpec(build="kedge_example.engine:build", copies_weights=False)
