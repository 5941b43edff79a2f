"""The pages of options say what the code does."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import transformers
from docs.generate import CONFIGS, HELP, help_text, options_page

from kedge.cli.flags import stored_help
from kedge.config.options import foreign

PAGES = Path(__file__).parents[2] / "docs" / "reference"


def skip_if_made_with_another_release():
    page = (PAGES / "ppo_config.md").read_text()
    made_with = re.search(r"here with transformers (\S+)\.", page)[1]
    if made_with != transformers.__version__:
        pytest.skip(f"the page was made with transformers {made_with}")


@pytest.mark.parametrize("file", CONFIGS)
def test_every_name_is_on_the_page_once(file):
    lines = options_page(CONFIGS[file]).splitlines()
    for name in (*(f.name for f in fields(CONFIGS[file])), *foreign(CONFIGS[file])):
        assert sum(line.startswith(f"| `{name}` |") for line in lines) == 1, name


@pytest.mark.parametrize("file", CONFIGS)
def test_what_learning_depends_on_comes_first(file):
    page = options_page(CONFIGS[file])
    names = ["learning_rate", "response_length", "ray_engine", "logging_dir"]
    found = [page.index(f"| `{name}` |") for name in names]
    assert found[0] < found[1] < found[2]
    assert found[1] < found[3]


@pytest.mark.parametrize("file", CONFIGS)
def test_the_page_is_current(file):
    written = (PAGES / file).read_text()
    skip_if_made_with_another_release()
    assert written == options_page(CONFIGS[file]), "python docs/generate.py"


@pytest.mark.parametrize("command", HELP)
def test_the_stored_help_is_what_the_flags_say(command):
    skip_if_made_with_another_release()
    stored = stored_help(command, ["--help"])
    # Releases of Python break lines differently.
    assert stored.split() == help_text(command).split(), "python docs/generate.py"


def test_the_stored_help_is_for_the_short_list_alone():
    assert stored_help("ppo", ["--help", "all"]) is None
    assert stored_help("ppo", ["--learning_rate", "1"]) is None
    assert stored_help("generate", ["--help"]) is None


def test_the_help_of_a_plan_is_that_of_its_command():
    ppo, plan = (stored_help(*words) for words in (("ppo", ["-h"]), ("plan", ["ppo", "-h"])))
    first, _, rest = plan.partition("\n")
    assert (
        first == "usage: kedge plan ppo [--num_processes N] [--config FILE.yaml] [--flag value ...]"
    )
    assert rest == ppo.partition("\n")[2]
