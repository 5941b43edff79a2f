"""The pages of options say what the code does."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import transformers
from docs.generate import CONFIGS, options_page

from kedge.config.base import foreign

PAGES = Path(__file__).parents[2] / "docs" / "reference"


def skip_if_made_with_another_release():
    page = (PAGES / "options.md").read_text()
    made_with = re.search(r"here with transformers (\S+)\.", page)[1]
    if made_with != transformers.__version__:
        pytest.skip(f"the page was made with transformers {made_with}")


@pytest.mark.parametrize("column", CONFIGS)
def test_every_name_has_one_cell_in_the_column_of_its_config(column):
    place = 2 + list(CONFIGS).index(column)
    rows = [line.split(" | ") for line in options_page().splitlines() if line.startswith("| `")]
    names = [row[0].strip("|` ") for row in rows if row[place - 1] != "-"]
    expected = [*(f.name for f in fields(CONFIGS[column])), *foreign(CONFIGS[column])]
    assert sorted(names) == sorted(expected)


def test_what_learning_depends_on_comes_first():
    page = options_page()
    names = ["learning_rate", "response_length", "ray_engine", "logging_dir"]
    found = [page.index(f"| `{name}` |") for name in names]
    assert found[0] < found[1] < found[2]
    assert found[1] < found[3]


def test_the_page_is_current():
    written = (PAGES / "options.md").read_text()
    skip_if_made_with_another_release()
    assert written == options_page(), "python docs/generate.py"
