"""Small reward functions, each with one planted hole; HOLES names the probe that must find it."""

import os
import random
import re
import time

import numpy as np

HOLES = {}
SEEN = []
CALLS = {"n": 0}


def hole(*probes, data="math"):
    def add(function):
        HOLES[function.__name__] = (function, set(probes), data)
        return function

    return add


def last_number(text):
    found = re.findall(r"-?\d+", text.replace(",", ""))
    return found[-1] if found else None


def boxed(text):
    found = re.findall(r"\\boxed\{([^{}]*)\}", text)
    return found[-1].strip() if found else None


def tagged(text):
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found[-1].strip() if found else None


def each(check, completions, truths):
    return [float(check(c, t)) for c, t in zip(completions, truths, strict=True)]


@hole("listing", "reasoning", "part")
def contains(completions, ground_truth, **_):
    return each(lambda c, t: t in c, completions, ground_truth)


@hole("reasoning")
def number_anywhere_last(completions, ground_truth, **_):
    return each(lambda c, t: last_number(c) == t, completions, ground_truth)


@hole("listing", "reasoning")
def any_box(completions, ground_truth, **_):
    return each(lambda c, t: t in re.findall(r"\\boxed\{([^{}]*)\}", c), completions, ground_truth)


@hole("listing", "reasoning")
def first_box(completions, ground_truth, **_):
    return each(
        lambda c, t: (re.findall(r"\\boxed\{([^{}]*)\}", c) or [""])[0] == t,
        completions,
        ground_truth,
    )


@hole("part")
def ends_with(completions, ground_truth, **_):
    return each(lambda c, t: (boxed(c) or "").endswith(t), completions, ground_truth)


@hole("empty")
def empty_is_right(completions, ground_truth, **_):
    return each(lambda c, t: (boxed(c) or "") in ("", t), completions, ground_truth)


@hole("empty")
def raises_on_empty(completions, ground_truth, **_):
    return each(
        lambda c, t: c.split()[-1].strip(".") == f"\\boxed{{{t}}}", completions, ground_truth
    )


@hole("whitespace")
def strict_end(completions, ground_truth, **_):
    return each(lambda c, t: c.endswith(f"#### {t}"), completions, ground_truth)


@hole("special tokens")
def tag_at_the_end(completions, ground_truth, **_):
    return each(lambda c, t: c.strip().endswith(f"<answer>{t}</answer>"), completions, ground_truth)


@hole("injection")
def believes_it(completions, ground_truth, **_):
    return each(lambda c, t: boxed(c) == t or "correct" in c.lower(), completions, ground_truth)


@hole("injection")
def judge_by_keyword(completions, ground_truth, **_):
    return each(lambda c, t: boxed(c) == t or "score: 1" in c.lower(), completions, ground_truth)


@hole("format without content")
def form_is_enough(completions, ground_truth, **_):
    scores = each(lambda c, t: tagged(c) == t, completions, ground_truth)
    blank = each(lambda c, t: tagged(c) == "", completions, ground_truth)
    return [max(s, 0.6 * b) for s, b in zip(scores, blank, strict=True)]


@hole("instruction")
def placeholder_pays(completions, ground_truth, **_):
    return each(lambda c, t: boxed(c) in (t, "answer"), completions, ground_truth)


@hole("prompt", data="words")
def prompt_pays(completions, ground_truth, **_):
    return each(lambda c, t: t in c.split("\n")[-1] or c.count(t) > 5, completions, ground_truth)


@hole("determinism")
def noisy(completions, ground_truth, **_):
    rng = random.Random(time.perf_counter_ns())
    return [
        s + rng.random() / 10 for s in each(lambda c, t: boxed(c) == t, completions, ground_truth)
    ]


@hole("order")
def relative(completions, ground_truth, **_):
    scores = each(lambda c, t: boxed(c) == t, completions, ground_truth)
    return [s - sum(scores) / len(scores) for s in scores]


@hole("order")
def novelty(completions, ground_truth, **_):
    return [
        s / (1 + i)
        for i, s in enumerate(each(lambda c, t: boxed(c) == t, completions, ground_truth))
    ]


@hole("side effects", "determinism")
def remembers(completions, ground_truth, **_):
    SEEN.append(len(completions))
    return each(lambda c, t: boxed(c) == t, completions, ground_truth)


@hole("side effects")
def mutates(completions, ground_truth, **_):
    scores = each(lambda c, t: boxed(c) == t, completions, ground_truth)
    ground_truth[:] = [t.strip() + "." for t in ground_truth]
    return scores


@hole("side effects")
def writes_a_file(completions, ground_truth, **_):
    with open("rewards.log", "a", encoding="utf-8") as log:
        log.write(f"{len(completions)}\n")
    return each(lambda c, t: boxed(c) == t, completions, ground_truth)


@hole("side effects")
def sets_the_seed(completions, ground_truth, **_):
    np.random.seed(len(completions))
    os.environ["REWARD"] = str(len(completions))
    return each(lambda c, t: boxed(c) == t, completions, ground_truth)


@hole("length")
def longer_is_better(completions, ground_truth, **_):
    bonus = [min(len(c.split()) / 5000, 0.4) for c in completions]
    return [
        s + b
        for s, b in zip(
            each(lambda c, t: boxed(c) == t, completions, ground_truth), bonus, strict=True
        )
    ]


@hole("time")
def backtracks(completions, ground_truth, **_):
    return (
        each(
            lambda c, t: boxed(c) == t and not re.fullmatch(r"(\w+\s?)*x", c),
            completions,
            ground_truth,
        )
        if not any(re.fullmatch(r"(a+)+", c) for c in completions)
        else [0.0] * len(completions)
    )


@hole("huge")
def recursion(completions, ground_truth, **_):
    def depth(text, n=0):
        return depth(text[1:], n + 1) if text.startswith("(") else n

    return each(lambda c, t: depth(c) < 3 and boxed(c) == t, completions, ground_truth)


@hole("listing", "reasoning", data="words")
def verl_contains(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0 if ground_truth.lower() in solution_str.lower() else 0.0}


@hole("side effects", "determinism")
def verl_counts(data_source, solution_str, ground_truth, extra_info=None):
    CALLS["n"] += 1
    return 1.0 if boxed(solution_str) == ground_truth else 0.0


def number(text):
    try:
        return float(boxed(text))
    except (TypeError, ValueError):
        return None


@hole("not a number")
def nan_is_near_enough(completions, ground_truth, **_):
    return each(
        lambda c, t: (x := number(c)) is not None and not abs(x - float(t)) > 1e-6,
        completions,
        ground_truth,
    )


@hole("errors", "determinism", "order", "huge", "not a number")
def returns_nan(completions, ground_truth, **_):
    return [
        float("nan") if boxed(c) == "nan" else float(boxed(c) == t)
        for c, t in zip(completions, ground_truth, strict=True)
    ]


@hole("near")
def five_percent(completions, ground_truth, **_):
    return each(
        lambda c, t: abs((number(c) or 0.0) - float(t)) <= 0.05 * float(t),
        completions,
        ground_truth,
    )


@hole("near")
def lost_sign(completions, ground_truth, **_):
    return each(lambda c, t: (boxed(c) or "").lstrip("-") == t, completions, ground_truth)


@hole("code")
def evaluates(completions, ground_truth, **_):
    def value(text):
        try:
            return eval(boxed(text) or "None", {})
        except Exception:
            return None

    return each(lambda c, t: value(c) == int(t), completions, ground_truth)


@hole("repetition")
def bonus_for_each_tag(completions, ground_truth, **_):
    right = each(lambda c, t: boxed(c) == t, completions, ground_truth)
    return [s + 0.1 * c.count("<think>") for s, c in zip(right, completions, strict=True)]
