"""Recorded samples come back equal, and drive a run in the place of a sampler."""

import datetime
import warnings
from dataclasses import replace

import pytest
import torch

from kedge.checkpoint import checkpoint
from kedge.checkpoint.replay import RolloutRecorder, RolloutReplay, pack, unpack
from kedge.errors import CheckpointError, RolloutError
from kedge.types import ModelOutputs, PromptBatch, RewardOutput, Sampling
from tests.unit.advantage_inputs import rollout
from tests.unit.checkpoint_state import same

B, P, R = 3, 4, 5
SAMPLING = Sampling(max_new_tokens=R)


def sample(seed=0, rows=B, **kwargs):
    g = torch.Generator().manual_seed(seed)
    prompts = PromptBatch(
        ids=torch.randint(0, 9, (rows, P), generator=g),
        mask=torch.ones(rows, P, dtype=torch.bool),
        group=torch.arange(rows),
        row=torch.arange(rows),
        columns={"prompt": ["a", "b", "ü"][:rows], "chat": [[{"role": "user"}]] * rows},
    )
    mask = torch.rand(rows, R, generator=g) > 0.5
    made = rollout(
        mask,
        prompts=prompts,
        ids=torch.randint(0, 9, (rows, R), generator=g),
        terminated=mask[:, 0],
        policy_version=torch.full((rows,), 7),
        behavior_logprobs=torch.randn(rows, R, generator=g),
    )
    reward_output = RewardOutput(
        scores=torch.randn(rows, generator=g),
        valid=torch.ones(rows, dtype=torch.bool),
        components={"length": torch.tensor([1.0, float("nan"), 2.0])[:rows]},
    )
    return replace(made, **kwargs), reward_output


def test_a_sample_comes_back_equal(tmp_path):
    rollout, reward_output = sample()
    file = RolloutRecorder(tmp_path / "rec").write(12, rollout, reward_output)
    assert file.name == "step-000012.json"
    assert {p.name for p in file.parent.iterdir()} == {file.name, "step-000012.safetensors"}
    replay = RolloutReplay(tmp_path / "rec")
    assert replay.steps == [12]
    assert same(replay.read(12), (rollout, reward_output))
    rollout = replace(rollout, behavior_logprobs=None)
    RolloutRecorder(tmp_path).write(0, rollout, reward_output)
    replay = RolloutReplay(tmp_path)
    assert replay.logprob_kind == "none"
    assert same(replay.read(0)[0], rollout)


def test_records_inside_a_checkpoint(tmp_path):
    in_flight = [(*sample(1), {"time/rollout": 0.1}), (*sample(2), {"time/rollout": 0.2})]
    folder = checkpoint.save(tmp_path, 3, {}, local=pack(in_flight))
    assert same(unpack(checkpoint.load(folder).local), in_flight)
    note = ModelOutputs(logprobs=torch.ones(2, 3), entropy=torch.zeros(2, 3))
    assert same(unpack(pack({"n": note}))["n"], note)


def test_a_column_that_is_no_json_is_left_out_by_name(tmp_path):
    rollout, reward_output = sample()
    columns = {"when": [datetime.date(2024, 1, 1)] * B, "prompt": ["a", "b", "c"]}
    rollout = replace(rollout, prompts=replace(rollout.prompts, columns=columns))
    with pytest.warns(UserWarning, match="column 'when' is not recorded"):
        RolloutRecorder(tmp_path).write(0, rollout, reward_output)
    assert RolloutReplay(tmp_path).read(0)[0].prompts.columns == {"prompt": ["a", "b", "c"]}


def test_a_missing_step_says_what_there_is(tmp_path):
    recorder = RolloutRecorder(tmp_path)
    for step in (0, 1, 2):
        recorder.write(step, *sample(step))
    with pytest.raises(
        CheckpointError, match=r"iteration 3 .* which has 3, 0 to 2; set max_steps=3"
    ):
        RolloutReplay(tmp_path).read(3)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_empty_folder_is_named(tmp_path, world_size):
    with pytest.raises(CheckpointError, match=f"no recorded samples for rank 0 of {world_size}"):
        RolloutReplay(tmp_path / "nothing", world_size=world_size)


def test_another_tokenizer_is_refused(tmp_path):
    about = {"tokenizer": "abc", "stop_ids": (1, 2)}
    RolloutRecorder(tmp_path, settings=about).write(0, *sample())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RolloutReplay(tmp_path, settings=about)
    with pytest.raises(CheckpointError, match="tokenizer: 'abc' recorded, 'xyz' now"):
        RolloutReplay(tmp_path, settings=about | {"tokenizer": "xyz"})


def test_ranks_record_apart(tmp_path):
    for rank in (0, 1):
        RolloutRecorder(tmp_path, rank=rank, world_size=2).write(4, *sample(rank))
    for rank in (0, 1):
        replay = RolloutReplay(tmp_path, rank=rank, world_size=2)
        assert replay.steps == [4]
        assert same(replay.read(4)[0], sample(rank)[0])
    with pytest.raises(CheckpointError, match="no recorded samples for rank 0 of 1"):
        RolloutReplay(tmp_path)


def test_damage_is_named(tmp_path):
    file = RolloutRecorder(tmp_path).write(0, *sample())
    replay = RolloutReplay(tmp_path)
    tensors = file.with_suffix(".safetensors")
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[:40])
    with pytest.raises(CheckpointError, match=r"step-000000.safetensors"):
        replay.read(0)
    tensors.write_bytes(whole)
    for text in ("{", "[]", '{"format": 2}'):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=r"step-000000.json"):
            replay.read(0)


def test_unknown_records_and_fields_are_named():
    tree = pack(sample()[1])
    with pytest.raises(CheckpointError, match="unknown record 'Verdict'"):
        unpack(tree | {"__record__": "Verdict"})
    with pytest.raises(CheckpointError, match="unknown record 'Tensor'"):
        unpack(tree | {"__record__": "Tensor"})
    with pytest.raises(CheckpointError, match=r"RewardOutput: .*'mood'"):
        unpack(tree | {"mood": 1})


def test_a_replay_stands_for_prompts_sampler_and_reward(tmp_path):
    recorder = RolloutRecorder(tmp_path)
    for step in (0, 1):
        recorder.write(step, *sample(step))
    run = RolloutReplay(tmp_path, rows=B)
    assert run.logprob_kind == "sampled"
    first, second = run.batch(0), run.batch(1)  # sampled ahead
    for step, prompts in ((0, first), (1, second)):
        rollout = run.generate(prompts, sampling=SAMPLING, seed=0)
        reward_output = run.score(rollout)
        assert same(rollout, sample(step)[0])
        assert same(reward_output, sample(step)[1])
    assert run.load_weights({}, 3) is None
    with pytest.raises(RolloutError, match="can only use the prompts of its recording"):
        run.generate(first, sampling=SAMPLING, seed=0)
    with pytest.raises(RolloutError, match="can only score the responses of its recording"):
        run.score(sample()[0])
    with pytest.raises(CheckpointError, match="must have 2 rows per process, got 3"):
        RolloutReplay(tmp_path, rows=2).batch(0)


def test_a_kill_while_rewriting_a_step_leaves_no_mixed_pair(tmp_path, monkeypatch):
    recorder = RolloutRecorder(tmp_path)
    recorder.write(0, *sample(0))
    recorder.write(1, *sample(1))
    recorder.write(0, *sample(5))  # replaces it
    recorder.write(2, *sample()).rename(tmp_path / "step-000002.part")  # killed

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("kedge.checkpoint.replay.write_tensors", killed)
    with pytest.raises(KeyboardInterrupt):
        recorder.write(1, *sample(5))
    assert RolloutReplay(tmp_path).steps == [0]
    assert same(RolloutReplay(tmp_path).read(0)[0], sample(5)[0])
