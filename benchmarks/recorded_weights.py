"""Tokens sampled across weight updates, against the recorded weights of every policy version.

    python -m benchmarks.recorded_weights embedded vllm ray vllm_server

stories-head32 in flight at ``max_lag=4`` on each engine (``ray`` is vLLM in an actor, in two of
them).  A callback keeps the weights of every version.  The responses with the most versions are
computed again token by token, each token with the weights of its version after keys and values of
the earlier ones, and compared with the log-probabilities that were recorded while sampling; also
as if the whole response were of its newest version.  Prints a line for each engine.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from benchmarks.stories_on_ray import SHARED
from kedge import PPOConfig, PPOTrainer
from kedge.checkpoint.replay import RolloutReplay
from kedge.records.types import Rollout

MODEL = SHARED / "data" / "stories-head32"
VLLM = {"vllm_engine_args": {"max_num_seqs": 8}}
ENGINES: dict[str, dict[str, Any]] = {
    "embedded": {"rollout_engine": "embedded"},
    "vllm": {"rollout_engine": "vllm"} | VLLM,
    "ray": {"rollout_engine": "ray", "vllm_num_engines": 2} | VLLM,
    "vllm_server": {"rollout_engine": "vllm_server"} | VLLM,
}


class Weights(TrainerCallback):
    """The policy of each version."""

    def __init__(self) -> None:
        self.of: list[dict[str, torch.Tensor]] = []

    def on_step_begin(self, *_: Any, model: Any, **given: Any) -> None:
        """Keep them before training."""
        self.of.append({name: x.detach().clone() for name, x in model.state_dict().items()})


def the_number(completions: list[str], **_: Any) -> list[float]:
    """A reward that moves the policy."""
    return [text.count(" the") - 0.01 * len(text) for text in completions]


def run(engine: str) -> tuple[list[dict[str, torch.Tensor]], list[Rollout]]:
    """Weights by version, and the rollouts of twelve iterations."""
    with tempfile.TemporaryDirectory() as folder:
        return run_in(folder, engine)


def run_in(folder: str, engine: str) -> tuple[list[dict[str, torch.Tensor]], list[Rollout]]:
    """The same, with the run in a folder."""
    weights = Weights()
    options: dict[str, Any] = {
        "output_dir": folder,
        "save_rollouts": f"{folder}/rollouts",
        "per_device_train_batch_size": 8,
        "local_rollout_forward_batch_size": 8,
        "response_length": 160,
        "temperature": 1.0,
        "stop_token": "eos",
        "max_steps": 12,
        "learning_rate": 3e-3,
        "num_ppo_epochs": 2,
        "rollout_schedule": "as_completed",
        "in_flight_weight_updates": True,
        "max_lag": 4,
        "save_strategy": "no",
        "num_sample_generations": 0,
        "disable_tqdm": True,
    }
    prompts = (SHARED / "data" / "story-prompts" / "train.jsonl").read_text().splitlines()
    trainer = PPOTrainer(
        PPOConfig(**options | ENGINES[engine]),
        AutoTokenizer.from_pretrained(MODEL, padding_side="left"),
        AutoModelForCausalLM.from_pretrained(MODEL),
        reward_funcs=[the_number],
        train_dataset=[json.loads(line) for line in prompts],
        callbacks=[weights],
    )
    trainer.train()
    close = getattr(trainer.engine.rollout_engine, "close", None)
    if close is not None:
        close()
    replay = RolloutReplay(f"{folder}/rollouts")
    return weights.of, [replay.read(step)[0] for step in replay.steps]


@torch.no_grad()
def compare(weights: list[dict[str, torch.Tensor]], rollout: Rollout, row: int) -> Any:
    """Differences [R] of a response, by version and as if all of it were of the newest one."""
    size = int(rollout.response_mask[row].sum())
    prompt = rollout.prompts.ids[row][rollout.prompts.mask[row]][None]
    ids, versions = rollout.ids[row, :size], rollout.token_versions[row, :size].tolist()
    recorded = rollout.behavior_logprobs[row, :size]
    model = AutoModelForCausalLM.from_pretrained(MODEL).eval()
    found, cache, read = [], None, prompt
    for token, version in zip(ids, versions, strict=True):
        model.load_state_dict(weights[version])
        out = model(read, past_key_values=cache, use_cache=True)
        cache, read = out.past_key_values, token[None, None]
        found.append(out.logits[0, -1].log_softmax(-1)[token])
    newest = model(torch.cat([prompt, ids[None]], 1)).logits[0, prompt.shape[1] - 1 : -1]
    whole = newest.log_softmax(-1).gather(1, ids[:, None])[:, 0]
    return (torch.stack(found) - recorded).abs(), (whole - recorded).abs()


def check(engine: str, responses: int = 8) -> dict[str, Any]:
    """The worst differences of an engine, in nats."""
    weights, rollouts = run(engine)
    order = sorted(
        ((x, row) for x in rollouts for row in range(len(x))),
        key=lambda at: -len(at[0].token_versions[at[1]][at[0].loss_mask[at[1]]].unique()),
    )
    pairs = [(x, row, *compare(weights, x, row)) for x, row in order[:responses]]
    own, newest = (torch.cat([pair[n] for pair in pairs]) for n in (2, 3))
    return {
        "engine": engine,
        "responses": sum(len(x) for x in rollouts),
        "over several versions": sum(
            len(x.token_versions[row][x.loss_mask[row]].unique()) > 1 for x, row in order
        ),
        "compared": len(pairs),
        "most versions of one": len(order[0][0].token_versions[order[0][1]].unique()),
        "tokens": len(own),
        "largest difference": float(own.max()),
        "as if of the newest version": float(newest.max()),
    }


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(json.dumps(check(name)), flush=True)
