"""A reward model with LoRA adapters is scored like any other."""

from __future__ import annotations

import pytest
import torch

from kedge.rewards import RewardModel

from .text_toys import EOS, neox_reward, rollout_of

PAIRS = [([5, 6, 7], [8, 9, EOS]), ([10], [11])]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_adapters_and_the_last_real_token():
    peft = pytest.importorskip("peft")
    plain = RewardModel(neox_reward()).score(rollout_of(PAIRS)).scores
    model = peft.get_peft_model(
        neox_reward(), peft.LoraConfig(task_type="SEQ_CLS", r=2, init_lora_weights=False)
    )
    got = RewardModel(model).score(rollout_of(PAIRS, pad=EOS, extra=2)).scores
    assert not torch.allclose(got, plain, atol=1e-2)
    with torch.no_grad():  # rows without padding, last token not the pad token: its own forward
        want = float(model.eval()(torch.tensor([[10, 11]])).logits)
    assert float(got[1]) == pytest.approx(want, abs=1e-5)
