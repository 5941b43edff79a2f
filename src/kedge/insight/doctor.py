"""Diagnoses a run: rules on its log that find problems and suggest what to try.

Each rule checks one thing and is skipped if the metrics it needs were not logged.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean, median

from kedge.insight.environment_rules import (
    format_never_valid,
    one_turn_rewarded,
    slow_environment,
    tool_never_called,
)
from kedge.insight.log import Finding, RunLog, responses, responses_per_batch, score_change

MIN_ROWS = 4  # minimum rows for a trend


Rule = Callable[[RunLog], Finding | None]


def examine(log: RunLog) -> list[Finding]:
    """Findings in the order of ``RULES``: causes before symptoms."""
    findings = (rule(log) for rule in RULES)
    return [finding for finding in findings if finding is not None]


def dead_reward(log: RunLog) -> Finding | None:
    """All responses get the same score."""
    spread = log.series("objective/scores_std")
    spread = spread[: max(1, len(spread) // 2)]  # later, all prompts may be solved
    if not spread or median(spread) > 1e-6:
        return None
    return Finding(
        "dead reward",
        f"all scores of a batch are equal (median deviation {median(spread):.2g}; mean score"
        f" {log.last('objective/scores') or 0:.3g})",
        "read completions with their rewards; usual causes: a verifier that never matches, a"
        " missing column, a reward model without a trained head",
    )


def dropped_rows(log: RunLog) -> Finding | None:
    """Many responses get no score."""
    dropped, batch = log.last("rollout/dropped_rows", 1.0), responses_per_batch(log)
    if dropped is None or batch is None or dropped / batch < 0.05:
        return None
    return Finding(
        "responses without a score",
        f"{dropped:.1f} of {batch:.0f} responses per batch are dropped",
        "the log shows the first failure; fix the reward function, or score failures with"
        ' on_reward_error="score"',
    )


def sampler_disagrees(log: RunLog) -> Finding | None:
    """Rollout engine and learner compute different log-probabilities."""
    gap = log.series("rollout/logprob_gap")
    if not gap or median(gap) < 0.02:
        return None
    return Finding(
        "sampler and learner disagree",
        f"log-probabilities differ by {median(gap):.3f} nats per token at equal weights",
        "check precision and temperature of the rollout engine and its weight sync, or set"
        ' sampler_correction="truncate"',
    )


def ratio_off(log: RunLog) -> Finding | None:
    """Policy updates are too large: the probability ratio is far from 1."""
    ratio = log.series("val/ratio")
    clipped = log.last("policy/clipfrac_avg", 1.0) or 0.0
    far = [r for r in ratio if not 0.8 <= r <= 1.25]
    if not ratio or (len(far) < 0.2 * len(ratio) and clipped < 0.4):
        return None
    worst = max(ratio, key=lambda r: abs(r - 1))
    return Finding(
        "updates are too large",
        f"the mean ratio is outside 0.8 to 1.25 in {len(far)} of {len(ratio)} rows (furthest"
        f" {worst:.3g}), {clipped:.0%} of tokens clipped",
        "lower learning_rate, num_ppo_epochs or cliprange, or increase the batch size",
    )


def standing_still(log: RunLog) -> Finding | None:
    """The policy does not move."""
    moved = log.series("policy/approxkl_avg")
    norms = [x for x in log.series("grad_norm/policy") if x > 0]
    if len(moved) < MIN_ROWS or not norms or max(moved) > 1e-7:
        return None
    start, end = log.first("policy/entropy_avg"), log.last("policy/entropy_avg")
    changed = start and end is not None and abs(end / start - 1) > 2e-3  # a single pass has no KL
    if changed or (log.last("objective/kl") or 0.0) > 1e-3 or dead_reward(log):
        return None
    return Finding(
        "the policy does not move",
        f"approximate KL per iteration at most {max(moved):.1g}, learning rate"
        f" {log.first('lr') or 0:.1g}",
        "raise learning_rate; check that the weights are trainable (adapter, frozen layers)",
    )


def kl_runs_away(log: RunLog) -> Finding | None:
    """The policy is far from the reference."""
    kl, length = log.last("objective/kl"), log.last("completions/mean_length")
    if kl is None or not length or kl / length < 0.5:
        return None
    return Finding(
        "the policy runs away from the reference",
        f"KL of {kl:.1f} nats per response, {kl / length:.2f} per token",
        "raise kl_coef, or adapt it (adaptive_kl=True, kl_target); read late completions: a score"
        " gained at such a KL is usually reward hacking",
    )


def kl_negative(log: RunLog) -> Finding | None:
    """The KL estimate is negative: responses are not sampled from the policy."""
    kl, length = log.last("objective/kl", 0.5), log.last("completions/mean_length")
    if kl is None or not length or kl > -0.02 * length:
        return None
    return Finding(
        "the KL is negative",
        f"{kl:.2f} nats per response over the second half",
        "responses are not sampled from the distribution that is trained; usual causes: greedy or"
        " truncated sampling, a penalty in the rollout engine, or another temperature",
    )


def entropy_collapses(log: RunLog) -> Finding | None:
    """The policy has become almost deterministic."""
    start, end = log.first("policy/entropy_avg"), log.last("policy/entropy_avg")
    if start is None or end is None or len(log.rows) < MIN_ROWS or start < 0.05:
        return None
    if end > 0.1 * start:
        return None
    return Finding(
        "entropy collapses",
        f"from {start:.2f} to {end:.3f} nats per token",
        "lower learning_rate, raise kl_coef, or clip higher above 1 (epsilon_high) so that rare"
        " tokens can gain probability; check for identical answers to all prompts",
    )


def value_explains_nothing(log: RunLog) -> Finding | None:
    """The value model does not predict returns."""
    known = log.series("val/explained_variance")
    if len(known) < MIN_ROWS:
        return None
    late = fmean(known[len(known) // 2 :])
    spread = log.series("objective/scores_std")
    solved = spread and fmean(spread[len(spread) // 2 :]) < 0.5 * (spread[0] or 0.0)
    if late > 0.05 or solved:  # equal scores leave little variance to explain
        return None
    return Finding(
        "the value explains nothing",
        f"explained variance {late:.2f} over the second half",
        "initialize it from the reward model (value_source), pretrain it (value_warmup_steps), or"
        " change value_learning_rate",
    )


def equal_groups(log: RunLog) -> Finding | None:
    """Most groups have no advantage signal."""
    share = log.first("objective/uniform_groups", 0.5)  # later, prompts may be solved
    if share is None or share < 0.6:
        return None
    return Finding(
        "groups of equal scores",
        f"{share:.0%} of responses are in a group with equal scores and have advantage 0",
        "choose prompts that are solved sometimes but not always, raise num_generations, or"
        " resample such groups (dynamic_sampling)",
    )


def length_hacking(log: RunLog) -> Finding | None:
    """The score rises with the response length."""
    lengths, scores = log.series("completions/mean_length"), log.series("objective/scores")
    if len(lengths) < 2 * MIN_ROWS or len(lengths) != len(scores):
        return None
    start, end = log.first("completions/mean_length"), log.last("completions/mean_length")
    if not start or not end or 2 / 3 < end / start < 1.5 or abs(end - start) < 3:
        return None
    together = _correlation(lengths, scores)
    if abs(together) < 0.8 or (log.last("objective/scores") or 0) <= (
        log.first("objective/scores") or 0
    ):
        return None
    return Finding(
        "the score follows the length",
        f"mean length {start:.0f} to {end:.0f} tokens, correlation with the score {together:+.2f}",
        "check that longer (or shorter) responses are better; if not, remove length from the"
        " reward, or add length_close_to or missing_eos_penalty",
    )


def nothing_ends(log: RunLog) -> Finding | None:
    """No response ends with a stop token."""
    cut, ended = log.series("completions/truncated_ratio"), sum(log.series("val/num_eos_tokens"))
    if not cut or min(cut) < 1.0 or ended or log.fixed_length:
        return None
    length = log.last("completions/max_length")
    limit = f" at {length:.0f} tokens" if length else ""
    return Finding(
        "nothing ends",
        f"all responses are truncated by the length limit{limit}",
        "start from a model that was trained to end its answers, raise the length limit, or set the"
        " stop token of the model (stop_token_id); stop_token=None declares fixed-length responses",
    )


def never_ends(log: RunLog) -> Finding | None:
    """Most responses are truncated."""
    share = log.last("completions/truncated_ratio", 0.5)
    ended = sum(log.series("val/num_eos_tokens"))
    if share is None or share < 0.98 or not ended:
        return None
    return Finding(
        "responses do not end",
        f"{share:.0%} are truncated by the length limit",
        "raise the length limit, or subtract missing_eos_penalty",
    )


def gradient_spikes(log: RunLog) -> Finding | None:
    """Some gradients are huge or not finite."""
    norms = log.series("grad_norm")
    skipped = max(log.series("skipped_steps"), default=0.0)
    usual = median(norms) if norms else 0.0
    if not skipped and (len(norms) < MIN_ROWS or not usual or max(norms) < 50 * usual):
        return None
    return Finding(
        "gradients spike",
        f"largest norm {max(norms, default=0):.3g}, median {usual:.3g}; {skipped:.0f} optimizer"
        " steps skipped because it was not finite",
        "set max_grad_norm, clip rewards, lower learning_rate; check for infinite scores",
    )


def score_falls(log: RunLog) -> Finding | None:
    """The score decreases during training."""
    change = score_change(log)
    if change is None or len(log.rows) < 2 * MIN_ROWS:
        return None
    start, end, noise = change
    if end > start - 6 * noise:
        return None
    return Finding(
        "the score falls",
        f"from {start:.3g} to {end:.3g} (noise: {noise:.2g})",
        "fix the other findings first; otherwise lower learning_rate or kl_coef, and check the sign"
        " of the reward",
    )


def score_did_not_rise(log: RunLog) -> Finding | None:
    """The score does not increase."""
    change = score_change(log)
    if change is None or len(log.rows) < 2 * MIN_ROWS or score_falls(log):
        return None
    start, end, noise = change
    if end >= start + 2 * noise:
        return None
    return Finding(
        "the score did not rise",
        f"from {start:.3g} to {end:.3g} over {responses(log)} responses (noise: {noise:.2g})",
        "fix the other findings first; otherwise compare completions with high and low scores: the"
        " policy must be able to produce the difference. Then raise learning_rate, lower kl_coef,"
        " or train longer",
    )


RULES: tuple[Rule, ...] = (
    dead_reward,
    dropped_rows,
    tool_never_called,
    format_never_valid,
    one_turn_rewarded,
    nothing_ends,
    sampler_disagrees,
    kl_negative,
    gradient_spikes,
    ratio_off,
    standing_still,
    kl_runs_away,
    entropy_collapses,
    value_explains_nothing,
    equal_groups,
    length_hacking,
    never_ends,
    score_falls,
    score_did_not_rise,
    slow_environment,
)


def _correlation(x: list[float], y: list[float]) -> float:
    mx, my = fmean(x), fmean(y)
    dx, dy = [a - mx for a in x], [b - my for b in y]
    scale = (sum(a * a for a in dx) * sum(b * b for b in dy)) ** 0.5
    return sum(a * b for a, b in zip(dx, dy, strict=True)) / scale if scale else 0.0
