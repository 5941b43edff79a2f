"""Special tokens that say something reach rewards and environments; those that end texts do not."""

from __future__ import annotations

from typing import Any

import pytest

from kedge.rewards.texts import Texts
from kedge.testing import ScriptedRollouts, tiny_policy
from tests.environments.toys import CHAT, Echo, chat_tokenizer
from tests.unit.text_toys import EOS, PAD, rollout_of, word_tokenizer

from .small import rows, small

ANSWER, TURN_END = 32, 33


def with_tags(tokenizer: Any) -> Any:
    tokenizer.add_special_tokens({"additional_special_tokens": ["<answer>", "<turn_end>"]})
    assert tokenizer.convert_tokens_to_ids(["<answer>", "<turn_end>"]) == [ANSWER, TURN_END]
    return tokenizer


class Listener(Echo):
    def step(self, response: Any) -> Any:
        score = float(response.text.split() == ["w10", "<answer>", "w11"])
        return None, score, True, False, {}


def tag_reward(completions: Any, **_: Any) -> list[float]:
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [float(text.split() == ["w10", "<answer>", "w11"]) for text in texts]


@pytest.mark.parametrize("end", [EOS, TURN_END])
@pytest.mark.parametrize("kind", ["text", "chat", "environment"])
def test_an_added_tag_is_seen_and_what_ends_a_response_is_not(kind: str, end: int) -> None:
    tokenizer = with_tags(word_tokenizer() if kind == "text" else chat_tokenizer())
    chats = [{"prompt": prompt} for prompt in CHAT]
    first, last = tokenizer.convert_tokens_to_ids(["w10", "w11"])
    script = [[first, ANSWER, last, end]]
    options: dict[str, Any] = {} if kind == "text" else {"train_dataset": chats}
    options |= {"environment": Listener} if kind == "environment" else {"reward_funcs": tag_reward}
    trainer = small(
        model=tiny_policy("llama", vocab_size=34, max_positions=256),
        processing_class=tokenizer,
        reward_model=None,
        rollout_engine=ScriptedRollouts([script * 4]),
        stop_token="eos",
        stop_token_ids=[TURN_END],
        total_episodes=4,
        num_ppo_epochs=1,
        preflight=False,
        **options,
    )
    trainer.train()
    assert rows(trainer)[0]["objective/scores"] == 1.0


def test_tokens_that_fill_a_text_are_left_out_next_to_tags() -> None:
    tokenizer = with_tags(word_tokenizer())
    rollout = rollout_of([([5, 6], [PAD, 7, ANSWER, EOS, 8, TURN_END]), ([5, 6], [7, 8])])
    assert Texts(rollout, tokenizer, ends=[TURN_END]).completion_texts == [
        " w7 <answer> w8",
        " w7 w8",
    ]
    assert "<turn_end>" in Texts(rollout, tokenizer).completion_texts[0]
