"""The public layer between a trainer and the internals; what it exports is stable.

Programs built from the parts of a trainer (``examples/minimal_ppo.py``) and custom algorithms
(``docs/own-algorithm.md``) only need to import from here and from ``kedge``.
"""

from kedge.algorithms import AdvantageInputs, Algorithm
from kedge.algorithms.base import (
    group_advantages,
    policy_metrics,
    policy_terms,
    reference_kl,
    shaped_rewards,
    uniform_rows,
)
from kedge.algorithms.transforms import (
    add_entropy,
    decouple_rewards,
    divide_by_length,
    divide_scores,
    drop_uniform_groups,
    mask_truncated,
    penalize_overlong,
    resample_uniform_groups,
    without_reference,
)
from kedge.data.prompts import DatasetPrompts
from kedge.learner.learner import HFLearner as Learner
from kedge.learner.reference import FrozenModel
from kedge.learner.settings import LearnerSettings
from kedge.loop.batch_sizes import BatchSizes, compute_batch_sizes
from kedge.loop.control import AdaptiveKL, FixedKL, StepControl, StepLimits
from kedge.loop.loop import Engine as Loop
from kedge.loop.stages import EpochPlan, make_experience, micro_batches, optimize
from kedge.loop.updater import Updater
from kedge.math.advantage import (
    gae,
    group_mean,
    group_normalize,
    leave_one_out,
    length_adaptive_lambda,
    rewards_to_go,
)
from kedge.math.losses import Clip, RatioMask, clipped_policy_loss, clipped_value_loss
from kedge.math.masked import masked_mean, whiten
from kedge.math.ratios import Correction, importance_weights
from kedge.math.rewards import overlong_penalty, place_score
from kedge.models.fingerprint import fingerprint
from kedge.models.value_head import scalar_model
from kedge.records.protocols import Hook, PromptSource, RewardSource, RolloutEngine
from kedge.records.types import (
    AdvantageOutput,
    Experience,
    Loss,
    MicroBatch,
    ModelOutputs,
    PolicyOutput,
    PromptBatch,
    Receipt,
    RewardOutput,
    Rollout,
    Sample,
    Sampling,
    StepReport,
)
from kedge.rewards.model import RewardModel
from kedge.rollout.embedded.engine import EmbeddedEngine

# Records.
__all__ = ["ModelOutputs", "PromptBatch", "RewardOutput", "Rollout", "Sample", "Sampling"]
__all__ += ["AdvantageInputs", "AdvantageOutput", "Experience", "MicroBatch", "PolicyOutput"]
__all__ += ["Loss", "Receipt"]
# What samples, scores and trains; and the loop.
__all__ += ["DatasetPrompts", "EmbeddedEngine", "FrozenModel", "Learner", "LearnerSettings"]
__all__ += ["PromptSource", "RewardModel", "RewardSource", "RolloutEngine", "fingerprint"]
__all__ += ["AdaptiveKL", "BatchSizes", "Correction", "EpochPlan", "FixedKL"]
__all__ += ["Hook", "Loop", "StepControl", "StepLimits", "StepReport", "Updater"]
__all__ += ["compute_batch_sizes", "make_experience", "micro_batches", "optimize", "scalar_model"]
# Algorithms: parts that they share, and transforms.
__all__ += ["Algorithm", "group_advantages", "policy_metrics", "policy_terms", "reference_kl"]
__all__ += ["add_entropy", "decouple_rewards", "divide_by_length", "divide_scores"]
__all__ += ["drop_uniform_groups", "mask_truncated", "penalize_overlong"]
__all__ += ["resample_uniform_groups", "shaped_rewards", "uniform_rows", "without_reference"]
# Formulas.
__all__ += ["Clip", "RatioMask", "clipped_policy_loss", "clipped_value_loss", "gae", "group_mean"]
__all__ += ["group_normalize", "importance_weights", "leave_one_out", "length_adaptive_lambda"]
__all__ += ["masked_mean", "overlong_penalty", "place_score", "rewards_to_go", "whiten"]
