"""Options set after construction are read, or refused: never silently ignored."""

import copy
import pickle

import pytest

from kedge import AsyncPPOConfig, GRPOConfig, PPOConfig, RLOOConfig
from kedge.errors import ConfigError, OptionError

BASES = {AsyncPPOConfig: {"rollout_engine": "embedded"}, RLOOConfig: {"token_level_kl": True}}


@pytest.fixture
def changed(tmp_path):
    def make(cls, **changes):
        config = cls(output_dir=str(tmp_path), use_cpu=True, **BASES.get(cls, {}))
        for name, value in changes.items():
            setattr(config, name, value)
        return config.checked()

    return make


@pytest.mark.parametrize(
    ("cls", "option", "value", "problem"),
    [
        (GRPOConfig, "delta", 1.1, "delta=1.1 must be above 1 + epsilon_high=1.2"),
        (GRPOConfig, "kl_estimator", "full", "kl_estimator='full' needs the whole distribution"),
        (GRPOConfig, "steps_per_generation", 4, "steps_per_generation=4 is only read on constr"),
        (RLOOConfig, "ratio_level", "sequence", "needs one per response; set ratio_level='token'"),
        (RLOOConfig, "reward_clip_range", [2.0, 1.0], "must be low, high with low < high"),
        (RLOOConfig, "trl_defaults", "0.22", "trl_defaults='0.22' is only read on construction"),
        (AsyncPPOConfig, "async_mode", False, "async_mode=False is only read on construction"),
    ],
)
def test_what_construction_refuses_is_refused_later(changed, cls, option, value, problem):
    with pytest.raises(ConfigError) as error:
        changed(cls, **{option: value})
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("cls", "option", "value", "becomes"),
    [
        (GRPOConfig, "scale_rewards", True, {"scale_rewards": "group"}),
        (GRPOConfig, "scale_rewards", False, {"scale_rewards": "none"}),
        (GRPOConfig, "log_completions", False, {"num_sample_generations": 0}),
        (RLOOConfig, "temperature", None, {"temperature": 0.7}),
        (PPOConfig, "min_p", None, {"min_p": 0.0}),
        (AsyncPPOConfig, "kl_estimator", "kl2", {"kl_estimator": "k2"}),
        (AsyncPPOConfig, "stop_token", "period", {"stop_token": None, "stop_strings": ["."]}),
    ],
)
def test_values_are_converted_as_on_construction(changed, tmp_path, cls, option, value, becomes):
    given = {"output_dir": str(tmp_path), "use_cpu": True, **BASES.get(cls, {}), option: value}
    for config in (changed(cls, **{option: value}), cls(**given).checked()):
        assert {name: getattr(config, name) for name in becomes} == becomes


def test_the_checked_copy_leaves_the_config_alone(tmp_path):
    config = GRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    config.scale_rewards = True
    assert config.checked().checked().scale_rewards == "group"
    assert config.scale_rewards is True


def test_copies_remember_what_construction_read(tmp_path):
    config = AsyncPPOConfig(output_dir=str(tmp_path), rollout_engine="embedded")
    for copied in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        with pytest.raises(ConfigError, match="only read on construction"):
            copied.async_mode = False


def test_an_unknown_name_is_an_error_when_it_is_set(tmp_path):
    config = PPOConfig(output_dir=str(tmp_path), use_cpu=True)
    with pytest.raises(OptionError, match="no option 'lam_vale'; the nearest is lam_value"):
        config.lam_vale = 0.9
    config._mine = 1
    assert config.device.type == "cpu"  # transformers keeps what it computes
