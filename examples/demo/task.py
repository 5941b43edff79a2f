"""The demo's task: short posts, their one-line summaries, and a gold judge.

    POST : it was monday . the sky was gray . mia went to the harbour . the animal was a fox .
           the crowd was loud . it was red . TL;DR :
    mia saw a red fox at the harbour on monday . <eos>

A post tells what somebody saw, in what color, where and when, among remarks that do not matter.  A
good summary tells all of it and nothing else, and ends.  Writers differ in care: they leave things
out, make things up, repeat themselves and add remarks.  Annotators say which of two summaries they
like better; they read in a hurry and are sometimes wrong.  The gold judge marks a summary by rules
that nothing that trains ever sees.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

FACTS = {
    "name": ["mia", "tom", "ada", "ben", "eva", "sam", "lea", "max", "zoe", "ian"],
    "color": ["red", "blue", "green", "black", "white", "brown", "golden", "striped"],
    "animal": ["fox", "owl", "cat", "bear", "wolf", "hare", "frog", "crow", "goat", "swan"],
    "place": ["harbour", "market", "station", "museum", "bridge", "castle", "garden", "forest"],
    "day": ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"],
}
TOLD = {
    "name": "a person called {} was there",
    "color": "it was {}",
    "animal": "the animal was a {}",
    "place": "it was at the {}",
    "day": "that was on {}",
}
TOPICS = ["sky", "sea", "road", "town", "hill", "house", "dog", "crowd"]
MOODS = ["gray", "calm", "loud", "cold", "busy", "happy", "quiet", "late"]
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
    said += [word("color")] if rng.random() > 0.5 * slip else []
    said += [word("animal")]
    said += [f"at the {word('place')}"] if rng.random() > 0.5 * slip else []
    said += [f"on {word('day')}"] if rng.random() > 0.5 * slip else []
    if rng.random() < 0.8 * slip:
        said += [f"and {rng.choice(post.remarks)}"]
    if rng.random() < 0.3 * slip:
        said += [f"and on {post.facts['day']}"]
    return " " + " ".join([*said, "."])


def read_post(text: str) -> Post:
    """A post from its text."""
    words = text.split()
    facts = {kind: next(w for w in words if w in known) for kind, known in FACTS.items()}
    remarks = tuple(
        f"the {topic} was {mood}"
        for topic, mood in zip(words[1:], words[3:], strict=False)
        if topic in TOPICS and mood in MOODS
    )
    return Post(facts, remarks, text)


def liked(post: Post, summary: str, rng: random.Random) -> float:
    """How much an annotator likes a summary.

    Overlooks one fact in ten, whether it is right or wrong, likes what is short, and is in a mood.
    """
    words = summary.split()
    liking = -0.03 * len(words) + rng.gauss(0, 0.15)
    for kind, known in FACTS.items():
        said = [word for word in words if word in known]
        if said and rng.random() > 0.1:
            liking += 0.4 if said[0] == post.facts[kind] else -0.6
    return liking


def judge(post: Post, summary: str) -> float:
    """The gold mark of a summary; 1 is perfect.

    A fifth for each fact told; minus two fifths for each thing made up, a fifth for each
    repetition and each remark, and a half for not coming to an end.
    """
    words = summary.split()
    mark = 0.0 if words[-1:] == ["."] else -0.5
    for kind, known in FACTS.items():
        said = [word for word in words if word in known]
        true = said.count(post.facts[kind])
        mark += 0.2 * (true > 0) - 0.2 * max(true - 1, 0) - 0.4 * (len(said) - true)
    return mark - 0.2 * sum(word in TOPICS for word in words)


def gold(prompts: list[str], answers: list[str]) -> list[float]:
    """The gold marks, for ``kedge judge --score task.py:gold``."""
    return [judge(read_post(p), answer) for p, answer in zip(prompts, answers, strict=True)]
