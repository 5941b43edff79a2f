"""``kedge value``: a critic fitted on recorded rollouts, checked, and handed to PPO."""

from __future__ import annotations

import json

import pytest
import torch

from kedge.ext.before_rl import value
from kedge.ext.before_rl import value_command as command
from kedge.ext.before_rl.value import check_value, read_episodes
from kedge.loop import updater
from kedge.loop.stages import make_experience
from kedge.records.errors import DataError
from kedge.testing import tiny_policy
from tests.e2e.small import VOCAB, rows, small
from tests.environments.test_new_contexts import Compact
from tests.environments.toys import Odd, chat_tokenizer, played
from tests.unit.text_toys import EOS, word_tokenizer

PROMPTS = [{"prompt": f"w{3 + i // 4}" + " w3" * (i % 4)} for i in range(64)]


def by_prompt(prompts, completions, **_):
    """A return that the prompt decides, so that a critic can know it."""
    return [float(len(p.split())) for p in prompts]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A policy, and a folder with 64 of its responses."""
    folder = tmp_path_factory.mktemp("value")
    tiny_policy("gpt_neox", vocab_size=VOCAB, eos_token_id=EOS).save_pretrained(folder / "policy")
    word_tokenizer().save_pretrained(folder / "policy")
    options = {"learning_rate": 1e-9, "kl_coef": 0.0, "total_episodes": 64}
    trainer = small(
        **options,
        model=str(folder / "policy"),
        reward_model=None,
        reward_funcs=by_prompt,
        train_dataset=PROMPTS,
        save_rollouts=str(folder / "rollouts"),
    )
    trainer.train()
    trainer.save_model(str(folder / "run"))
    return folder


def test_fit_check_and_ppo(recorded, tmp_path, capsys):
    critic, again = tmp_path / "critic", recorded / "rollouts"
    how = ["--epochs", "40", "--batch_size", "16", "--learning_rate", "3e-3"]
    how += ["--model", str(recorded / "policy"), "--output_dir", str(critic)]
    command.main(["fit", str(again), *how])
    assert ", 13 held out" in capsys.readouterr().out  # the responses to a fifth of the prompts
    check = json.loads((critic / "value_check.json").read_text())
    assert check["explained_variance"] > 0.6  # before: below 0, since every value is 0
    assert abs(check["calibration"][0][0] - check["calibration"][0][1]) < 0.5
    picture = tmp_path / "critic.png"
    command.main(["check", str(again), "--value_model", str(recorded / "run" / "value_model")])
    assert "mean error of V: -1." in capsys.readouterr().out  # a head that is still near 0
    command.main(["check", str(again), "--value_model", str(critic), "--plot", str(picture)])
    assert "baseline: mean return" in capsys.readouterr().out
    assert picture.stat().st_size > 10_000

    def explained(**options):
        trainer = small(
            **{"model": str(recorded / "policy"), "reward_model": None, "reward_funcs": by_prompt},
            **{"train_dataset": PROMPTS, "per_device_train_batch_size": 12, "kl_coef": 0.0},
            **{"lam": 1.0, "total_episodes": 12},
            **options,
        )
        trainer.train()
        return rows(trainer)[0]["val/explained_variance"]

    assert explained(value_model=str(critic)) > 0.8
    assert explained(value_source="copy") < 0.1


def test_rows_of_other_libraries(tmp_path):
    file = tmp_path / "rows.jsonl"
    row = {"prompt": "w3 w4", "response": " w5 w6", "reward": 2.0}
    file.write_text(json.dumps(row) + "\n" + json.dumps(row | {"finished": False}))
    episodes = read_episodes([str(file)], word_tokenizer(), gamma=0.5)
    assert episodes.rollout.loss_mask.sum(1).tolist() == [3, 2]  # with its EOS, and cut off
    returns = episodes.reward_output.token_rewards
    assert returns.tolist() == [[0.5, 1.0, 2.0], [1.0, 2.0, 0.0]]
    file.write_text(json.dumps(row | {"completion": None, "response": ""}))
    empty = read_episodes([str(file)], word_tokenizer(), longest=9)
    assert empty.reward_output.token_rewards.tolist() == [[2.0]]  # its EOS


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"response": None}, "row 1 must have prompt and completion"),
        ({"reward": float("nan")}, "a number in float32"),
        ({"reward": 1e39}, "a number in float32"),  # trained to NaN
        ({"finished": "false"}, "finished, if it is there, True or False"),  # was an end
        ({"response": " w5" * 8}, "row 1 has 9 tokens, but the model reads 9 at most"),
        ({"response": "", "finished": False}, "no rows with a response"),
    ],
)
def test_rows_that_cannot_train_are_named(tmp_path, change, problem):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "w3", "response": "\ud800 w5", "reward": 2.0} | change))
    with pytest.raises(DataError, match=problem):
        read_episodes([str(file)], word_tokenizer(), longest=9)


def test_scores_that_a_value_model_cannot_hold_are_named(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"w{i}", "response": " w5", "reward": 3e38 * (-1) ** i} for i in range(9)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    policy = tiny_policy("gpt_neox", vocab_size=VOCAB)
    policy.save_pretrained(tmp_path / "policy")
    word_tokenizer().save_pretrained(tmp_path / "policy")
    words = ["fit", str(file), "--model", str(tmp_path / "policy")]
    with pytest.raises(DataError, match=r"scores up to 3e\+38 are too large"):
        command.main([*words, "--output_dir", str(tmp_path / "value")])
    assert not (tmp_path / "value").exists()


@pytest.mark.parametrize(
    "options", [{}, {"credit": "turn", "gamma": 0.9}, {"gamma": 0.9, "scale_rewards": "running"}]
)
def test_targets_and_values_are_those_of_ppo(options, tmp_path, monkeypatch):
    """Of episodes with new contexts, with lambda 1, in the last iteration."""
    made, folder = [], str(tmp_path / "rollouts")
    monkeypatch.setattr(
        updater, "make_experience", lambda *args: made.append(make_experience(*args)) or made[-1]
    )
    how = {"environment": Compact, "response_length": 80, "max_turns": 4, "save_rollouts": folder}
    how |= {"learning_rate": 0.0, "kl_coef": 0.0, "lam": 1.0, "value_source": "copy"}
    trainer = played(**how, value_learning_rate=3e-2, **options)
    trainer.train()
    scaled = options.pop("scale_rewards", None) == "running"
    episodes = read_episodes([folder], chat_tokenizer(), scale_rewards=scaled, **options)
    last, mask = made[-1][0], episodes.rollout.loss_mask
    found = episodes.reward_output.token_rewards[-len(last) :][mask[-len(last) :]]
    expected = last.returns[last.value_mask]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)  # turns: 0.72 by tokens
    what = {"values": True, "reference": False, "full_kl": False}
    values = trainer.engine.learner.compute_logprobs(episodes.rollout, **what).values
    found = value._predict(trainer.engine.learner.value, episodes.rollout)
    expected = values[:, : mask.shape[1]][mask]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)  # 0.017 if read as one context


def test_failed_episodes_are_left_out_and_sources_mixed(tmp_path):
    folder, file = tmp_path / "rollouts", tmp_path / "rows.jsonl"
    trainer = played(environment=Odd, on_env_error="drop", save_rollouts=str(folder))
    trainer.train()
    dropped = sum(row["rollout/dropped_rows"] for row in rows(trainer))
    file.write_text(json.dumps({"prompt": "w3", "response": " w5", "reward": 2.0}))
    episodes = read_episodes([str(folder), str(file)], chat_tokenizer())
    assert (len(episodes), dropped) == (8 + 1 - dropped, 2)
    assert episodes.rollout.loss_mask.any(1).all()


def test_the_check_by_hand(monkeypatch, tmp_path):
    """Predictions that are planted: exact, the mean, and too high where responses were cut off."""
    file = tmp_path / "rows.jsonl"
    lines = [
        {"prompt": "w3", "response": " w5" * (2 + i % 3), "score": i % 2, "finished": i % 4 > 1}
        for i in range(12)
    ]
    file.write_text("\n".join(map(json.dumps, lines)))
    episodes = read_episodes([str(file)], word_tokenizer())

    def check(predict):
        def planted(_, rollout):
            at = rollout.prompts.row
            returns = episodes.reward_output.token_rewards[at]
            return predict(returns[:, : rollout.ids.shape[1]], rollout)[rollout.loss_mask]

        monkeypatch.setattr(value, "_predict", planted)
        return check_value(None, episodes, range(12))

    exact = check(lambda returns, _: returns)
    assert exact["explained_variance"] == 1.0
    assert {share for share, _ in exact["by_position"]} - {None} == {1.0}
    mask = episodes.rollout.loss_mask
    mean = float(episodes.reward_output.token_rewards[mask].mean())
    constant = check(lambda returns, _: torch.full_like(returns, mean))
    assert constant["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    high = check(lambda returns, r: returns + 0.25 * ~r.terminated[:, None])
    assert high["truncated_bias"] == pytest.approx(0.25)
    assert high["terminated_bias"] == pytest.approx(0.0)
    assert [len(x) for x in value.split_prompts(episodes, 0.25, 0)] == [9, 3]  # all begin alike
    assert "worse than the mean" in "".join(command.describe(check(lambda g, _: 3 - 3 * g)))


@pytest.mark.parametrize("adapter", [False, True])
def test_a_trained_head_or_adapter_starts_another_run(tmp_path, adapter):
    """Its first values are those that the first run ended with, if the policy is the same."""
    how = {"value_learning_rate": 3e-2, "learning_rate": 1e-12, "vf_coef": 1.0}
    how |= {"reward_model": None, "reward_funcs": by_prompt, "num_mini_batches": 2}
    if adapter:
        from peft import LoraConfig

        how |= {"peft_config": LoraConfig(task_type="CAUSAL_LM", r=4), "value_adapter": True}
    first = small(**how, value_source="policy", output_dir=str(tmp_path / "a"), total_episodes=32)
    first.train()
    first.save_model(str(tmp_path / "saved"))
    folder = str(tmp_path / "saved" / "value_model")
    trained = [row["val/value_mean"] for row in rows(first)]
    again = small(**how, value_model=folder, output_dir=str(tmp_path / "b"), total_episodes=4)
    again.train()
    assert trained[0] == 0.0
    assert rows(again)[0]["val/value_mean"] > 0.5 * trained[-1] > 0.2
