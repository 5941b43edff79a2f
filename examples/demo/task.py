"""The demo's task: short posts, their one-line summaries, and a gold judge.

    POST : it was monday . the sky was grey . mia went to the harbour . the animal was a fox .
           the crowd was loud . it was red . TL;DR :
    mia saw a red fox at the harbour on monday . <eos>

A post tells what somebody saw, in what colour, where and when, among remarks that do not matter.  A
good summary tells all of it and nothing else, and ends.  Writers differ in care: they leave things
out, make things up, repeat themselves and add remarks.  The gold judge reads the post and marks a
summary; training never sees it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

FACTS = {
    "name": ["mia", "tom", "ada", "ben", "eva", "sam", "lea", "max", "zoe", "ian"],
    "colour": ["red", "blue", "green", "black", "white", "brown", "golden", "striped"],
    "animal": ["fox", "owl", "cat", "bear", "wolf", "hare", "frog", "crow", "goat", "swan"],
    "place": ["harbour", "market", "station", "museum", "bridge", "castle", "garden", "forest"],
    "day": ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"],
}
TOLD = {
    "name": "a person called {} was there",
    "colour": "it was {}",
    "animal": "the animal was a {}",
    "place": "it was at the {}",
    "day": "that was on {}",
}
TOPICS = ["sky", "sea", "road", "town", "hill", "house", "dog", "crowd"]
MOODS = ["grey", "calm", "loud", "cold", "busy", "happy", "quiet", "late"]
REMARKS = 2
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
    """What happened, and how it is told."""

    facts: dict[str, str]
    remarks: tuple[str, ...]
    text: str


def write_post(rng: random.Random) -> Post:
    """A post of five facts and two remarks, in any order."""
    facts = {kind: rng.choice(words) for kind, words in FACTS.items()}
    remarks = tuple(f"the {topic} was {rng.choice(MOODS)}" for topic in rng.sample(TOPICS, REMARKS))
    lines = [TOLD[kind].format(word) for kind, word in facts.items()] + [*remarks]
    rng.shuffle(lines)
    return Post(facts, remarks, "POST : " + " ".join(f"{line} ." for line in lines) + " TL;DR :")


def write_summary(post: Post, rng: random.Random, *, care: float) -> str:
    """A summary by a writer of this care, 0 to 1."""
    slip = 1 - care

    def word(kind: str) -> str:
        made_up = rng.random() < 0.3 * slip
        return rng.choice(FACTS[kind]) if made_up else post.facts[kind]

    said = [word("name"), "saw a"]
    said += [word("colour")] if rng.random() > 0.5 * slip else []
    said += [word("animal")]
    said += [f"at the {word('place')}"] if rng.random() > 0.5 * slip else []
    said += [f"on {word('day')}"] if rng.random() > 0.5 * slip else []
    if rng.random() < 0.8 * slip:
        said += [f"and {rng.choice(post.remarks)}"]
    if rng.random() < 0.3 * slip:
        said += [f"and on {post.facts['day']}"]
    return " " + " ".join([*said, "."])


def judge(post: Post, summary: str, *, ended: bool) -> float:
    """The gold mark of a summary; 1 is perfect.

    A fifth for each fact told; minus two fifths for each thing made up, a fifth for each
    repetition and each remark, and a half for not coming to an end.
    """
    words = summary.split()
    mark = 0.0 if ended else -0.5
    for kind, known in FACTS.items():
        said = [word for word in words if word in known]
        true = said.count(post.facts[kind])
        mark += 0.2 * (true > 0) - 0.2 * max(true - 1, 0) - 0.4 * (len(said) - true)
    return mark - 0.2 * sum(word in TOPICS for word in words)


def win_rate(marks: list[float], against: list[float]) -> float:
    """How often the first mark is the higher one; a tie counts one half."""
    wins = [0.5 if abs(a - b) < 1e-9 else float(a > b) for a, b in zip(marks, against, strict=True)]
    return sum(wins) / len(wins)
