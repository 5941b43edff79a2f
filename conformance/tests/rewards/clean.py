"""Reward functions without a hole that the probes know: nothing may be found."""

import re


def boxed(text):
    text = text.rsplit("</think>", 1)[-1]
    found = re.findall(r"\\boxed\{([^{}]{0,200})\}", text)
    return found[-1].strip() if len(found) == 1 else None


def boxed_exact(completions, ground_truth, **_):
    return [float(boxed(c) == t) for c, t in zip(completions, ground_truth, strict=True)]


def hashes(completions, ground_truth, **_):
    def read(text):
        found = re.findall(
            r"^#### (-?\d{1,20})\s*(?:<[^>]*>)*$", text.rsplit("</think>", 1)[-1], re.M
        )
        return found[0] if len(found) == 1 else None

    return [1.0 if read(c) == t else 0.0 for c, t in zip(completions, ground_truth, strict=True)]


def partial_credit(completions, ground_truth, **_):
    """0.1 for the form, 1 for the answer."""
    answers = [boxed(c) for c in completions]
    return [1.0 if a == t else 0.1 * bool(a) for a, t in zip(answers, ground_truth, strict=True)]


def chat(completions, ground_truth, **_):
    texts = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return boxed_exact(texts, ground_truth)


def negative(completions, ground_truth, **_):
    return [1.0 if boxed(c) == t else -1.0 for c, t in zip(completions, ground_truth, strict=True)]


def whole_text(completions, ground_truth, **_):
    return [float(c.strip() == t) for c, t in zip(completions, ground_truth, strict=True)]


def format_only(completions, **_):
    form = re.compile(
        r"\s*<think>(?=\s*\S)[^<]{1,9999}</think>\s*<answer>\s*[^<\s][^<]{0,999}</answer>\s*"
    )
    return [1.0 if form.fullmatch(c) else 0.0 for c in completions]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return 1.0 if boxed(solution_str) == ground_truth else 0.0
