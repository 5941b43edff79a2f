"""Rules of ``kedge doctor`` for runs with environments."""

from __future__ import annotations

from statistics import fmean, median

from kedge.insight.log import Finding, RunLog, responses, score_change

MIN_ROWS = 4  # minimum rows for a trend


def tool_never_called(log: RunLog) -> Finding | None:
    """Tools are offered, but the policy calls none."""
    calls = log.series("environment/tool_calls")
    if not calls or median(calls) >= 0.01:
        return None
    return Finding(
        "tools are never called",
        f"{fmean(calls):.2g} calls per episode over {responses(log)} episodes",
        "look at the first turns in the sample tables: the prompt must show the tools (a chat"
        " template that renders tools=), and the initial policy must call them sometimes; start"
        " from a model that was trained on such calls",
    )


def format_never_valid(log: RunLog) -> Finding | None:
    """Almost no call of the policy can be read."""
    calls, invalid = log.series("environment/tool_calls"), log.series("environment/invalid_calls")
    if sum(calls) == 0 or sum(invalid) < 0.9 * sum(calls):
        return None
    return Finding(
        "tool calls are never valid",
        f"{sum(invalid) / sum(calls):.0%} of the calls cannot be read",
        "compare a call in the sample tables with the format of the chat template; raise"
        " max_turn_tokens if calls are cut off, or start from a model that knows the format",
    )


def one_turn_rewarded(log: RunLog) -> Finding | None:
    """The reward comes from the last turn alone, and the score does not rise."""
    share, turns = log.last("environment/last_reward_share"), log.last("environment/turns")
    change = score_change(log)
    if share is None or turns is None or share < 0.999 or turns < 2 or change is None:
        return None
    start, end, noise = change
    if len(log.rows) < MIN_ROWS or end > start + 2 * noise:
        return None
    return Finding(
        "the reward comes from one turn alone",
        f"the last of {turns:.1f} turns gets all of it, and the score went from {start:.3g} to"
        f" {end:.3g}",
        'reward intermediate steps in the environment, or set credit="turn" or lam=1, so that the'
        " last reward reaches the first turns",
    )


def slow_environment(log: RunLog) -> Finding | None:
    """Sampling waits for environments."""
    waiting, model = log.series("environment/seconds"), log.series("environment/model_seconds")
    step = log.series("time/step")
    if not waiting or not model or not step:
        return None
    if median(waiting) <= median(model) or median(waiting) < 0.3 * median(step):
        return None
    return Finding(
        "environments are slower than the model",
        f"{median(waiting):.2g} s of an iteration of {median(step):.2g} s wait for environments,"
        f" {median(model):.2g} s for the model",
        "make step() async or cheaper, raise max_concurrency, or set max_lag=1, so that sampling"
        " overlaps with training",
    )
