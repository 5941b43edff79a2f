"""The demo's task: short posts, their one-line summaries, and a gold judge.

    POST : on monday . it was red . the sky was grey . at the harbour . mia was there .
           a fox came . TL;DR :
    mia saw a red fox at the harbour on monday . <eos>

A post tells who saw what, in which color, where and when, and makes an irrelevant remark.  A good
summary states all of these facts and nothing else, and ends.  Careless writers omit facts, invent
some, repeat themselves and add remarks.  Annotators state which of two summaries they prefer and
are sometimes wrong.  The gold judge scores a summary by rules that are never used in training.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

FACTS = {
    "name": ["mia", "tom", "ada", "ben"],
    "color": ["red", "blue", "green", "black"],
    "animal": ["fox", "owl", "cat", "bear"],
    "place": ["harbour", "market", "station", "garden"],
    "day": ["monday", "tuesday", "friday", "sunday"],
}
TOLD = {
    "name": "{} was there",
    "color": "it was {}",
    "animal": "a {} came",
    "place": "at the {}",
    "day": "on {}",
}
TOPICS = ["sky", "sea", "road", "town", "hill", "house", "dog", "crowd"]
MOODS = ["grey", "calm", "loud", "cold", "busy", "happy", "quiet", "late"]
WORDS = sorted(
    {
        *" ".join(TOLD.values()).replace("{}", "").split(),
        *["POST", ":", "TL;DR", ".", "and", "saw", "a", "at", "the", "on", "was"],
        *(word for words in FACTS.values() for word in words),
        *TOPICS,
        *MOODS,
    }
)
PAD, EOS = "[PAD]", "<eos>"


@dataclass(frozen=True, slots=True)
class Post:
    """The facts and the remark of a post, and its text."""

    facts: dict[str, str]
    remark: str
    text: str


def write_post(rng: random.Random) -> Post:
    """A post of five facts and a remark, in random order."""
    facts = {kind: rng.choice(words) for kind, words in FACTS.items()}
    remark = f"the {rng.choice(TOPICS)} was {rng.choice(MOODS)}"
    lines = [*(TOLD[kind].format(word) for kind, word in facts.items()), remark]
    rng.shuffle(lines)
    return Post(facts, remark, "POST : " + " ".join(f"{line} ." for line in lines) + " TL;DR :")


def write_summary(post: Post, rng: random.Random, *, care: float) -> str:
    """Write a summary with this much care, 0 to 1."""
    slip = 1 - care

    def word(kind: str) -> str:
        made_up = rng.random() < 0.3 * slip
        return rng.choice(FACTS[kind]) if made_up else post.facts[kind]

    phrases = [word("name"), "saw a"]
    phrases += [word("color")] if rng.random() > 0.5 * slip else []
    phrases += [word("animal")]
    phrases += [f"at the {word('place')}"] if rng.random() > 0.5 * slip else []
    phrases += [f"on {word('day')}"] if rng.random() > 0.5 * slip else []
    if rng.random() < 0.8 * slip:
        phrases += [f"and {post.remark}"]
    if rng.random() < 0.3 * slip:
        phrases += [f"and on {post.facts['day']}"]
    return " " + " ".join([*phrases, "."])


def add_mistake(post: Post, summary: str, rng: random.Random) -> tuple[str, str]:
    """Add a mistake to a summary; also returns the kind of mistake."""
    words = summary.split()
    right = {kind: word for kind, word in post.facts.items() if word in words}
    wrong = [f"wrong {kind}" for kind in right]
    left_out = [f"no {kind}" for kind in ("place", "day") if kind in right]
    kind = rng.choice([*wrong, *wrong, *left_out, "remark", "said twice"])
    if kind.startswith("no "):
        at = words.index(right[kind.removeprefix("no ")])
        del words[at - (2 if kind == "no place" else 1) : at + 1]
    elif kind in ("remark", "said twice"):
        more = post.remark if kind == "remark" else f"on {post.facts['day']}"
        end = words.index(".") if "." in words else len(words)
        words[end:end] = ["and", *more.split()]
    else:
        fact = kind.removeprefix("wrong ")
        others = [word for word in FACTS[fact] if word != right[fact]]
        words[words.index(right[fact])] = rng.choice(others)
    return " " + " ".join(words), kind


def read_post(text: str) -> Post:
    """Parse a post from its text."""
    words = text.split()
    facts = {kind: next(w for w in words if w in known) for kind, known in FACTS.items()}
    topic, mood = (next(w for w in words if w in known) for known in (TOPICS, MOODS))
    return Post(facts, f"the {topic} was {mood}", text)


def rate(post: Post, summary: str, rng: random.Random) -> float:
    """An annotator's rating of a summary.

    Overlooks one fact in fifty, right or wrong, prefers short summaries, and adds noise.
    """
    words = summary.split()
    liking = -0.04 * len(words) + rng.gauss(0, 0.05)
    for kind, known in FACTS.items():
        mentioned = [word for word in words if word in known]
        if mentioned and rng.random() > 0.02:
            liking += 0.4 if mentioned[0] == post.facts[kind] else -0.6
    return liking


def judge(post: Post, summary: str) -> float:
    """The gold score of a summary; 1 is perfect.

    +0.2 for each fact, -0.4 for each invented one, -0.2 for each repetition and each remark, and
    -0.5 without an end.
    """
    words = summary.split()
    score = 0.0 if words[-1:] == ["."] else -0.5
    for kind, known in FACTS.items():
        mentioned = [word for word in words if word in known]
        correct = mentioned.count(post.facts[kind])
        score += 0.2 * (correct > 0) - 0.2 * max(correct - 1, 0) - 0.4 * (len(mentioned) - correct)
    return score - 0.2 * sum(word in TOPICS for word in words)


def gold(prompts: list[str], completions: list[str], **_: Any) -> list[float]:
    """The gold scores, for ``kedge judge --score task.py:gold`` or ``--reward_funcs``."""
    return [judge(read_post(p), text) for p, text in zip(prompts, completions, strict=True)]
