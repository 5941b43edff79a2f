"""Diagnoses a run: rules on its log that find problems and suggest what to try.

Each rule checks one thing.  A missing metric is NaN, for which every comparison fails, so a rule
without its metrics finds nothing.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import correlation, fmean, median
from typing import Any

from kedge.reporting.base import format_duration
from kedge.reporting.log import RunLog, responses_per_batch, score_change

MIN_ROWS = 4  # minimum rows for a trend
FAR = 0.1  # approximate KL of an iteration in nats per token; usual is below 0.02
# Options in the advice by their names in GRPO, which has a bound `epsilon` and a KL in the loss.
GRPO = {
    "cliprange": "epsilon",
    "cliprange_high": "epsilon_high",
    "kl_coef": "beta",
    "whiten_advantages=False": 'scale_rewards="none"',
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem."""

    rule: str
    seen: str  # the numbers behind it
    advice: str  # what to try
    severe: bool = False  # runs rarely recover from it


Rule = Callable[[RunLog], Finding | None]
RULES: list[Rule] = []  # in order of definition: causes before symptoms


def rule(check: Callable[[RunLog], str | None]) -> Rule:
    """Decorator: makes a function that returns a problem's numbers, or None, a rule.

    The function's name names the problem, and its docstring is the advice.
    """
    name, advice = check.__name__.replace("_", " "), " ".join((check.__doc__ or "").split())

    @functools.wraps(check)
    def examine_log(log: RunLog) -> Finding | None:
        seen = check(log)
        severe = examine_log in SEVERE
        return None if seen is None else Finding(name, seen, _advise(advice, log), severe)

    RULES.append(examine_log)
    return examine_log


def examine(log: RunLog) -> list[Finding]:
    """Findings in the order of ``RULES``."""
    findings = (check(log) for check in RULES)
    return [finding for finding in findings if finding is not None]


def _advise(text: str, log: RunLog) -> str:
    """Advice in the option names of the run's trainer; {NAME: words} needs such an option."""
    known = {*log.options} | ({"several_answers"} if not _entropy(log) < 0.05 else set())
    text = re.sub(r"\{(\w+): ([^}]*)\}", lambda m: m[2] if m[1] in known else "", text)
    if "epsilon" in known:
        text = re.sub(r"\w+(=False)?", lambda m: GRPO.get(m[0], m[0]), text)
    return text


def _entropy(log: RunLog) -> float:
    """Of the newest rows, in nats per token: a fifth of a long run would report it late."""
    return median(log.series("policy/entropy_avg")[-3:] or [math.nan])


def live_findings(
    rows: list[dict[str, float]], *, options: Mapping[str, Any] | None = None, share: float = 1.0
) -> list[Finding]:
    """Findings of a run of which ``share`` is done; none from fewer than ``MIN_ROWS`` rows.

    Rules that wait for something to happen are asked of the second half of a run only.
    """
    log, early = RunLog("", rows, options or {}), PATIENT if share < 0.5 else ()
    asked = [each for each in RULES if each not in early] if len(rows) >= MIN_ROWS else []
    return [finding for each in asked if (finding := each(log)) is not None]


def open_question(log: RunLog) -> str:
    """Questions that no rule can answer, for a run without findings."""
    if log.series("environment/turns"):
        return "Success on new seeds is not in this log: kedge generate --environment measures it."
    return (
        "Whether answers are better is not in this log, only whether the reward says so: let an"
        " independent judge compare them (kedge judge)."
    )


@rule
def dead_reward(log: RunLog) -> str | None:
    """Read completions with their rewards; usual causes: a verifier that never matches, a missing
    column, a reward model without a trained head, a task that the initial policy never solves.
    """
    spread = log.series("objective/scores_std")
    spread = spread[: max(1, len(spread) // 2)]  # later, all prompts may be solved
    if not spread or median(spread) > 1e-6:
        return None
    return (
        f"all scores of a batch are equal (median deviation {median(spread):.2g}; mean score"
        f" {log.last('objective/scores'):.3g})"
    )


@rule
def responses_without_a_score(log: RunLog) -> str | None:
    """The log shows the first failure; fix the reward function or environment, or score failures
    with on_reward_error="score" or on_env_error="score".
    """
    dropped, batch = log.last("rollout/dropped_rows", 1.0), responses_per_batch(log)
    text = f"{dropped:.1f} of {batch:.0f} responses per batch are dropped"
    return text if dropped >= 0.05 * batch else None


@rule
def tools_are_never_called(log: RunLog) -> str | None:
    """Look at the first turns in the sample tables: the prompt must show the tools (a chat template
    that renders tools=), and the initial policy must call them sometimes; start from a model that
    was trained on such calls.
    """
    calls, episodes = log.series("environment/tool_calls"), max(log.series("episode"), default=0)
    if not calls or median(calls) >= 0.01:
        return None
    return f"{fmean(calls):.2g} calls per episode over {episodes:,.0f} episodes"


@rule
def tool_calls_fail(log: RunLog) -> str | None:
    """Read the tools' answers in the sample tables. If calls cannot be read, compare them with the
    chat template, raise max_turn_tokens, or start from a model that knows the format.
    """
    names = ("tool_calls", "tool_errors", "invalid_calls")
    calls, failed, invalid = (sum(log.series(f"environment/{name}")) for name in names)
    text = f"{failed / (calls or 1):.0%} of the calls are answered with an error,"
    text += f" {invalid / (calls or 1):.0%} cannot be read"
    return text if max(failed, invalid) >= 0.9 * calls > 0 else None


@rule
def episodes_end_before_they_are_done(log: RunLog) -> str | None:
    """Raise the limit that ends them (max_turns, response_length or max_turn_tokens,
    max_episode_seconds), or fix the environment whose errors end them.
    """
    kinds = ("turn_limit", "token_limit", "time_limit", "environment_error", "grader_error")
    shares = {kind: log.last(f"environment/ended_{kind}") for kind in kinds}
    cut = {kind: share for kind, share in shares.items() if share > 0}
    failed = cut.get("environment_error", 0) + cut.get("grader_error", 0)
    if sum(cut.values()) < 0.3 and failed < 0.05:
        return None
    return ", ".join(f"{share:.0%} by {kind.replace('_', ' ')}" for kind, share in cut.items())


@rule
def the_reward_comes_from_one_turn_alone(log: RunLog) -> str | None:
    """Reward intermediate steps in the environment, or set credit="turn" or lam=1, so that the last
    reward reaches the first turns.
    """
    share, turns = log.last("environment/last_reward_share"), log.last("environment/turns")
    start, end, noise = score_change(log)
    stays = len(log.rows) >= MIN_ROWS and end <= start + 2 * noise
    text = f"the last of {turns:.1f} turns gets all of it, and the score went from"
    return f"{text} {start:.3g} to {end:.3g}" if share >= 0.999 and turns >= 2 and stays else None


@rule
def nothing_ends(log: RunLog) -> str | None:
    """Start from a model that was trained to end its answers, raise the length limit, or set the
    stop tokens of the model (stop_token_ids); stop_token=None declares fixed-length responses.
    """
    cut, ended = log.series("completions/truncated_ratio"), sum(log.series("val/num_eos_tokens"))
    if not cut or min(cut) < 1.0 or ended or log.fixed_length or log.series("environment/turns"):
        return None  # how episodes end is in environment/ended_...
    length = log.last("completions/max_length")
    limit = "" if math.isnan(length) else f" at {length:.0f} tokens"
    return f"all responses are truncated by the length limit{limit}"


@rule
def rollout_engine_and_learner_disagree(log: RunLog) -> str | None:
    """Check precision and temperature of the rollout engine and its weight sync, or set
    sampler_correction="truncate".
    """
    gap = median(log.series("rollout/logprob_gap") or [0.0])
    text = f"log-probabilities differ by {gap:.3f} nats per token with the same weights"
    return (
        text if gap >= (0.06 if log.options.get("bf16") else 0.02) else None
    )  # at 16, bf16 steps are 0.125


@rule
def tokens_too_old_to_train_on(log: RunLog) -> str | None:
    """These are the first tokens of long responses, whose beginnings the policy does not learn;
    set sampler_correction="truncate", which trains on them, or raise max_lag.
    """
    share = log.last("rollout/too_old_tokens", 1.0)
    text = f"{share:.0%} of the sampled tokens are older than max_lag and do not train"
    return text if share > 0.05 else None


@rule
def the_KL_is_negative(log: RunLog) -> str | None:
    """Responses are not sampled from the distribution that is trained; usual causes: greedy or
    truncated sampling, a penalty in the rollout engine, or another temperature.
    """
    kl, length = log.last("objective/kl", 0.5), log.last("completions/mean_length")
    text = f"{kl:.2f} nats per response over the newer half of the rows"
    return text if kl <= -0.02 * length < 0 else None


@rule
def the_score_fell_after_a_large_step(log: RunLog) -> str | None:
    """If advantages were scaled up, set whiten_advantages=False or kl_coef above 0; if an iteration
    moved the policy far, lower learning_rate or take fewer optimizer steps; or stop when solved.
    """
    scores, raw = log.series("objective/scores"), log.series("val/raw_advantage_std")
    used, moved = log.series("val/advantage_std"), log.series("policy/approxkl_avg")
    if len(scores) < 2 * MIN_ROWS or not len(scores) == len(raw) == len(used):
        return None
    # Medians of three, and beyond chance: one noisy batch is neither a solution nor a fall.
    scores = [median(scores[max(0, i - 1) : i + 2]) for i in range(len(scores))]
    chance = log.first("objective/scores_std") / (3 * responses_per_batch(log)) ** 0.5
    top = scores.index(max(scores))
    low = min(range(top, len(scores)), key=scores.__getitem__)
    gain = [y / max(x, 1e-9) for x, y in zip(raw, used, strict=True)]
    usual = next(filter(None, gain), math.inf)  # the first batch may have had no advantages
    worst = max(range(top, low + 1), key=gain.__getitem__)
    fall, span = scores[top] - scores[low], scores[top] - min(0.0, *scores)
    far = max(moved[top : low + 1], default=0.0) if len(moved) == len(scores) else 0.0
    if fall < max(0.2 * span, 6 * chance) or (gain[worst] < 4 * usual and far < FAR):
        return None
    why = f"an iteration moved the policy by {far:.2g} nats per token"
    if gain[worst] >= 4 * usual:
        why = (
            f"the advantages were scaled up from a deviation of {raw[worst]:.2g},"
            f" {gain[worst] / usual:.0f} times as much as at first"
        )
    return f"score {scores[top]:.3g} to {scores[low]:.3g}; {why}"


@rule
def gradients_spike(log: RunLog) -> str | None:
    """Set max_grad_norm, clip rewards, lower learning_rate; check for infinite scores."""
    norms = log.series("grad_norm")
    skipped, most = max(log.series("skipped_steps"), default=0.0), max(norms, default=0.0)
    usual = median(norms or [0.0])
    text = (
        f"largest norm {most:.3g}, median {usual:.3g}; {skipped:.0f} optimizer steps skipped"
        " because it was not finite"
    )
    spike = len(norms) >= MIN_ROWS and most >= 50 * usual > 0
    return text if skipped or spike else None


@rule
def updates_are_too_large(log: RunLog) -> str | None:
    """Lower learning_rate, num_ppo_epochs or cliprange, or increase the batch size."""
    # a masked token is not pulled back (docs/algorithms/sao.md): the newest rows count
    share, most = (0.1, 0.05) if log.options.get("policy_loss") == "mask" else (1.0, 0.4)
    ratio, clipped = log.series("val/ratio"), log.last("policy/clipfrac_avg", share)
    far = [r for r in ratio if not 0.8 <= r <= 1.25]
    if not ratio or not (len(far) >= 0.2 * len(ratio) or clipped >= most):
        return None
    worst = max(ratio, key=lambda r: abs(r - 1))
    tokens = "" if math.isnan(clipped) else f", {clipped:.0%} of tokens clipped"
    return (
        f"the mean ratio is outside 0.8 to 1.25 in {len(far)} of {len(ratio)} rows (furthest"
        f" {worst:.3g}){tokens}"
    )


@rule
def the_policy_does_not_move(log: RunLog) -> str | None:
    """Raise learning_rate; check that the weights are trainable (adapter, frozen layers)."""
    moved = log.series("policy/approxkl_avg")
    norms = [x for x in log.series("grad_norm/policy") if x > 0]
    if len(moved) < MIN_ROWS or not norms or max(moved) > 1e-7:
        return None
    start, end = log.first("policy/entropy_avg"), log.last("policy/entropy_avg")
    changed = abs(end - start) > 2e-3 * start > 0  # a single pass has no KL
    if changed or log.last("objective/kl") > 1e-3 or dead_reward(log):
        return None
    return (
        f"approximate KL per iteration at most {max(moved):.1g}, learning rate"
        f" {log.first('lr'):.1g}"
    )


@rule
def the_policy_runs_away_from_the_reference(log: RunLog) -> str | None:
    """Raise kl_coef, or adapt it (adaptive_kl=True, kl_target); read late completions: a score
    gained at such a KL is usually reward hacking.
    """
    kl, length = log.last("objective/kl"), log.last("completions/mean_length") or math.nan
    text = f"KL of {kl:.1f} nats per response, {kl / length:.2f} per token"
    return text if kl >= 0.5 * length else None


@rule
def entropy_collapses(log: RunLog) -> str | None:
    """Lower learning_rate, raise kl_coef, or clip higher above 1 (cliprange_high) so that rare
    tokens can gain probability; check for identical answers to all prompts.
    """
    start, end = log.first("policy/entropy_avg"), _entropy(log)
    collapsed = len(log.rows) >= MIN_ROWS and start >= 0.05 and end <= 0.1 * start
    return f"from {start:.2f} to {end:.3f} nats per token" if collapsed else None


@rule
def the_value_explains_nothing(log: RunLog) -> str | None:
    """Pretrain it (kedge value fit, value_warmup_steps), or change value_learning_rate."""
    known = log.series("val/explained_variance")
    if len(known) < MIN_ROWS:
        return None
    late = fmean(known[len(known) // 2 :])
    spread = log.series("objective/scores_std")
    solved = spread and fmean(spread[len(spread) // 2 :]) < 0.5 * spread[0]
    if late > 0.05 or solved:  # scores that are all equal have little variance to explain
        return None
    return f"explained variance {late:.2f} over the newer half of the rows"


@rule
def the_first_iterations_were_noise(log: RunLog) -> str | None:
    """Let the value model train alone first (value_warmup_steps), or fit it on recorded rollouts
    (kedge value fit) and check it (kedge value check) before the policy moves.
    """
    moved = RunLog("", [row for row in log.rows if row.get("lr")], {})
    known, scores = moved.series("val/explained_variance"), moved.series("objective/scores")
    first = next((i for i, x in enumerate(known) if x > 0), len(known))
    if len(known) < MIN_ROWS or len(known) != len(scores):
        return None
    if not 3 <= first < len(known) or scores[first] >= scores[0]:
        return None
    return (
        f"in the first {first} rows in which the policy moved, the value was worse than the mean,"
        f" and the score fell from {scores[0]:.3g} to {scores[first]:.3g}"
    )


@rule
def groups_of_equal_scores(log: RunLog) -> str | None:
    """Choose prompts that are solved sometimes but not always{several_answers: , or raise
    num_generations}{dynamic_sampling: , or resample such groups (dynamic_sampling)}.
    """
    share = log.first("objective/uniform_groups", 0.5)  # later, prompts may be solved
    text = f"{share:.0%} of responses are in a group with equal scores and have advantage 0"
    return text if share >= 0.6 else None


@rule
def the_score_follows_the_length(log: RunLog) -> str | None:
    """Check that longer (or shorter) responses are better; if not, remove length from the reward,
    or add length_close_to or non_eos_penalty.
    """
    lengths, scores = log.series("completions/mean_length"), log.series("objective/scores")
    turns = log.series("environment/turns")
    if len(lengths) < 2 * MIN_ROWS or len(lengths) != len(scores):
        return None
    per_turn = len(turns) == len(lengths) and min(turns) > 0  # success takes fewer turns
    if per_turn:
        lengths = [length / count for length, count in zip(lengths, turns, strict=True)]
    part = max(1, round(len(lengths) * 0.2))
    start, end = fmean(lengths[:part]), fmean(lengths[-part:])
    if not start or not end or 2 / 3 < end / start < 1.5 or abs(end - start) < 3:
        return None
    together = _correlation(lengths, scores)
    if abs(together) < 0.8 or log.last("objective/scores") <= log.first("objective/scores"):
        return None
    return (
        f"mean length {start:.0f} to {end:.0f} tokens{' a turn' if per_turn else ''}, correlation"
        f" with the score {together:+.2f}"
    )


@rule
def fewer_responses_end(log: RunLog) -> str | None:
    """The reward prefers unfinished responses: replace their score (non_eos_penalty=True, and
    penalty_reward_value below the scores of finished responses), or raise the length limit if they
    need it.
    """
    cut, scores = log.series("completions/truncated_ratio"), log.series("objective/scores")
    if len(cut) < MIN_ROWS or len(cut) != len(scores):
        return None
    start, end = fmean(cut[:2]), fmean(cut[-2:])
    before, after = fmean(scores[:2]), fmean(scores[-2:])
    if end - start < 0.1 or after <= before or _correlation(cut, scores) < 0.5:
        return None
    return (
        f"{start:.0%} to {end:.0%} are truncated while the score rises from {before:.3g} to"
        f" {after:.3g}"
    )


@rule
def responses_do_not_end(log: RunLog) -> str | None:
    """Raise the length limit (response_length, max_turns), set non_eos_penalty=True, or end
    episodes in the environment.
    """
    share = log.last("completions/truncated_ratio", 0.5)
    text = f"{share:.0%} are truncated by the length limit"
    return text if share >= 0.98 and any(log.series("val/num_eos_tokens")) else None


@rule
def the_score_falls(log: RunLog) -> str | None:
    """Fix the other findings first; otherwise lower learning_rate or kl_coef, and check the sign of
    the reward.
    """
    start, end, noise = score_change(log)
    falls = len(log.rows) >= 2 * MIN_ROWS and end <= start - 6 * noise
    return f"from {start:.3g} to {end:.3g} (noise: {noise:.2g})" if falls else None


@rule
def the_score_did_not_rise(log: RunLog) -> str | None:
    """Fix the other findings first; otherwise compare completions with high and low scores: the
    policy must be able to produce the difference. Then raise learning_rate, lower kl_coef, or train
    longer.
    """
    start, end, noise = score_change(log)
    stays = len(log.rows) >= 2 * MIN_ROWS and end < start + 2 * noise
    if not stays or the_score_falls(log):
        return None
    responses = f"{max(log.series('episode'), default=0):,.0f}"
    return f"from {start:.3g} to {end:.3g} over {responses} responses (noise: {noise:.2g})"


@rule
def environments_are_slower_than_the_model(log: RunLog) -> str | None:
    """Make step() async or cheaper, raise environment_concurrency, or train meanwhile (max_lag)."""
    names = ("environment/seconds", "environment/model_seconds", "time/step")
    waiting, model, step = (median(log.series(name) or [math.nan]) for name in names)
    rows = responses_per_batch(log)
    if not (waiting > model and waiting * rows >= 0.3 * step):
        return None
    wait, whole, used = map(format_duration, (waiting * rows, step, model * rows))
    return f"{wait} of an iteration of {whole} wait for environments, {used} for the model"


SEVERE = (
    dead_reward,
    the_score_fell_after_a_large_step,
    the_policy_runs_away_from_the_reference,
    entropy_collapses,
    the_score_falls,
)
PATIENT = (
    the_reward_comes_from_one_turn_alone,
    the_policy_does_not_move,
    the_value_explains_nothing,
    the_first_iterations_were_noise,
    the_score_did_not_rise,
)


def _correlation(x: list[float], y: list[float]) -> float:
    return correlation(x, y) if len({*x}) > 1 and len({*y}) > 1 else 0.0
