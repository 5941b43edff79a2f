"""Trains a value model on recorded rollouts, and measures what it knows before PPO relies on it."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kedge.checkpoint.replay import RolloutReplay
from kedge.errors import DataError
from kedge.loop.seeds import seed_for
from kedge.math.advantage import rewards_to_go
from kedge.math.rewards import place_score
from kedge.math.turns import number_turns
from kedge.models.packing import pack
from kedge.models.value_head import ScalarModel
from kedge.types import PromptBatch, RewardOutput, Rollout, Sample, number_prompts

_COMPLETIONS, _SCORES = ("completion", "response", "output"), ("score", "reward")
BINS = 10  # of positions and of predictions
ROWS = 16  # of one pass


def read_episodes(sources: Sequence[str], tokenizer: Any, *, gamma: float = 1.0) -> Sample:
    """Responses with their Monte Carlo returns as ``reward_output.token_rewards``.

        G_t = r_t + gamma G_{t+1} over the policy's tokens

    Args:
        sources: folders written with ``save_rollouts``, or .jsonl files of any library, whose rows
            have ``prompt``, one of ``completion``, ``response``, ``output`` (the texts
            concatenated are the full one), and ``score`` or ``reward``.
        tokenizer: of the value model, for texts.
        gamma: discount per token.

    Raises:
        DataError: a source that has neither.
    """
    samples: list[Sample] = []
    pairs: list[tuple[Rollout, RewardOutput]]
    for source in sources:
        if Path(source).is_dir():
            replays = _open(source)
            pairs = [replay.read(step) for replay in replays for step in replay.steps]
        else:
            pairs = [_read_rows(source, tokenizer)]
        samples += [_with_returns(rollout, reward, gamma) for rollout, reward in pairs]
    return Sample.cat(samples)


def _open(folder: str) -> list[RolloutReplay]:
    """The recording of each rank."""
    files = sorted(Path(folder).glob("step-*.json"))
    try:
        world_size = json.loads(files[0].read_text(encoding="utf-8"))["world_size"] if files else 1
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{files[0]} must be a recording of save_rollouts: {error}") from error
    return [RolloutReplay(folder, rank=r, world_size=world_size) for r in range(world_size)]


def _with_returns(rollout: Rollout, reward: RewardOutput, gamma: float) -> Sample:
    mask = rollout.loss_mask & reward.valid[:, None]
    rewards = place_score(torch.where(reward.valid, reward.scores, 0.0), mask)
    if reward.token_rewards is not None:
        rewards = rewards + reward.token_rewards * mask
    returns = rewards_to_go(rewards, mask, gamma=gamma)
    plain = RewardOutput(scores=reward.scores, valid=reward.valid, token_rewards=returns)
    return Sample(
        rollout=replace(rollout, loss_mask=mask, behavior_logprobs=None, allowed_tokens=None),
        reward_output=plain,
    )


def _read_rows(file: str, tokenizer: Any) -> tuple[Rollout, RewardOutput]:
    try:
        text = Path(file).read_text(encoding="utf-8")
        rows = [json.loads(line) for line in text.split("\n") if line.strip()]
    except (OSError, ValueError) as error:
        raise DataError(f"{file} must be a folder of save_rollouts or a .jsonl: {error}") from error
    prompts, responses, scores, ended = [], [], [], []
    for number, row in enumerate(rows):
        given = row if isinstance(row, dict) else {}
        prompt = given.get("prompt")
        completion = next((given[name] for name in _COMPLETIONS if name in given), None)
        score = next((given[name] for name in _SCORES if name in given), None)
        texts = isinstance(prompt, str) and isinstance(completion, str) and prompt and completion
        if not texts or not isinstance(score, int | float) or not math.isfinite(score):
            raise DataError(
                f"{file}, row {number}: it must have prompt and {' or '.join(_COMPLETIONS)} (texts)"
                f" and {' or '.join(_SCORES)} (a number), got {str(row)[:80]}"
            )
        before = tokenizer(row["prompt"]).input_ids
        both = tokenizer(row["prompt"] + completion).input_ids
        same = next((i for i, (a, b) in enumerate(zip(before, both, strict=False)) if a != b), None)
        start = min(len(before), len(both)) if same is None else same
        prompts.append(both[:start])
        ended.append(bool(row.get("finished", True)))
        end = [tokenizer.eos_token_id] if ended[-1] and tokenizer.eos_token_id is not None else []
        responses.append(both[start:] + end)
        scores.append(float(score))
    ids, mask = _pad(responses, left=False)
    prompt_ids, prompt_mask = _pad(prompts, left=True)
    numbers = torch.arange(len(rows))
    rollout = Rollout(
        prompts=PromptBatch(ids=prompt_ids, mask=prompt_mask, group=numbers, row=numbers),
        ids=ids,
        loss_mask=mask,
        response_mask=mask,
        terminated=torch.tensor(ended, dtype=torch.bool),
        version=torch.full((len(rows),), -1),
    )
    valid = torch.ones(len(rows), dtype=torch.bool)
    return rollout, RewardOutput(scores=torch.tensor(scores), valid=valid)


def _pad(rows: Sequence[Sequence[int]], *, left: bool) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows), default=1)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    mask = torch.zeros(len(rows), width, dtype=torch.bool)
    for i, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(len(row))
        ids[i, place], mask[i, place] = torch.tensor(row, dtype=torch.int64), True
    return ids, mask


def split(episodes: Sample, held_out: float, seed: int) -> tuple[list[int], list[int]]:
    """Numbers of the responses to train on and to measure with; they share no prompt.

    Raises:
        DataError: there is one prompt only.
    """
    prompts = episodes.rollout.prompts
    number = number_prompts(prompts.ids, prompts.mask)
    known = number.unique()
    if len(known) < 2:
        raise DataError(f"{len(number)} responses to {len(known)} prompt: some must be held out")
    generator = torch.Generator().manual_seed(seed_for(seed, "held out", 0))
    order = known[torch.randperm(len(known), generator=generator)]
    kept_out = torch.isin(number, order[: max(1, round(held_out * len(order)))])
    return (~kept_out).nonzero()[:, 0].tolist(), kept_out.nonzero()[:, 0].tolist()


def _rows(episodes: Sample, index: Tensor) -> tuple[Rollout, Tensor]:
    """Responses, and the returns of their tokens, flat [n]."""
    part = episodes.rows(index)
    returns = part.reward_output.token_rewards
    assert returns is not None
    return part.rollout, returns[part.rollout.loss_mask]


def _predict(model: ScalarModel, rollout: Rollout) -> Tensor:
    """V before each token of the policy, flat [n], with gradient."""
    prompts, device = rollout.prompts, next(model.parameters()).device
    packed = pack(prompts.ids, prompts.mask, rollout.ids, rollout.response_mask)
    values: Tensor = model(packed.to(device), packed.states(rollout.loss_mask).to(device))
    return values


def fit_value(
    model: ScalarModel,
    episodes: Sample,
    index: Sequence[int],
    *,
    epochs: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
) -> Iterator[float]:
    """Train the value model: 0.5 (V - G)^2, a mean over the tokens of a batch; yields each loss.

    AdamW with a linear warmup over a tenth of the steps and a linear decay to 0; VC-PPO's value
    pretraining (arXiv:2503.01491).
    """
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=learning_rate, weight_decay=0.0)
    batches = -(-len(index) // batch_size)
    total = epochs * batches
    warm = max(1, total // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warm, (total - step) / max(1, total - warm))
    )
    generator = torch.Generator().manual_seed(seed_for(seed, "shuffle", 0))
    for _ in range(epochs):
        order = torch.tensor(index)[torch.randperm(len(index), generator=generator)]
        for batch in order.split(batch_size):
            count = max(1, int(episodes.rollout.loss_mask[batch].sum()))
            loss = 0.0
            for rows in batch.split(ROWS):
                rollout, target = _rows(episodes, rows)
                error = _predict(model, rollout) - target.to(weights[0].device)
                part = 0.5 * error.square().sum() / count
                part.backward()
                loss += float(part.detach())
            nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            yield loss


@torch.no_grad()
def check_value(model: ScalarModel, episodes: Sample, index: Sequence[int]) -> dict[str, Any]:
    """What the value model knows of held-out responses.

    Explained variance is 1 - mean (G - V)^2 / Var(G) over the policy's tokens: 0 for the mean of
    the returns, below 0 for less than that.  "length" predicts the mean return of responses of
    about that length, which no critic knows in advance.

    Returns:
        ``explained_variance`` and ``by_length``, numbers; ``by_position`` (tenths of a response)
        and ``by_turn``, lists of (explained variance, tokens); ``calibration``, a list of (mean V,
        mean G, tokens) by tenths of V; ``truncated_bias`` and ``terminated_bias``, means of V - G.
    """
    found: dict[str, list[Tensor]] = {n: [] for n in ("v", "g", "place", "turn", "long", "end")}
    for rows in torch.tensor(index).split(ROWS):
        rollout, returns = _rows(episodes, rows)
        mask = rollout.loss_mask
        turn = number_turns(mask) if rollout.episodes is None else rollout.episodes.turn
        lengths = mask.sum(1, keepdim=True)
        found["v"].append(_predict(model, rollout).cpu())
        found["g"].append(returns)
        found["place"].append(((mask.cumsum(1) - 1) * BINS // lengths.clamp(min=1))[mask])
        found["turn"].append(turn[mask])
        found["long"].append(lengths.expand_as(mask)[mask])
        found["end"].append(rollout.terminated[:, None].expand_as(mask)[mask])
    x = {name: torch.cat(parts) for name, parts in found.items()}
    v, g = x["v"].double(), x["g"].double()
    lengths = x["long"].double()
    ranks = torch.arange(1, BINS) * len(lengths) // BINS
    edges = lengths.sort().values[ranks].unique()
    mean_of = _means(g, torch.bucketize(lengths, edges))
    order = v.argsort()
    return {
        "explained_variance": _explained(v, g),
        "by_length": _explained(mean_of, g),
        "by_position": [
            (_explained(v[at], g[at]), int(at.sum())) for at in map(x["place"].eq, range(BINS))
        ],
        "by_turn": [
            (_explained(v[at], g[at]), int(at.sum()))
            for at in map(x["turn"].eq, range(int(x["turn"].max()) + 1))
        ],
        "calibration": [
            (float(v[part].mean()), float(g[part].mean()), len(part))
            for part in order.tensor_split(BINS)
            if len(part)
        ],
        "truncated_bias": _bias(v - g, ~x["end"]),
        "terminated_bias": _bias(v - g, x["end"]),
        "tokens": len(v),
        "responses": len(index),
    }


def _explained(v: Tensor, g: Tensor) -> float | None:
    spread = float(g.var(unbiased=False)) if len(g) > 1 else 0.0
    return 1 - float((g - v).square().mean()) / spread if spread > 0 else None


def _means(x: Tensor, group: Tensor) -> Tensor:
    sums = torch.zeros(int(group.max()) + 1, dtype=x.dtype).index_add(0, group, x)
    return (sums / torch.bincount(group).clamp(min=1))[group]


def _bias(error: Tensor, where: Tensor) -> float | None:
    return float(error[where].mean()) if where.any() else None


def worst_tokens(
    model: ScalarModel, episodes: Sample, index: Sequence[int], tokenizer: Any, count: int = 5
) -> list[dict[str, Any]]:
    """The responses' tokens with the largest error: text before it, token, V and G."""
    worst: list[tuple[float, dict[str, Any]]] = []
    for row in torch.tensor(index).split(1):
        rollout, returns = _rows(episodes, row)
        if not len(returns):
            continue
        with torch.no_grad():
            values = _predict(model, rollout).cpu()
        at = int((values - returns).abs().argmax())
        slot = int(rollout.loss_mask[0].nonzero()[at, 0])
        ids = rollout.ids[0].tolist()
        about = {
            "before": tokenizer.decode(ids[max(0, slot - 12) : slot]),
            "token": tokenizer.decode(ids[slot : slot + 1]),
            "value": round(float(values[at]), 4),
            "return": round(float(returns[at]), 4),
        }
        worst.append((abs(about["value"] - about["return"]), about))
    return [about for _, about in sorted(worst, key=lambda pair: -pair[0])[:count]]
