"""The examples on the page about Ray run, and what it lists exists."""

from __future__ import annotations

import functools
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from kedge import PPOConfig
from kedge.testing import tiny_policy
from tests.e2e.small import PROMPTS, VOCAB, length_reward, small
from tests.on_ray.clusters import local, needs_ray
from tests.unit.text_toys import word_tokenizer

PAGE = (Path(__file__).parents[2] / "docs" / "ray.md").read_text(encoding="utf-8")


class TestExamples:
    pytestmark = needs_ray

    def test_they_run(self, tmp_path: Path, capsys: Any) -> None:
        local()
        engines, learners = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
        names: dict[str, Any] = {
            "output_dir": str(tmp_path),
            "model": tiny_policy("gpt_neox", vocab_size=VOCAB),
            "tokenizer": word_tokenizer(),
            "reward": length_reward,
            "prompts": PROMPTS,
        }
        exec(engines, names)
        assert names["trainer"].engine.step == 4
        names["trainer"].engine.rollout_engine.close()
        engine = {"rollout_engine": "ray", "ray_engine": "embedded", "vllm_num_engines": 2}
        names = {"make_trainer": functools.partial(small, **engine)}
        exec(learners, names)
        assert len(names["scores"]) == 1
        said = capsys.readouterr().out
        assert "bundle 0: CPU 2  learner 0, 1  on " in said
        assert "1 " in said


def test_options_exist() -> None:
    named = set(re.findall(r"`((?:ray|vllm|rollout)_[a-z_]+)\b", PAGE))
    assert named - {f.name for f in fields(PPOConfig)} - {"vllm_server"} == set()
    assert len(named) > 8
