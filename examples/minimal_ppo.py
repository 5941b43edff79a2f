"""PPO on one page: the task of `make demo`, written with the parts of the engine.

    make demo                         makes the models and prompts that this program starts from
    python examples/minimal_ppo.py    about two minutes on two CPU cores

A policy summarizes short posts.  A reward model scores every summary and a value model predicts the
score at every token.  Each iteration samples a batch of responses, turns their scores into
advantages and takes several optimizer steps.  `kedge.PPOTrainer` runs this same loop and adds
checkpoints, metrics, evaluation, several processes and the checks of a real run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    TrainingArguments,
)

from kedge.data.prompts import DatasetPrompts
from kedge.learner.learner import HFLearner
from kedge.learner.reference import FrozenModel
from kedge.learner.settings import LearnerSettings
from kedge.math.advantage import gae
from kedge.math.losses import clipped_policy_loss, clipped_value_loss
from kedge.math.masked import whiten
from kedge.math.rewards import place_score
from kedge.models.value_head import scalar_model
from kedge.records.types import Experience, Loss, MicroBatch, PolicyOutput, Sampling
from kedge.rewards.model import RewardModel
from kedge.rollout.embedded.engine import EmbeddedEngine

EPOCHS, MICRO_BATCH = 4, 16  # passes over a batch; rows of one forward and backward pass
KL_COEF, CLIP, VALUE_COEF, GAMMA, LAM = 0.1, 0.2, 0.1, 1.0, 0.95
MISSING_EOS_PENALTY = 1.0


def ppo_loss(new: PolicyOutput, batch: MicroBatch) -> Loss:
    """Clipped policy loss plus clipped value loss (arXiv:1707.06347), summed with token weights."""
    old = batch.rows
    ratio = ((new.logprobs - old.old_logprobs) * old.loss_mask).exp()
    policy = batch.token_weight * clipped_policy_loss(ratio, old.advantages, clip=CLIP)
    value = batch.value_weight * clipped_value_loss(
        new.values, old.old_values, old.returns, clip=CLIP
    )
    return Loss(parts={"policy": policy.sum(), "value": VALUE_COEF * value.sum()})


def micro_batches(rows: Experience) -> list[MicroBatch]:
    """One optimizer step in parts.  Every token has the same weight, fixed before the cut."""
    weight = rows.loss_mask / rows.loss_mask.sum()
    row_weight = torch.full((len(rows),), 1 / len(rows))
    return [
        MicroBatch(
            rows=rows.rows(part),
            token_weight=weight[part],
            value_weight=weight[part],
            row_weight=row_weight[part],
        )
        for part in torch.arange(len(rows)).split(MICRO_BATCH)
    ]


def main() -> None:
    """Train, and print one row per iteration."""
    flags = argparse.ArgumentParser(description="PPO from the parts of the engine")
    flags.add_argument("--demo", type=Path, default=Path("runs/demo"), help="folder of `make demo`")
    flags.add_argument("--output_dir", type=Path, default=Path("runs/minimal"))
    flags.add_argument("--iterations", type=int, default=30)
    flags.add_argument("--batch_size", type=int, default=64, help="responses of an iteration")
    args = flags.parse_args()
    sft, rm = args.demo / "sft", args.demo / "reward"

    # 1. Four models: the policy, a frozen copy as the reference, the reward, and the value that
    #    starts from the reward's weights.
    tokenizer = AutoTokenizer.from_pretrained(sft)
    policy = AutoModelForCausalLM.from_pretrained(sft)
    reference = FrozenModel(AutoModelForCausalLM.from_pretrained(sft))
    reward = RewardModel(AutoModelForSequenceClassification.from_pretrained(rm))
    value = scalar_model(AutoModelForSequenceClassification.from_pretrained(rm))

    # 2. What samples, what trains, and where prompts come from.
    sampling = Sampling(max_new_tokens=24, temperature=0.7, stop_ids=(tokenizer.eos_token_id,))
    engine = EmbeddedEngine(policy, pad_id=tokenizer.pad_token_id)
    learner = HFLearner(
        policy,
        TrainingArguments(output_dir=str(args.output_dir), learning_rate=5e-4, use_cpu=True),
        LearnerSettings(total_iterations=args.iterations, temperature=sampling.temperature),
        value=value,
        reference=reference,
    )
    posts = [json.loads(line) for line in (args.demo / "data/prompts.jsonl").open()]
    prompts = DatasetPrompts(posts, tokenizer, prompts_per_step=args.batch_size, seed=0)

    for iteration in range(args.iterations):
        # 3. Sample one response for each prompt and score it.
        rollout = engine.generate(prompts.batch(iteration), sampling=sampling, seed=iteration)
        mask = rollout.loss_mask  # bool [batch, response length]: tokens that the policy produced
        scores = reward.score(rollout).scores - MISSING_EOS_PENALTY * ~rollout.terminated

        # 4. Log-probabilities of policy and reference, and a value for every token.
        old = learner.compute_logprobs(rollout, values=True, reference=True, full_kl=False)

        # 5. Reward of a token: the KL penalty, and the score on the last token.  Advantages by GAE.
        kl = (old.logprobs - old.ref_logprobs) * mask
        rewards = place_score(scores, mask) - KL_COEF * kl
        advantages = gae(rewards, old.values, mask, gamma=GAMMA, lam=LAM)
        experience = Experience(
            prompt_ids=rollout.prompts.ids,
            prompt_mask=rollout.prompts.mask,
            ids=rollout.ids,
            loss_mask=mask,
            response_mask=rollout.response_mask,
            value_mask=mask,
            old_logprobs=old.logprobs,
            old_values=old.values,
            rewards=rewards,
            advantages=whiten(advantages, mask),
            returns=advantages + old.values,
        )

        # 6. One optimizer step per epoch, over all rows of the batch.
        for _ in range(EPOCHS):
            learner.optimizer_step(micro_batches(experience), ppo_loss)
        learner.advance_version()
        length = mask.sum(1).float().mean()
        print(
            f"iteration {iteration + 1:3d}/{args.iterations}  score {scores.mean():6.3f}"
            f"  kl {kl.sum(1).mean():6.3f}  length {length:5.1f}"
        )
    learner.save(args.output_dir, args.output_dir / "value_model")
    tokenizer.save_pretrained(args.output_dir)
    print(f"The trained policy is in {args.output_dir}.")


if __name__ == "__main__":
    main()
