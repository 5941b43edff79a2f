"""What comes before reinforcement learning: tokenizer, supervised model, reward model."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from datasets import Dataset
from task import EOS, PAD, WORDS, Post, judge, write_post, write_summary
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from kedge.backends.hf.rollout import EmbeddedEngine
from kedge.types import PromptBatch, Sampling

CARE = 0.45  # of the writers whose summaries the supervised model learns from
EOS_TEXT = f" {EOS}"
FLIPPED = 0.1  # share of preference pairs that are labelled the wrong way round


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a word."""
    vocabulary = {word: i for i, word in enumerate([PAD, EOS, *WORDS])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token=PAD, eos_token=EOS, padding_side="left"
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> LlamaForCausalLM:
    """A transformer of 0.35 million weights."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=96,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            max_position_embeddings=128,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            tie_word_embeddings=False,
        )
    )


def supervise(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    *,
    rows: int,
    seed: int,
) -> None:
    """Train on posts and the summaries of careless writers, with TRL's supervised trainer."""
    from trl import SFTConfig, SFTTrainer

    rng = random.Random(f"supervised {seed}")
    posts = [write_post(rng) for _ in range(rows)]
    data = Dataset.from_list(
        [
            {"prompt": p.text, "completion": write_summary(p, rng, care=CARE) + EOS_TEXT}
            for p in posts
        ]
    )
    SFTTrainer(
        model,
        SFTConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=32,
            num_train_epochs=1,
            learning_rate=2e-3,
            lr_scheduler_type="cosine",
            warmup_steps=40,
            logging_steps=max(1, rows // 32 // 6),
            save_strategy="no",
            report_to="none",
            bf16=False,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            max_length=None,
            completion_only_loss=True,
            seed=seed,
            disable_tqdm=True,
        ),
        train_dataset=data,
        processing_class=tokenizer,
    ).train()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def write(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    posts: list[Post],
    *,
    seed: int,
    temperature: float = 0.7,
    length: int = 24,
) -> list[tuple[str, bool]]:
    """The model's summary of each post, and whether it came to an end."""
    batch = tokenizer([p.text for p in posts], return_tensors="pt", padding=True)
    rows = torch.arange(len(posts))
    prompts = PromptBatch(
        ids=batch["input_ids"], mask=batch["attention_mask"].bool(), group=rows, row=rows
    )
    engine = EmbeddedEngine(model, pad_id=tokenizer.pad_token_id, chunk_rows=256)
    sampling = Sampling(
        max_new_tokens=length, temperature=temperature, stop_ids=(tokenizer.eos_token_id,)
    )
    rollout = engine.generate(prompts, sampling=sampling, seed=seed)
    texts = [
        " " + tokenizer.decode(ids[mask], skip_special_tokens=True)
        for ids, mask in zip(rollout.ids, rollout.mask, strict=True)
    ]
    return list(zip(texts, rollout.finished.tolist(), strict=True))


def prefer(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, *, rows: int, seed: int
) -> Dataset:
    """Pairs of the model's summaries, the better one chosen, a few labelled the wrong way round."""
    rng = random.Random(f"preferences {seed}")
    posts = [write_post(rng) for _ in range(rows)]
    first, second = (
        write(model, tokenizer, posts, seed=seed * 2 + i, temperature=1.0) for i in range(2)
    )
    pairs = []
    for post, a, b in zip(posts, first, second, strict=True):
        marks = judge(post, a[0], ended=a[1]), judge(post, b[0], ended=b[1])
        if marks[0] == marks[1]:
            continue
        better, worse = (a, b) if (marks[0] > marks[1]) != (rng.random() < FLIPPED) else (b, a)
        pairs.append(
            {
                "prompt": post.text,
                "chosen": better[0] + EOS_TEXT * better[1],
                "rejected": worse[0] + EOS_TEXT * worse[1],
            }
        )
    return Dataset.from_list(pairs)


def train_reward(
    supervised: Path, tokenizer: PreTrainedTokenizerFast, pairs: Dataset, folder: Path, *, seed: int
) -> PreTrainedModel:
    """A reward model on the supervised model's weights, with TRL's reward trainer."""
    from trl import RewardConfig, RewardTrainer

    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(supervised, num_labels=1)
    RewardTrainer(
        model,
        RewardConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=32,
            num_train_epochs=2,
            learning_rate=5e-4,
            lr_scheduler_type="cosine",
            logging_steps=max(1, len(pairs) // 32 // 3),
            save_strategy="no",
            report_to="none",
            bf16=False,
            gradient_checkpointing=False,
            dataloader_pin_memory=False,
            max_length=None,
            disable_dropout=True,
            seed=seed,
            disable_tqdm=True,
        ),
        train_dataset=pairs,
        processing_class=tokenizer,
    ).train()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model
