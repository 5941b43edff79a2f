"""The page of options says what the code does."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import transformers

from kedge.config.ppo import PPOConfig
from kedge.config.reference import options_page

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "ppo_config.md"


def test_every_field_is_on_the_page_once():
    lines = options_page().splitlines()
    for field in fields(PPOConfig):
        assert sum(line.startswith(f"| `{field.name}` |") for line in lines) == 1, field.name


def test_the_page_is_current():
    written = PAGE.read_text()
    made_with = re.search(r"here with transformers (\S+)\.", written)[1]
    if made_with != transformers.__version__:
        pytest.skip(f"the page was made with transformers {made_with}")
    assert written == options_page(), "run: python -m kedge.config.reference > " + str(PAGE)
