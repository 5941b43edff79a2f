"""The examples on the page about vLLM run."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.contract.engines import needs_vllm

pytestmark = needs_vllm
PAGE = Path(__file__).parents[2] / "docs" / "vllm.md"


def test_the_examples_run(shared, tmp_path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    place = shared / "data" / "stories-head32"
    lines = (shared / "data" / "story-prompts" / "train.jsonl").read_text().splitlines()[:32]
    training, by_hand = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    model = AutoModelForCausalLM.from_pretrained(place)
    names = {
        "output_dir": str(tmp_path),
        "model": model,
        "tokenizer": AutoTokenizer.from_pretrained(place, padding_side="left"),
        "reward": lambda completions, **_: [text.count("e") / 10 for text in completions],
        "prompts": [{"prompt": json.loads(line)["prompt"]} for line in lines],
    }
    exec(training, names)
    assert names["trainer"].engine.step == 4
    names["trainer"].engine.rollout_engine.close()
    exec(by_hand, names)
    assert names["rollout"].ids.shape == (1, 8)
