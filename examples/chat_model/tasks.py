"""Questions with an answer to name and an instruction to follow, as chat prompts.

python examples/chat_model/tasks.py --output runs/chat/data

Writes ``train.jsonl``, with one instruction per question, and ``held_out.jsonl``: questions that
are not in the first file, with one instruction, with two at once, and with none.  Instructions are
those of IFEval, so ``kedge.verifiers:ifeval`` checks them.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

FACTS = {
    "What is the capital of {}?": """
        France Paris, Italy Rome, Spain Madrid, Germany Berlin, Japan Tokyo, China Beijing,
        Russia Moscow, Egypt Cairo, Greece Athens, Portugal Lisbon, Austria Vienna, Poland Warsaw,
        Hungary Budapest, Norway Oslo, Sweden Stockholm, Finland Helsinki, Denmark Copenhagen,
        Ireland Dublin, England London, Scotland Edinburgh, Belgium Brussels, Cuba Havana,
        Peru Lima, Chile Santiago, Canada Ottawa, Kenya Nairobi, Iran Tehran, Iraq Baghdad,
        Thailand Bangkok, Vietnam Hanoi, Australia Canberra, Turkey Ankara,
        Romania Bucharest, Bulgaria Sofia""",
    'What is the opposite of "{}"?': """
        hot cold, big small, up down, day night, black white, fast slow, happy sad, old young,
        open closed, high low, rich poor, left right, hard soft, light dark, wet dry, early late,
        full empty, strong weak, long short, loud quiet, good bad, clean dirty, near far,
        heavy light, thick thin, front back, begin end, buy sell, love hate, win lose""",
    "What is a baby {} called?": """
        dog puppy, cat kitten, cow calf, horse foal, sheep lamb, goat kid, lion cub, bear cub,
        duck duckling, deer fawn, frog tadpole, swan cygnet, kangaroo joey, chicken chick,
        pig piglet""",
    "What color is {}?": """
        grass green, snow white, coal black, blood red, milk white, chocolate brown, spinach green,
        gold yellow, charcoal black, sugar white""",
    "On which continent is {}?": """
        Kenya Africa, India Asia, Italy Europe, Nigeria Africa, Vietnam Asia, Poland Europe,
        Egypt Africa, Nepal Asia, Norway Europe, Morocco Africa, Mongolia Asia, Portugal Europe""",
    "Which day comes after {}?": """
        Monday Tuesday, Tuesday Wednesday, Wednesday Thursday, Thursday Friday, Friday Saturday,
        Saturday Sunday, Sunday Monday""",
    "Which month comes after {}?": """
        January February, February March, March April, April May, May June, June July,
        July August, August September, September October, October November, November December,
        December January""",
}
NUMBERS = "zero one two three four five six seven eight nine ten"

# The instruction in words (several ways), its name in IFEval, its arguments.
INSTRUCTIONS: list[tuple[list[str], str, dict[str, Any]]] = [
    (
        [
            "Put your whole answer in double quotation marks.",
            'Wrap your entire response in double quotation marks, like "this".',
        ],
        "startend:quotation",
        {},
    ),
    (
        [
            "Put the answer in double angular brackets, such as <<answer>>.",
            "Write the answer as a title in double angular brackets, like <<this>>.",
        ],
        "detectable_format:title",
        {},
    ),
    (
        [
            'Answer with a JSON object with the key "answer" and nothing else.',
            'Give your entire output in JSON format, such as {"answer": "..."}.',
        ],
        "detectable_format:json_format",
        {},
    ),
    (
        ["Use at most three words.", "Answer with less than four words."],
        "length_constraints:number_words",
        {"num_words": 4, "relation": "less than"},
    ),
    (
        [
            "Answer with one bullet point that starts with an asterisk, such as: * A point.",
            'Write the answer as exactly one bullet point, starting with "* ".',
        ],
        "detectable_format:number_bullet_lists",
        {"num_bullets": 1},
    ),
    (
        [
            "Highlight the answer with asterisks, like *this*.",
            "Highlight at least one part of your answer with markdown, i.e. *highlighted*.",
        ],
        "detectable_format:number_highlighted_sections",
        {"num_highlights": 1},
    ),
    (
        [
            "At the end, add a postscript that starts with P.S.",
            "Close with a short postscript starting with P.S.",
        ],
        "detectable_content:postscript",
        {"postscript_marker": "P.S."},
    ),
    *(
        (
            [
                f'Finish your answer with this exact phrase: "{phrase}"',
                f"End with the words: {phrase} No other words should follow.",
            ],
            "startend:end_checker",
            {"end_phrase": phrase},
        )
        for phrase in ("Is that right?", "Have a nice day.", "I hope that helps.")
    ),
    *(
        (
            [f'Use the word "{word}".', f"Include the keyword {word}."],
            "keywords:existence",
            {"keywords": [word]},
        )
        for word in ("friend", "sure", "certainly")
    ),
]

COMBINABLE = {  # instructions that any other instruction among these can be added to
    "detectable_format:title",
    "detectable_format:number_highlighted_sections",
    "detectable_content:postscript",
    "startend:end_checker",
    "keywords:existence",
}


def questions() -> list[tuple[str, list[str]]]:
    """All questions with their accepted answers."""
    facts = [
        (question.format(subject), [answer])
        for question, pairs in FACTS.items()
        for subject, answer in (pair.split() for pair in pairs.split(","))
    ]
    spelled = NUMBERS.split()
    sums = [
        (f"What is {a} + {b}?", [str(a + b), spelled[a + b]])
        for a in range(1, 10)
        for b in range(1, 11 - a)
    ]
    return facts + sums


def row(
    question: str, answer: list[str], instructions: list[Any], draw: random.Random
) -> dict[str, Any]:
    """A conversation of one question, and the columns that the rewards read."""
    words = [draw.choice(phrasings) for phrasings, _, _ in instructions]
    return {
        "prompt": [{"role": "user", "content": " ".join([question, *words])}],
        "answer": answer,
        "instruction_id_list": [name for _, name, _ in instructions],
        "kwargs": [arguments for _, _, arguments in instructions],
    }


def tasks(seed: int = 0) -> dict[str, list[dict[str, Any]]]:
    """All prompts: a fifth of the questions is held out.

    Args:
        seed: of the split and the phrasings.
    """
    draw = random.Random(seed)
    everything = questions()
    draw.shuffle(everything)
    cut = len(everything) // 5
    held_out, trained = everything[:cut], everything[cut:]
    train = [row(*question, [one], draw) for question in trained for one in INSTRUCTIONS]
    draw.shuffle(train)
    anywhere = [one for one in INSTRUCTIONS if one[1] in COMBINABLE]
    new = [
        row(*question, [one], draw) for question in held_out for one in draw.sample(INSTRUCTIONS, 4)
    ]
    for question in held_out:
        first = draw.choice(anywhere)
        second = draw.choice([other for other in anywhere if other[1] != first[1]])
        new += [row(*question, [first, second], draw), row(*question, [], draw)]
    return {"train": train, "held_out": new}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("runs/chat/data"))
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    for name, rows in tasks().items():
        text = "".join(json.dumps(one) + "\n" for one in rows)
        (args.output / f"{name}.jsonl").write_text(text)


if __name__ == "__main__":
    main()
