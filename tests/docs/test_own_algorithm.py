"""The algorithm on the docs page trains."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.e2e.small import length_reward, rows, small

PAGE = Path(__file__).parents[2] / "docs" / "own-algorithm.md"


def test_it_trains() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    names: dict[str, Any] = {}
    exec(code, names)
    trainer = small(
        algorithm=names["reinforce"](),
        num_generations=4,
        per_device_train_batch_size=16,
        total_episodes=16 * 12,
        reward_model=None,
        reward_funcs=length_reward,
        learning_rate=1e-2,
        kl_coef=0.01,
    )
    trainer.train()
    assert trainer.value_model is None
    first, last = rows(trainer)[:2], rows(trainer)[-2:]
    gain = sum(r["objective/scores"] for r in last) - sum(r["objective/scores"] for r in first)
    assert gain > 0.5


def test_the_readme_example_runs(tmp_path: Path) -> None:
    from kedge.testing import tiny_policy
    from tests.unit.text_toys import word_tokenizer

    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    tokenizer = word_tokenizer(
        ["Tell", "me", "about", "kites.", "Why", "is", "the", "sea", "salty?"]
    )
    tiny_policy("gpt_neox", vocab_size=len(tokenizer)).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    code = code.replace("path/or/name/of/a/causal/model", str(tmp_path / "model"))
    code = code.replace("runs/brief", str(tmp_path / "out")).replace("2048", "64")
    code = code.replace('stop_token="eos"', 'stop_token="eos", use_cpu=True, disable_tqdm=True')
    exec(code, {})
    assert (tmp_path / "out" / "model.safetensors").is_file()
    assert (tmp_path / "out" / "value_model" / "value_head.safetensors").is_file()
