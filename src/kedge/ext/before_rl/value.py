"""Trains a value model on recorded rollouts, and evaluates it before PPO relies on it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kedge.checkpoint.replay import RolloutReplay
from kedge.math.advantage import rewards_to_go
from kedge.math.rewards import place_score
from kedge.math.turns import number_turns, turn_returns, turn_starts
from kedge.models.packing import pack
from kedge.models.value_head import ScalarModel
from kedge.records.errors import DataError
from kedge.records.seeds import seed_for
from kedge.records.types import Episodes, PromptBatch, RewardOutput, Rollout, Sample, number_prompts
from kedge.reporting.log import read_objects

_COMPLETIONS, _SCORES = ("completion", "response", "output"), ("score", "reward")
BINS = 10  # bins of positions and of predictions
ROWS = 16  # rows per forward pass


def read_episodes(
    sources: Sequence[str],
    tokenizer: Any,
    *,
    gamma: float = 1.0,
    credit: Literal["token", "turn"] = "token",
    scale_rewards: bool = False,
    longest: int | None = None,
) -> Sample:
    """Responses with their Monte Carlo returns as ``reward_output.token_rewards``.

        G_t = r_t + gamma G_{t+1} over the policy's tokens, or over turns, at their first tokens

    They are those of PPO with ``lam_value=1``, ``gamma`` and ``credit``, without what PPO adds to
    the score (KL penalty, overlong penalty).  ``scale_rewards`` divides them by the standard
    deviation of all scores.  Responses without a score are left out.

    Sources are folders written with ``save_rollouts``, or .jsonl files of any library, whose rows
    have ``prompt``, one of ``completion``, ``response``, ``output`` (the texts concatenated are the
    full one), and ``score`` or ``reward``; a row may have at most ``longest`` tokens.
    """
    recorded: list[tuple[Rollout, RewardOutput]] = []
    for source in sources:
        if not Path(source).is_dir():
            recorded.append(_read_rows(source, tokenizer, longest))
            continue
        names = {file.stem.partition("-rank-")[2] for file in Path(source).glob("step-*.json")}
        ranks = len(names) or 1
        for rank in range(ranks):
            replay = RolloutReplay(source, rank=rank, world_size=ranks)
            recorded += [replay.read(step) for step in replay.steps]
    scores = torch.cat([reward.scores[reward.valid] for _, reward in recorded])
    scale = float(scores.double().std()) if scale_rewards and len(scores) > 1 else 1.0
    episodes = Sample.cat([_with_returns(*one, gamma, credit, scale) for one in recorded])
    kept = episodes.rollout.loss_mask.any(1).nonzero()[:, 0]
    if not len(kept):
        raise DataError(f"none of the {len(episodes)} responses has a score")
    return episodes.rows(kept)


def _with_returns(
    rollout: Rollout, reward: RewardOutput, gamma: float, credit: str, scale: float
) -> Sample:
    reward = reward.divide(scale)
    mask = rollout.loss_mask & reward.valid[:, None]
    rewards = place_score(torch.where(reward.valid, reward.scores, 0.0), mask)
    if reward.token_rewards is not None:
        rewards = (rewards + reward.token_rewards * mask).float()
    turn = rollout.episodes.turn if rollout.episodes is not None else number_turns(mask)
    turn = torch.where(mask, turn, -1)
    if credit == "turn":
        mask, returns = turn_starts(turn), turn_returns(rewards, turn, gamma=gamma)
    else:
        returns = rewards_to_go(rewards, mask, gamma=gamma)
    episodes = Episodes(turn=turn, rewards=rewards, valid=reward.valid)
    kept = replace(rollout, loss_mask=mask, episodes=episodes)
    return Sample(
        rollout=replace(kept, behavior_logprobs=None, allowed_tokens=None),
        reward_output=RewardOutput(scores=reward.scores, valid=reward.valid, token_rewards=returns),
    )


def _read_rows(file: str, tokenizer: Any, longest: int | None) -> tuple[Rollout, RewardOutput]:
    prompts, responses, scores, ended = [], [], [], []
    for number, row in enumerate(read_objects(Path(file)), 1):
        prompt, finished = row.get("prompt"), row.get("finished", True)
        completion = next((row[n] for n in _COMPLETIONS if row.get(n) is not None), None)
        score = next((row[n] for n in _SCORES if row.get(n) is not None), None)
        texts = isinstance(prompt, str) and isinstance(completion, str) and prompt
        finite = isinstance(score, int | float) and abs(score) <= torch.finfo(torch.float32).max
        if not texts or score is None or not finite or not isinstance(finished, bool):
            raise DataError(
                f"{file}, row {number} must have prompt and {' or '.join(_COMPLETIONS)} (texts),"
                f" {' or '.join(_SCORES)} (a number in float32), and finished, if it is there, True"
                f" or False, got {str(row)[:80]}"
            )
        full = f"{prompt}{completion}".encode(errors="replace").decode()  # half surrogate pairs
        before, both = tokenizer(full[: len(str(prompt))]).input_ids, tokenizer(full).input_ids
        if longest is not None and len(both) >= longest:
            raise DataError(
                f"{file}, row {number} has {len(both)} tokens, but the model reads {longest} at"
                " most; cut it off or leave it out"
            )
        pairs = enumerate(zip(before, both, strict=False))
        start = next((i for i, (a, b) in pairs if a != b), min(len(before), len(both)))
        end = [tokenizer.eos_token_id] if finished and tokenizer.eos_token_id is not None else []
        if response := both[start:] + end:
            prompts.append(both[:start])
            responses.append(response)
            scores.append(float(score))
            ended.append(finished)
    if not scores:
        raise DataError(f"{file} has no rows with a response")
    ids, mask = _pad(responses, "right")
    prompt_ids, prompt_mask = _pad(prompts, "left")
    numbers = torch.arange(len(scores))
    rollout = Rollout(
        prompts=PromptBatch(ids=prompt_ids, mask=prompt_mask, group=numbers, row=numbers),
        ids=ids,
        loss_mask=mask,
        response_mask=mask,
        terminated=torch.tensor(ended, dtype=torch.bool),
        policy_version=torch.full((len(scores),), -1),
    )
    valid = torch.ones(len(scores), dtype=torch.bool)
    return rollout, RewardOutput(scores=torch.tensor(scores), valid=valid)


def _pad(rows: Sequence[Sequence[int]], side: Literal["left", "right"]) -> tuple[Tensor, Tensor]:
    """Pad token ids with 0; returns ids and mask, [B, L]."""
    pad = partial(nn.utils.rnn.pad_sequence, batch_first=True, padding_side=side)
    ids = [torch.tensor(row, dtype=torch.int64) for row in rows]
    return pad(ids), pad([torch.ones_like(row, dtype=torch.bool) for row in ids])


def split_prompts(episodes: Sample, held_out: float, seed: int) -> tuple[list[int], list[int]]:
    """Split response numbers into training and evaluation, by prompt if there are several."""
    number = number_prompts(episodes.rollout.prompts.ids, episodes.rollout.prompts.mask)
    if len(number.unique()) < 2:  # the tasks of an environment may all begin alike
        number = torch.arange(len(number))
    known = number.unique()
    if len(known) < 2:
        raise DataError("a single response cannot be split; record more responses")
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
    device = next(model.parameters()).device
    rows = rollout.prompts.ids, rollout.prompts.mask, rollout.ids, rollout.response_mask
    packed = pack(*rows, rollout.context_start)
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
            norm = nn.utils.clip_grad_norm_(weights, 1.0)
            if not math.isfinite(loss + float(norm)):
                largest = float(episodes.reward_output.scores.abs().max())
                raise DataError(
                    f"the value loss is {loss:g} and its gradient {float(norm):g}: scores up to"
                    f" {largest:.3g} are too large for a value model; use --scale_rewards"
                )
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()
            yield loss


@torch.no_grad()
def check_value(model: ScalarModel, episodes: Sample, index: Sequence[int]) -> dict[str, Any]:
    """Evaluate the value model on held-out responses.

    Explained variance is 1 - mean (G - V)^2 / Var(G) over the policy's tokens: 0 for the mean of
    the returns, negative if worse.  "length" predicts the mean return of responses of
    about that length, which no critic knows in advance.

    ``explained_variance`` and ``by_length`` are numbers; ``by_position`` (tenths of a response) and
    ``by_turn`` lists of (explained variance, tokens); ``calibration`` is a list of (mean V, mean G,
    tokens) by tenths of V; ``truncated_bias`` and ``terminated_bias`` are means of V - G.
    """
    columns: dict[str, list[Tensor]] = defaultdict(list)
    for rows in torch.tensor(index).split(ROWS):
        rollout, returns = _rows(episodes, rows)
        mask, played = rollout.loss_mask, rollout.episodes
        assert played is not None  # set by `read_episodes`
        lengths = mask.sum(1, keepdim=True)
        columns["v"].append(_predict(model, rollout).cpu())
        columns["g"].append(returns)
        columns["tenth"].append(((mask.cumsum(1) - 1) * BINS // lengths.clamp(min=1))[mask])
        columns["turn"].append(played.turn[mask])
        columns["length"].append(lengths.expand_as(mask)[mask])
        columns["end"].append(rollout.terminated[:, None].expand_as(mask)[mask])
    x = {name: torch.cat(parts) for name, parts in columns.items()}
    v, g, lengths, end = x["v"].double(), x["g"].double(), x["length"].double(), x["end"]
    ranks = torch.arange(1, BINS) * len(lengths) // BINS
    group = torch.bucketize(lengths, lengths.sort().values[ranks].unique())
    sums = torch.zeros(int(group.max()) + 1, dtype=g.dtype).index_add(0, group, g)
    mean_of_length = (sums / torch.bincount(group).clamp(min=1))[group]

    def explained_by(name: str, count: int) -> list[tuple[float | None, int]]:
        places = [x[name] == i for i in range(count)]
        return [(_explained(v[at], g[at]), int(at.sum())) for at in places]

    return {
        "explained_variance": _explained(v, g),
        "by_length": _explained(mean_of_length, g),
        "by_position": explained_by("tenth", BINS),
        "by_turn": explained_by("turn", int(x["turn"].max()) + 1),
        "calibration": [
            (float(v[part].mean()), float(g[part].mean()), len(part))
            for part in v.argsort().tensor_split(BINS)
            if len(part)
        ],
        "truncated_bias": float((v - g)[~end].mean()) if not end.all() else None,
        "terminated_bias": float((v - g)[end].mean()) if end.any() else None,
        "tokens": len(v),
        "responses": len(index),
    }


def _explained(v: Tensor, g: Tensor) -> float | None:
    spread = float(g.var(unbiased=False)) if len(g) > 1 else 0.0
    return 1 - float((g - v).square().mean()) / spread if spread > 0 else None
