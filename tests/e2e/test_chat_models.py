"""Chat models of six families: what is sampled, where it ends, and what the reward model reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from kedge import PPOConfig, PPOTrainer
from kedge.testing import ScriptedRollouts, tiny_policy
from tests.environments.families import FAMILIES, tokenizer

CHAT = [{"role": "user", "content": "what is the sum of the numbers 17 and 25"}]
ANSWER = "the answer is 42"


class Reader(nn.Module):
    """A reward model that records the rows it reads, without padding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))
        self.rows: list[list[int]] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        for ids, mask in zip(input_ids, attention_mask.bool(), strict=True):
            self.rows.append(ids[mask].tolist())
        return attention_mask.sum(1, keepdim=True) * self.weight


class Scripted(ScriptedRollouts):
    """Scripted responses, and the sampling that was asked for."""

    def generate(self, prompts: Any, **options: Any) -> Any:
        self.prompts, self.sampling = prompts, options["sampling"]
        return super().generate(prompts, **options)


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_ends_and_scored_rows_are_those_of_the_template(
    family: str, tmp_path: Path
) -> None:
    tok = tokenizer(family)
    end = tok.convert_tokens_to_ids(FAMILIES[family].end)
    model = tiny_policy("llama", vocab_size=len(tok), max_positions=512)
    model.generation_config = GenerationConfig(eos_token_id=[tok.eos_token_id, end])
    answer: list[int] = tok(ANSWER, add_special_tokens=False)["input_ids"]
    script = [[*answer, end, 7], [*answer, *answer], [*answer, tok.eos_token_id]]
    rollouts, reader = Scripted([script]), Reader()
    trainer = PPOTrainer(
        PPOConfig(
            output_dir=str(tmp_path), use_cpu=True, report_to="none", disable_tqdm=True,
            per_device_train_batch_size=3, total_episodes=3, num_ppo_epochs=1, preflight=False,
            response_length=2 * len(answer), logging_steps=1, num_sample_generations=0,
            save_strategy="no", value_source="policy",
        ),
        processing_class=tok,
        model=model,
        reward_model=reader,
        train_dataset=[{"prompt": CHAT}] * 3,
        rollout_engine=rollouts,
    )  # fmt: skip
    trainer.train()

    def render(messages: list[dict[str, str]], **options: Any) -> list[int]:
        text = tok.apply_chat_template(messages, tokenize=False, **options)
        return tok(text, add_special_tokens=False)["input_ids"]

    # Sampled: the prompt of the template, with one BOS.
    prompt = render(CHAT, add_generation_prompt=True)
    for ids, mask in zip(rollouts.prompts.ids, rollouts.prompts.mask, strict=True):
        assert ids[mask].tolist() == prompt
    assert prompt.count(tok.bos_token_id) == (FAMILIES[family].bos is not None)
    # Ended: by the end of a turn and by the end of the text.
    assert set(rollouts.sampling.stop_ids) == {tok.eos_token_id, end}
    # Scored: what was sampled, closed as the template closes it, but for a response cut off.
    whole = render([*CHAT, {"role": "assistant", "content": ANSWER}])
    tail = whole[len(whole) - whole[::-1].index(answer[-1]) :]
    closed, cut_off = [*prompt, *answer, *tail], [*prompt, *answer, *answer]
    assert sorted(reader.rows) == sorted([closed, closed, cut_off])
    assert tail[0] == end
