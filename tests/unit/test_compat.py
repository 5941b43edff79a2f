"""``kedge.compat``: TRL's names, without hiding what the installed TRL has."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib.metadata import DistributionFinder
from pathlib import Path
from typing import Any

import pytest

from kedge.compat import APIS, NameFinder, install
from kedge.compat.__main__ import detect_api
from kedge.errors import ConfigError
from tests import processes

OURS = "kedge.math.kl:k1"
TABLE = {
    "fake": {"PPOTrainer": OURS, "DPOTrainer": OURS, "lazily": OURS},
    "fake.core": {"k1": OURS},
    "fake.missing": {"k1": OURS},
    "fake.missing.deep": {"k1": OURS},
}
LAZY = """
import sys, types
class Lazy(types.ModuleType):
    def __dir__(self): return [*super().__dir__(), "lazily"]
    def __getattr__(self, name):
        if name == "lazily": return "theirs"
        raise AttributeError(f"module {self.__name__} has no attribute {name}")
module = Lazy(__name__)
module.__path__, module.__spec__, module.DPOTrainer = __path__, __spec__, "theirs"
sys.modules[__name__] = module
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Imports ``fake`` with the names of a table, as ``install`` does for ``trl``."""
    package = tmp_path / "fake"
    package.mkdir()
    (package / "__init__.py").write_text(LAZY)
    (package / "core.py").write_text("def k1(): return 'theirs'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))

    def load(replace: bool = False) -> Any:
        finder = NameFinder(TABLE, "0.11.4", replace=replace, report_version=False)
        sys.meta_path.insert(0, finder)
        importlib.invalidate_caches()
        return importlib.import_module("fake")

    yield load
    for name in [n for n in sys.modules if n.split(".")[0] == "fake"]:
        del sys.modules[name]


def test_names_are_added_and_none_is_hidden(fake: Any) -> None:
    from kedge.math.kl import k1

    module = fake()
    assert module.PPOTrainer is k1
    assert (module.DPOTrainer, module.lazily) == ("theirs", "theirs")
    assert importlib.import_module("fake.core").k1() == "theirs"
    assert importlib.import_module("fake.missing").k1 is k1
    assert importlib.import_module("fake.missing.deep").__all__ == ["k1"]
    with pytest.raises(AttributeError, match="has no attribute SFTTrainer"):
        _ = module.SFTTrainer
    with pytest.raises(ImportError, match=r"cannot import name 'other' from 'fake\.missing'"):
        exec("from fake.missing import other")


def test_replace_puts_ours_in_their_place(fake: Any) -> None:
    from kedge.math.kl import k1

    module = fake(replace=True)
    assert module.PPOTrainer is module.DPOTrainer is module.lazily is k1
    assert importlib.import_module("fake.core").k1 is k1


@pytest.mark.parametrize("api", sorted(APIS))
def test_every_name_exists(api: str) -> None:
    targets = {target for names in APIS[api].values() for target in names.values()}
    for target in targets:
        module, name = target.split(":")
        assert getattr(importlib.import_module(module), name) is not None
    for name in APIS[api]:  # import of a module imports the packages above it
        assert name == "trl" or name.rpartition(".")[0] in APIS[api]


@pytest.mark.parametrize("installed", [False, True])
@pytest.mark.parametrize("report", [False, True])
def test_version(installed: bool, report: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    finder = NameFinder({"trl": {}}, "0.9.6", replace=False, report_version=report)
    monkeypatch.setattr(finder, "_installed", lambda *args: object() if installed else None)
    versions = [
        x.version for x in finder.find_distributions(DistributionFinder.Context(name="trl"))
    ]
    assert versions == (["0.9.6"] if report or not installed else [])
    assert not list(finder.find_distributions(DistributionFinder.Context(name="torch")))


@pytest.mark.parametrize(
    ("text", "api"),
    [
        ("from trl import AutoModelForCausalLMWithValueHead, PPOTrainer", "trl-0.11"),
        ("from trl.core import LengthSampler", "trl-0.11"),
        ("from trl import PPOv2Trainer", "trl-0.11"),
        ("from trl import PPOConfig, PPOTrainer, ScriptArguments", "trl-1.12"),
        ("from trl.experimental.ppo import PPOTrainer", "trl-1.12"),
    ],
)
def test_the_api_of_a_script(text: str, api: str) -> None:
    assert detect_api(text) == api


def test_unknown_api() -> None:
    with pytest.raises(ConfigError, match=r"api='trl-2' must be one of trl-0.11, trl-1.12"):
        install("trl-2")


SCRIPT = """
import sys
from importlib.metadata import version
from trl import PPOConfig, PPOTrainer, AutoModelForCausalLMWithValueHead, __version__
from trl.core import LengthSampler
from trl.models.utils import unwrap_model_for_generation
from transformers import pipeline
import kedge.classic
assert PPOTrainer is kedge.classic.PPOTrainer
assert __version__ == version("trl") == "0.9.6"
assert sys.argv[1:] == ["--flag", "x"]
print("ran", __name__)
"""


def test_a_script_runs(tmp_path: Path) -> None:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    command = ["-W", "ignore", "-m", "kedge.compat", "run"]
    done = processes.run(*command, "--report-version", "0.9.6", str(file), "--flag", "x")
    assert done.stdout == "ran __main__\n", done.stderr


def test_scores_of_all_labels_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.pipelines.text_classification import TextClassificationPipeline as Pipeline

    from kedge.compat import older_transformers

    before = Pipeline._sanitize_parameters
    monkeypatch.setattr(Pipeline, "_sanitize_parameters", before)
    older_transformers._restore_all_scores(Pipeline)
    older_transformers._restore_all_scores(Pipeline)  # once is enough
    pipeline = Pipeline.__new__(Pipeline)
    _, _, options = pipeline._sanitize_parameters(return_all_scores=True, function_to_apply="none")
    assert options["top_k"] is None
    assert "_legacy" not in options  # the labels are not sorted by score
    assert "top_k" not in pipeline._sanitize_parameters()[2]


def test_options_of_ms_swift_reach_the_trainer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from kedge.compat.hf_trainer import PPOConfig, to_kedge_config

    given = {
        **{"data_seed": 7, "ddp_timeout": 99, "load_best_model_at_end": True, "save_steps": 2},
        **{"metric_for_best_model": "reward", "save_only_model": True, "eval_on_start": True},
        **{"eval_strategy": "steps", "eval_steps": 2, "torch_compile_mode": "default"},
        **{"hub_private_repo": True, "greater_is_better": True, "temperature": 0.5},
    }
    swift = {"remove_unused_columns": False, "accelerator_config": {"dispatch_batches": False}}
    args = PPOConfig(output_dir=str(tmp_path), use_cpu=True, **given, **swift)
    passed = to_kedge_config(args)
    assert {name: getattr(passed, name) for name in given} == given
    assert "does not read" not in caplog.text
    to_kedge_config(PPOConfig(output_dir=str(tmp_path), use_cpu=True, neftune_noise_alpha=1.0))
    assert "Kedge does not read these options: neftune_noise_alpha" in caplog.text
