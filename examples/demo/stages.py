"""What the demo does beside commands of Kedge: data, preferences, a test of the reward model."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import permutations
from pathlib import Path

from task import (
    EOS,
    FACTS,
    PAD,
    WORDS,
    add_mistake,
    rate,
    read_post,
    write_post,
    write_summary,
)

from kedge.output import write_jsonl
from kedge.reporting.log import read_objects

CARE = 0.45  # of the writers of supervised summaries
REFERENCE_CARE = 0.8  # of the writers of reference summaries
PROMPTS = 2_000  # number of prompts for PPO
POSTS = 12  # per exchange of values
BLIND = 0.5  # share of pairs that are in the right order


def write_data(
    folder: Path, seed: int, *, supervised: int = 8, compared: int = 8, judged: int = 8
) -> None:
    """Write the untrained model with its tokenizer, and all texts; held_out.jsonl comes last."""

    def write(name: str, rows: int, care: float | None = None) -> None:
        rng = random.Random(f"{name} {seed}")
        posts = [write_post(rng) for _ in range(rows)]
        table = [{"prompt": post.text} for post in posts]
        if care is not None:
            table = [
                row | {"completion": write_summary(post, rng, care=care)}
                for row, post in zip(table, posts, strict=True)
            ]
        write_jsonl(folder / f"{name}.jsonl", table)

    write_model(folder / "model", seed)
    write("supervised", supervised, CARE)
    write("preferences", compared)
    write("prompts", PROMPTS)
    write("held_out", judged, REFERENCE_CARE)


def write_model(folder: Path, seed: int) -> None:
    """A tokenizer with one token per word, and a transformer with 0.17 million weights."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary = {word: i for i, word in enumerate([PAD, EOS, *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=PAD, eos_token=EOS, padding_side="left"
    )
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        # larger heads and RoPE base leave dimensions unrotated by position, for matching words
        num_attention_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_preferences(folder: Path, seed: int, answers: Path) -> None:
    """Write an annotator's choices between two answers per post; equal answers are skipped."""
    rng = random.Random(f"preferences {seed}")
    rows = read_objects(answers)
    pairs = []
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        post = read_post(first["prompt"])
        both = [first["completion"], second["completion"]]
        compared = [(both[0], both[1], "two answers")]
        compared += [(answer, *add_mistake(post, answer, rng)) for answer in both]
        for one, other, kind in compared:
            if one != other:
                better, worse = sorted((one, other), key=lambda text: -rate(post, text, rng))
                pair = {"prompt": post.text, "chosen": better, "rejected": worse}
                pairs.append(pair | {"kind": kind})
    rng.shuffle(pairs)
    write_jsonl(folder / "pairs.jsonl", pairs)
    print(f"{len(pairs)} preference pairs")


def check_exchanges(folder: Path, seed: int, reward: Path) -> None:
    """Score correct summaries of new posts, and copies with one value of a fact exchanged.

    ``kedge reward`` tests each kind of mistake.  A model that notices almost all wrong places may
    still confuse two of them, and PPO exploits that.
    """
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    from kedge.rewards.model import RewardModel

    rng = random.Random(f"exchanges {seed}")
    names, texts = [], []
    for kind, values in FACTS.items():
        for right, wrong in permutations(values, 2):
            for _ in range(POSTS):
                post = write_post(rng)
                text = post.text.replace(f" {post.facts[kind]} ", f" {right} ")
                facts = {**post.facts, kind: right}
                names.append(f"{wrong} for {right}")
                both = (replace(post, facts=told) for told in (facts, {**facts, kind: wrong}))
                texts += [text + write_summary(told, rng, care=1.0) for told in both]
    model = AutoModelForSequenceClassification.from_pretrained(reward)
    tokenizer = AutoTokenizer.from_pretrained(reward)
    scores = RewardModel(model).score_texts(texts, tokenizer).tolist()
    seen: dict[str, float] = dict.fromkeys(names, 0.0)
    for name, one, other in zip(names, scores[::2], scores[1::2], strict=True):
        seen[name] += (one > other) / POSTS
    blind = sorted((share, name) for name, share in seen.items() if share <= BLIND)
    text = json.dumps({name: round(share, 3) for name, share in seen.items()}, indent=1)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "exchanges.json").write_text(text + "\n")
    worst = ", ".join(name for _, name in blind[:6]) + (", ..." if len(blind) > 6 else "")
    print(f"the reward model misses {len(blind)} of {len(seen)} wrong values", end="")
    print(f": {worst}; PPO may learn to say them" if blind else "")
