"""A program in the form that TRL's own scripts had, with nothing but its imports changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from kedge.classic import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    PPOConfig,
    PPOTrainer,
    set_seed,
)
from kedge.classic.core import LengthSampler
from tests.classic_models import gpt2, letters, t5


@dataclass
class ScriptArguments:
    use_seq2seq: bool = field(default=False)
    trust_remote_code: bool = field(default=False)


def build_dataset(tokenizer: Any) -> Any:
    from datasets import Dataset

    texts = ["a b c d e f", "g h i j k l", "m n o p q r", "s t u v w x"] * 6
    ds = Dataset.from_dict({"review": texts})
    input_size = LengthSampler(2, 4)

    def tokenize(sample: dict[str, Any]) -> dict[str, Any]:
        sample["input_ids"] = tokenizer.encode(sample["review"])[: input_size()]
        sample["query"] = tokenizer.decode(sample["input_ids"])
        return sample

    ds = ds.map(tokenize, batched=False)
    ds.set_format(type="torch")
    return ds


def collator(data: list[dict[str, Any]]) -> dict[str, list[Any]]:
    return {key: [d[key] for d in data] for key in data[0]}


@pytest.mark.filterwarnings("ignore:the KL to the reference")
@pytest.mark.parametrize("seq2seq", [False, True])
def test_sentiment_script(seq2seq: bool, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from transformers import AutoTokenizer, HfArgumentParser

    (t5() if seq2seq else gpt2()).save_pretrained(tmp_path / "model")
    letters(28).save_pretrained(tmp_path / "model")
    line = ["--model_name", str(tmp_path / "model"), "--batch_size", "8", "--mini_batch_size", "4"]
    line += ["--log_with", "tensorboard", "--project_kwargs", f'{{"logging_dir": "{tmp_path}"}}']
    line += ["--use_seq2seq"] if seq2seq else []
    parser = HfArgumentParser((ScriptArguments, PPOConfig))
    args, ppo_config = parser.parse_args_into_dataclasses(line)
    set_seed(ppo_config.seed)
    kind = AutoModelForCausalLMWithValueHead
    if args.use_seq2seq:
        kind = AutoModelForSeq2SeqLMWithValueHead
    options = {"trust_remote_code": args.trust_remote_code}
    model = kind.from_pretrained(ppo_config.model_name, **options)
    ref_model = kind.from_pretrained(ppo_config.model_name, **options)
    tokenizer = AutoTokenizer.from_pretrained(ppo_config.model_name)
    tokenizer.pad_token_id = tokenizer.eos_token_id
    dataset = build_dataset(tokenizer)
    ppo_trainer = PPOTrainer(
        ppo_config, model, ref_model, tokenizer, dataset=dataset, data_collator=collator
    )
    generation_kwargs = {
        "min_length": -1,
        "top_k": 0.0,
        "top_p": 1.0,
        "do_sample": True,
        "pad_token_id": tokenizer.eos_token_id,
        "max_new_tokens": 6,
    }
    for batch in ppo_trainer.dataloader:
        query_tensors = batch["input_ids"]
        response_tensors, ref_response_tensors = ppo_trainer.generate(
            query_tensors, return_prompt=False, generate_ref_response=True, **generation_kwargs
        )
        batch["response"] = tokenizer.batch_decode(response_tensors)
        batch["ref_response"] = tokenizer.batch_decode(ref_response_tensors)
        rewards = [torch.tensor(float(len(r))) for r in response_tensors]
        batch["ref_rewards"] = [torch.tensor(float(len(r))) for r in ref_response_tensors]
        stats = ppo_trainer.step(query_tensors, response_tensors, rewards)
        ppo_trainer.log_stats(
            stats,
            batch,
            rewards,
            columns_to_log=["query", "response", "ref_response", "ref_rewards"],
        )
    assert ppo_trainer.current_step == 3
    assert stats["objective/kl"] != 0
    ppo_trainer.accelerator.end_training()
