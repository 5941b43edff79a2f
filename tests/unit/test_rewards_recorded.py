"""The reward model gives the scores that another implementation recorded."""

from __future__ import annotations

import json

import pytest

from kedge.rewards import Mixture, RewardModel

from .text_toys import EOS, rollout_of


@pytest.mark.parametrize(("case", "penalty"), [("default", 1.0), ("no_eos", None)])
def test_recorded_scores(shared, case, penalty):
    from transformers import AutoModelForSequenceClassification

    where = shared / "golden" / "ppo_v2" / case
    record = json.loads((where / "record.json").read_text())
    assert record["config"].get("missing_eos_penalty") == penalty
    model = AutoModelForSequenceClassification.from_pretrained(where / "reward")
    reward = RewardModel(model, chunk_rows=3)
    source = Mixture([("reward", reward, 1.0)], missing_eos_penalty=penalty)
    for step in record["steps"]:
        cut = [r[: r.index(EOS) + 1] if EOS in r else r for r in step["responses"]]
        pairs = list(zip(step["queries"], cut, strict=True))
        mean = float(source.score(rollout_of(pairs, extra=2)).scores.mean())
        assert mean == pytest.approx(step["metrics"]["objective/scores"], rel=2e-4, abs=1e-4)
