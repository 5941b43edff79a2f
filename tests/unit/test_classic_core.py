"""The functions that programs import from ``trl.core``;
``kedge.compat``: TRL's names, without hiding what the installed TRL has.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from importlib.metadata import DistributionFinder
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from kedge.ext.trl.classic import (
    core,
    respond_to_batch,
)
from kedge.ext.trl.compat import APIS, NameFinder, install, uninstall
from kedge.ext.trl.compat.__main__ import detect_api
from kedge.ext.trl.compat.__main__ import main as compat_main
from kedge.records.errors import ConfigError, OptionError
from tests import processes
from tests.classic_models import gpt2


def test_logprobs_and_entropy() -> None:
    logits = torch.tensor([[[0.0, np.log(3.0)], [1.0, 1.0]]]).float()
    labels = torch.tensor([[1, 0]])
    want = torch.tensor([[np.log(0.75), np.log(0.5)]], dtype=torch.float32)
    torch.testing.assert_close(core.logprobs_from_logits(logits, labels), want)
    every = core.logprobs_from_logits(logits, labels, gather=False)
    torch.testing.assert_close(every.exp().sum(-1), torch.ones(1, 2))
    entropy = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25))
    torch.testing.assert_close(
        core.entropy_from_logits(logits)[0].float(), torch.tensor([entropy, np.log(2.0)]).float()
    )


def test_masked_reductions() -> None:
    x = torch.tensor([[1.0, 2.0, 100.0], [3.0, 100.0, 100.0]])
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    assert float(core.masked_mean(x, mask)) == 2.0
    assert core.masked_mean(x, mask, axis=1).tolist() == [1.5, 3.0]
    assert float(core.masked_var(x, mask)) == 1.0
    assert float(core.masked_var(x, mask, unbiased=False)) == pytest.approx(2 / 3)
    white = core.masked_whiten(x, mask)[mask.bool()]
    torch.testing.assert_close(white, torch.tensor([-1.0, 0.0, 1.0]))
    kept = core.masked_whiten(x, mask, shift_mean=False)[mask.bool()]
    torch.testing.assert_close(kept, torch.tensor([1.0, 2.0, 3.0]))
    torch.testing.assert_close(core.whiten(torch.tensor([1.0, 2.0, 3.0])), white)
    low = torch.tensor([-1.0, 0.5, 0.0])
    clipped = core.clip_by_value(torch.tensor([-2.0, 0.0, 2.0]), low, 1.0)
    assert clipped.tolist() == [-1.0, 0.5, 1.0]
    for empty in (torch.zeros(2, 3), torch.tensor([[1, 0, 0], [0, 0, 0]])):
        with pytest.raises(ValueError, match="the variance needs at least"):
            core.masked_var(x, empty)


def test_dictionaries() -> None:
    nested = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert core.flatten_dict(nested) == {"a/b": 1, "a/c/d": 2, "e": 3}
    assert core.flatten_dict(nested, sep=".")["a.c.d"] == 2
    with pytest.raises(ValueError, match="the key 'x/y' contains the separator"):
        core.flatten_dict({"x/y": 1})
    stacked = core.stack_dicts([{"a": torch.ones(1, 2)}, {"a": torch.ones(3)}])
    assert stacked["a"].tolist() == [[1, 1, -1], [1, 1, 1]]
    found = core.stats_to_np({"a": torch.ones(2, dtype=torch.bfloat16), "b": 2, "c": "x"})
    assert found["a"].dtype == np.float32
    assert isinstance(found["b"], float)
    scalars = core.convert_to_scalar({"a": torch.ones(1), "b": np.ones(()), "c": torch.ones(2)})
    assert scalars["a"] == scalars["b"] == 1.0
    assert len(scalars["c"]) == 2


def test_top_k_and_top_p() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.3, 0.4]]).log()
    assert core.top_k_top_p_filtering(logits, top_k=2).isfinite().tolist() == [[0, 0, 1, 1]]
    assert core.top_k_top_p_filtering(logits, top_p=0.5).isfinite().tolist() == [[0, 0, 1, 1]]
    assert core.top_k_top_p_filtering(logits, top_p=0.3).isfinite().tolist() == [[0, 0, 0, 1]]
    kept = core.top_k_top_p_filtering(logits, top_p=0.0, min_tokens_to_keep=3)
    assert kept.isfinite().tolist() == [[0, 1, 1, 1]]
    assert torch.equal(core.top_k_top_p_filtering(logits), logits)


def test_respond_to_batch() -> None:
    torch.manual_seed(0)
    rows = respond_to_batch(gpt2().eval(), torch.tensor([[3, 4], [5, 6]]), txt_len=5, top_k=3)
    assert rows.shape == (2, 5)


def test_the_cache_decorator_runs_the_block() -> None:
    class Model(nn.Module):
        @core.PPODecorators.empty_device_cache()
        def step(self) -> int:
            return 3

    assert Model().step() == 3
    core.PPODecorators.optimize_device_cache = True
    try:
        assert Model().step() == 3
    finally:
        core.PPODecorators.optimize_device_cache = False


def test_every_name_of_the_package_is_there() -> None:
    from kedge.ext.trl import classic

    for name in classic.__all__:
        assert getattr(classic, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'DPOTrainer'; it has"):
        classic.DPOTrainer  # noqa: B018


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
def test_the_api_of_a_program(text: str, api: str, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(text)
    assert detect_api(script) == api


def test_an_option_of_another_release_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script = tmp_path / "train.py"
    script.write_text("from trl import PPOConfig\nPPOConfig(model_name='gpt2')")
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.setattr("sys.argv", [*sys.argv])
    try:
        with pytest.raises(OptionError, match="no option 'model_name'"):
            compat_main(["run", "--replace", str(script)])
    finally:
        uninstall()
    assert "run it with --api trl-0.11 (generate and step" in caplog.text


def test_unknown_api() -> None:
    with pytest.raises(
        ConfigError, match=r"api='trl-2' must be one of trl-0.11, trl-0.21, trl-1.12"
    ):
        install("trl-2")


SCRIPT = """
import sys
from importlib.metadata import version
from trl import PPOConfig, PPOTrainer, AutoModelForCausalLMWithValueHead, __version__
from trl.core import LengthSampler
from trl.models.utils import unwrap_model_for_generation
from transformers import pipeline
import kedge.ext.trl.classic
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

    from kedge.ext.trl.compat import older_transformers

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
    from kedge.ext.trl.compat.hf_trainer import PPOConfig, to_kedge_config

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
