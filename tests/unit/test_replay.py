"""Recorded samples come back equal, and drive a run in the place of a sampler."""

import datetime
import json
import warnings
from dataclasses import fields, replace

import pytest
import torch

from kedge.checkpoint import checkpoint
from kedge.checkpoint.replay import Recorder, Replay, Replayed, pack, unpack
from kedge.errors import CheckpointError, RolloutError
from kedge.types import ModelOutputs, PromptBatch, RewardOutput, Rollout, Sampling

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
    rollout = Rollout(
        prompts=prompts,
        ids=torch.randint(0, 9, (rows, R), generator=g),
        loss_mask=mask,
        response_mask=mask,
        terminated=mask[:, 0],
        version=torch.full((rows,), 7),
        behavior_logprobs=torch.randn(rows, R, generator=g),
    )
    reward_output = RewardOutput(
        scores=torch.randn(rows, generator=g),
        valid=torch.ones(rows, dtype=torch.bool),
        components={"length": torch.tensor([1.0, float("nan"), 2.0])[:rows]},
    )
    return replace(rollout, **kwargs), reward_output


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))
    if hasattr(a, "__dataclass_fields__"):
        pairs = [(getattr(a, f.name), getattr(b, f.name)) for f in fields(a)]
        return type(a) is type(b) and all(same(x, y) for x, y in pairs)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return a == b


def test_a_sample_comes_back_equal(tmp_path):
    rollout, reward_output = sample()
    file = Recorder(tmp_path / "rec").write(12, rollout, reward_output)
    assert file.name == "step-000012.json"
    assert {p.name for p in file.parent.iterdir()} == {file.name, "step-000012.safetensors"}
    replay = Replay(tmp_path / "rec")
    assert replay.steps == [12]
    back = replay.read(12)
    assert same(back[0], rollout)
    assert same(back[1], reward_output)


def test_optional_fields_stay_none(tmp_path):
    rollout, reward_output = sample(behavior_logprobs=None)
    Recorder(tmp_path).write(0, rollout, reward_output)
    back, _ = Replay(tmp_path).read(0)
    assert back.behavior_logprobs is None
    assert back.allowed_tokens is None


def test_records_inside_a_checkpoint(tmp_path):
    in_flight = [(*sample(1), {"time/rollout": 0.1}), (*sample(2), {"time/rollout": 0.2})]
    folder = checkpoint.save(tmp_path, 3, {}, local=pack(in_flight))
    back = unpack(checkpoint.load(folder).local)
    for got, want in zip(back, in_flight, strict=True):
        assert all(same(x, y) for x, y in zip(got, want, strict=True))
        assert type(got) is tuple


def test_any_record_can_be_packed():
    note = ModelOutputs(logprobs=torch.ones(2, 3), entropy=torch.zeros(2, 3))
    assert same(unpack(pack({"n": note}))["n"], note)


def test_a_column_that_is_no_json_is_left_out_by_name(tmp_path):
    rollout, reward_output = sample()
    columns = {"when": [datetime.date(2024, 1, 1)] * B, "prompt": ["a", "b", "c"]}
    rollout = replace(rollout, prompts=replace(rollout.prompts, columns=columns))
    with pytest.warns(UserWarning, match="column 'when' is not recorded"):
        Recorder(tmp_path).write(0, rollout, reward_output)
    assert Replay(tmp_path).read(0)[0].prompts.columns == {"prompt": ["a", "b", "c"]}


def test_a_missing_step_says_what_there_is(tmp_path):
    recorder = Recorder(tmp_path)
    for step in (0, 1, 2):
        recorder.write(step, *sample(step))
    with pytest.raises(
        CheckpointError, match=r"iteration 3 .* which has 3, 0 to 2; set max_steps=3"
    ):
        Replay(tmp_path).read(3)


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_empty_folder_is_named(tmp_path, world_size):
    with pytest.raises(CheckpointError, match=f"no recorded samples for rank 0 of {world_size}"):
        Replay(tmp_path / "nothing", world_size=world_size)


def test_another_tokenizer_is_refused(tmp_path):
    about = {"tokenizer": "abc", "stop_ids": (1, 2)}
    Recorder(tmp_path, about=about).write(0, *sample())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Replay(tmp_path, about=about)
    with pytest.raises(CheckpointError, match="tokenizer: 'abc' recorded, 'xyz' now"):
        Replay(tmp_path, about=about | {"tokenizer": "xyz"})


def test_ranks_record_apart(tmp_path):
    for rank in (0, 1):
        Recorder(tmp_path, rank=rank, world_size=2).write(4, *sample(rank))
    for rank in (0, 1):
        replay = Replay(tmp_path, rank=rank, world_size=2)
        assert replay.steps == [4]
        assert same(replay.read(4)[0], sample(rank)[0])
    with pytest.raises(CheckpointError, match="no recorded samples for rank 0 of 1"):
        Replay(tmp_path)


def test_damage_is_named(tmp_path):
    file = Recorder(tmp_path).write(0, *sample())
    replay = Replay(tmp_path)
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
    with pytest.raises(CheckpointError, match="RewardOutput has no field 'mood'"):
        unpack(tree | {"mood": 1})


def test_a_killed_recording_is_not_seen(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.write(0, *sample())
    recorder.write(1, *sample()).rename(tmp_path / "step-000001.part")
    assert Replay(tmp_path).steps == [0]


def test_a_replay_stands_for_prompts_sampler_and_reward(tmp_path):
    recorder = Recorder(tmp_path)
    for step in (0, 1):
        recorder.write(step, *sample(step))
    run = Replayed(Replay(tmp_path), rows=B)
    assert run.logprobs == "sampled"
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
        Replayed(Replay(tmp_path), rows=2).batch(0)


def test_without_recorded_logprobs_the_replay_says_so(tmp_path):
    Recorder(tmp_path).write(0, *sample(behavior_logprobs=None))
    assert Replayed(Replay(tmp_path), rows=B).logprobs == "none"


def test_rewriting_a_step_replaces_it(tmp_path):
    recorder = Recorder(tmp_path)
    recorder.write(0, *sample(0))
    recorder.write(0, *sample(5))
    assert same(Replay(tmp_path).read(0)[0], sample(5)[0])
    assert json.loads((tmp_path / "step-000000.json").read_text())["step"] == 0


def test_a_kill_while_rewriting_a_step_leaves_no_mixed_pair(tmp_path, monkeypatch):
    recorder = Recorder(tmp_path)
    recorder.write(0, *sample(0))
    recorder.write(1, *sample(1))

    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("kedge.checkpoint.replay.write_tensors", killed)
    with pytest.raises(KeyboardInterrupt):
        recorder.write(1, *sample(5))
    assert Replay(tmp_path).steps == [0]
