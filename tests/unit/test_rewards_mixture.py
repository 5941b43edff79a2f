"""Several sources in one score, penalties for cut-off responses, and the builder."""

from __future__ import annotations

import asyncio
import sys

import pytest
import torch

from kedge.records.errors import ConfigError
from kedge.rewards import (
    Mixture,
    RewardFunction,
    RewardModel,
    RewardOptions,
    TextCache,
    reward_source,
)
from kedge.rewards.build import load_function
from kedge.testing import ConstantReward

from .text_toys import EOS, neox_reward, rollout_of, word_tokenizer

PAIRS = [([5, 6], [8, 9, EOS]), ([7], [10]), ([7], [11])]
TOKENIZER = word_tokenizer()


def gives(*values, name="given"):
    def reward(prompts):
        return [values[i] for i in range(len(prompts))]

    return RewardFunction(reward, TextCache(TOKENIZER), name=name)


def test_the_score_is_the_weighted_sum_and_parts_keep_each_source():
    mixed = Mixture([("a", gives(1, 2, 3), 2.0), ("b", gives(10, 0, -1), 0.5)])
    judged = mixed.score(rollout_of(PAIRS))
    assert judged.scores.tolist() == [7.0, 4.0, 5.5]
    assert judged.components["a"].tolist() == [1.0, 2.0, 3.0]
    assert judged.components["b"].tolist() == [10.0, 0.0, -1.0]
    assert judged.valid.all()


def test_sources_that_do_not_apply_are_skipped_and_rows_without_any_are_not_valid():
    sources = [("a", gives(1, None, None), 2.0), ("b", gives(10, 4, None), 1.0)]
    judged = Mixture(sources).score(rollout_of(PAIRS))
    assert judged.scores.tolist() == [12.0, 4.0, 0.0]
    assert judged.valid.tolist() == [True, True, False]
    assert judged.components["a"].isnan().tolist() == [False, True, True]


def test_a_row_that_one_source_failed_on_is_dropped_though_others_score_it():
    def fails(completion_ids):
        if [10] in completion_ids:
            raise ValueError
        return [1.0] * len(completion_ids)

    failing = RewardFunction(fails, TextCache(TOKENIZER), on_error="drop")
    judged = Mixture([("f", failing, 1.0), ("b", gives(1, 1, 1), 1.0)]).score(rollout_of(PAIRS))
    assert judged.valid.tolist() == [True, False, True]
    assert judged.scores[[0, 2]].tolist() == [2.0, 2.0]


def test_per_token_rewards_add_up_with_their_weights():
    dense = gives([1.0, 0.0, 2.0], None, [3.0])
    judged = Mixture([("d", dense, 2.0), ("e", dense, 1.0), ("s", gives(1, 1, 1), 1.0)]).score(
        rollout_of(PAIRS)
    )
    # They are part of the score at the last token, which gives back what stands on others.
    assert judged.token_rewards.tolist() == [[3.0, 0.0, -3.0], [0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert judged.scores.tolist() == [10.0, 1.0, 10.0]
    assert judged.components["d"][0] == 3.0


def test_mixtures_nest_and_names_are_made_unique():
    inner = Mixture([("a", gives(1, None, 1), 1.0), ("a", gives(2, None, 2), 1.0)])
    judged = Mixture([("in", inner, 10.0), ("x", gives(1, 1, 1), 1.0)]).score(rollout_of(PAIRS))
    assert judged.scores.tolist() == [31.0, 1.0, 31.0]
    assert judged.valid.all()  # the inner mixture does not apply to row 1; it has not failed
    assert sorted(judged.components) == ["in/a", "in/a_2", "x"]


def test_asynchronous_sources_wait_at_the_same_time():
    running, most = 0, 0

    async def slow(prompts):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.01)
        running -= 1
        return [1.0] * len(prompts)

    texts = TextCache(TOKENIZER)
    mixed = Mixture([(f"s{i}", RewardFunction(slow, texts), 1.0) for i in range(4)])
    assert mixed.score(rollout_of(PAIRS)).scores.tolist() == [4.0] * 3
    assert most == 4


def test_a_penalty_subtracts_from_or_replaces_the_score_of_cut_off_rows():
    rollout = rollout_of(PAIRS, finished=[True, False, True])  # row 2 ended at another stop token
    given = [("given", gives(1, 2, 3), 1.0)]
    less = Mixture(given, missing_eos_penalty=0.75).score(rollout)
    assert less.scores.tolist() == [1.0, 1.25, 3.0]
    assert less.components["given"].tolist() == [1.0, 2.0, 3.0]
    other = Mixture(given, non_eos_penalty=True, penalty_reward_value=-4.0)
    assert other.score(rollout).scores.tolist() == [1.0, -4.0, 3.0]
    zero = Mixture(given, missing_eos_penalty=0.0).score(rollout)
    assert zero.scores.tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(ConfigError, match="at least one reward source"):
        Mixture([])


def two(prompts):
    return [2.0] * len(prompts)


def build(model=None, functions=None, *, device=None, **options):
    how = RewardOptions(policy_tokenizer=TOKENIZER, **options)
    return reward_source(model, functions, how, device=device)


def test_the_builder_mixes_models_functions_and_sources():
    model = neox_reward()
    rollout = rollout_of(PAIRS, finished=[True, False, True])
    alone = RewardModel(model).score(rollout).scores
    source = build(
        model,
        [two, lambda prompts: [1, 1, None], two, ConstantReward(5.0)],
        weights=[3.0, 1.0, 1.0, 10.0, 1.0],
        missing_eos_penalty=100.0,
        models={"chunk_rows": 2},
        device=torch.device("cpu"),
    )
    judged = source.score(rollout)
    want = alone * 3 + 2 + torch.tensor([1.0, 1.0, 0.0]) + 20 + 5 - torch.tensor([0.0, 100.0, 0.0])
    assert torch.allclose(judged.scores, want, atol=1e-4)
    assert list(judged.components)[:4] == [
        "GPTNeoXForSequenceClassification",
        "two",
        "lambda",
        "two_2",
    ]


def test_which_columns_are_read_is_known():
    def one(prompts, answer, level=2):
        return [0.0] * len(prompts)

    def open_ended(**columns):
        return [0.0]

    assert build(neox_reward(), [one, two], missing_eos_penalty=1.0).info.columns == {
        "answer",
        "level",
    }
    assert build(None, [one, open_ended]).info.columns is None
    assert build(None, [one, ConstantReward(1.0)]).info.columns is None  # it may read anything


def test_functions_by_name(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "class Scores:\n"
        "    @staticmethod\n"
        "    def one(prompts):\n"
        "        return [1.0] * len(prompts)\n"
        "def half(prompts):\n"
        "    return [0.5] * len(prompts)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    funcs = [f"{tmp_path}/my_rewards.py:half", "my_rewards:Scores.one"]
    judged = build(None, funcs).score(rollout_of(PAIRS))
    assert judged.scores.tolist() == [1.5] * 3
    assert list(judged.components) == ["half", "one"]


def test_models_by_path_bring_their_tokenizer(tmp_path):
    model, own = neox_reward(), word_tokenizer([f"w{i}" for i in range(31, 2, -1)])
    model.save_pretrained(tmp_path / "judge")
    same = build(tmp_path / "judge").score(rollout_of(PAIRS))
    assert torch.allclose(
        same.scores, RewardModel(model).score(rollout_of(PAIRS)).scores, atol=1e-5
    )
    assert list(same.components) == ["judge"]
    own.save_pretrained(tmp_path / "judge")
    other = build(str(tmp_path / "judge")).score(rollout_of(PAIRS))
    want = RewardModel(model, own, texts=TextCache(TOKENIZER)).score(rollout_of(PAIRS))
    assert torch.allclose(other.scores, want.scores, atol=1e-5)
    assert not torch.allclose(other.scores, same.scores, atol=1e-2)
    given = build(model, two, tokenizers=[own, None]).score(rollout_of(PAIRS))
    assert torch.allclose(given.scores, want.scores + 2, atol=1e-5)


def test_a_checkpoint_without_a_head_is_refused(tmp_path):
    from transformers import GPTNeoXForCausalLM

    GPTNeoXForCausalLM(neox_reward().config).save_pretrained(tmp_path / "base")
    with pytest.raises(ConfigError, match=r"has no score head .*GPTNeoXForCausalLM"):
        build(str(tmp_path / "base"))


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((), {}, "no reward is configured: pass reward_model or reward_funcs"),
        ((None, []), {}, "no reward is configured"),
        ((None, [two, two]), {"weights": [1.0]}, "one number per reward source .*: got 1 for 2"),
        ((3,), {}, r"a reward must be a model, .* got int \(3\)"),
        ((None, "no_such_module:f"), {}, "cannot import 'no_such_module'"),
        ((None, "no_such_file.py:f"), {}, "file not found: .*no_such_file.py"),
        ((None, "math:no_such"), {}, "'math' has no function 'no_such'; it has .*sqrt"),
        (("./no/such/model",), {}, "reward model './no/such/model' cannot be loaded"),
        ((neox_reward(vocab=20),), {}, "has 20 tokens, but the policy's tokenizer has 32"),
        ((None, [two, two]), {"tokenizers": [TOKENIZER]}, "1 tokenizers for 0 reward models"),
    ],
)
def test_what_the_builder_refuses(args, options, message):
    with pytest.raises(ConfigError, match=message):
        build(*args, **options)


def test_a_file_may_import_its_neighbors(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.path", [*sys.path])
    (tmp_path / "kedge_neighbor.py").write_text("def one(completions, **_):\n    return [1.0]\n")
    (tmp_path / "reward.py").write_text("from kedge_neighbor import one\n")
    assert load_function(f"{tmp_path}/reward.py:one")([""]) == [1.0]


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises(ConfigError, match=r"broken.py' \(SyntaxError"):
        build(None, f"{tmp_path}/broken.py:f")
    neox_reward().save_pretrained(tmp_path / "judge")
    (tmp_path / "judge" / "model.safetensors").write_bytes(b"not a tensor file")
    with pytest.raises(ConfigError, match="judge' cannot be loaded: "):
        build(tmp_path / "judge")
    torch.save({}, tmp_path / "judge" / "pytorch_model.bin")
    (tmp_path / "judge" / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"judge' cannot be loaded: .*safetensors"):
        build(tmp_path / "judge")  # a pickle is never opened
