"""Subclasses of the configs, as other libraries and programs write them."""

import pickle
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from kedge import GRPOConfig, PPOConfig, RLOOConfig
from kedge.errors import ConfigError, OptionError


@dataclass
class Mixin:
    """Options of another program, checked before those of Kedge."""

    fp8: bool = False
    tags: list[str] = field(default_factory=list)
    plugin: Any = None

    def __post_init__(self) -> None:
        self.seen = self.fp8
        super().__post_init__()


@dataclass
class WithMixin(Mixin, GRPOConfig):
    """Adds fields from the left."""


@dataclass
class WithFields(PPOConfig):
    """Adds a field, and another default of a field and of an alias."""

    note: int = 3
    kl_coef: float = 0.5


@dataclass
class SmallBatches(GRPOConfig):
    """Another default of an option that becomes others."""

    steps_per_generation: int | None = 4


class WithConstructor(RLOOConfig):
    """Takes an argument that is not an option."""

    def __init__(self, *args: Any, note: int = 0, **options: Any) -> None:
        super().__init__(*args, **options)
        self.note = note


@pytest.fixture
def base(tmp_path):
    return {"output_dir": str(tmp_path), "use_cpu": True}


def test_fields_of_a_subclass_belong_to_it(base):
    config = WithMixin(fp8=True, tags=["a"], plugin=len, max_completion_length=9, **base)
    assert config.seen is True
    checked = config.checked()
    assert (checked.fp8, checked.tags, checked.plugin) == (True, ["a"], len)
    assert checked.response_length == 9
    assert pickle.loads(pickle.dumps(config)).tags == ["a"]


def test_defaults_of_a_subclass_hold(base):
    config = WithFields(note=5, **base).checked()
    assert (config.note, config.kl_coef) == (5, 0.5)
    assert replace(config, note=6).note == 6
    config = SmallBatches(**base).checked()
    assert (config.gradient_accumulation_steps, config.num_mini_batches) == (4, 4)


def test_what_kedge_refuses_is_refused_in_a_subclass(base):
    with pytest.raises(ConfigError, match=r"label_smoothing_factor=0\.1 is not supported"):
        WithMixin(label_smoothing_factor=0.1, **base)
    with pytest.raises(ConfigError, match="temperature=0 must be"):
        WithFields(temperature=0, **base)
    with pytest.raises(OptionError, match="WithFields has no option 'notes'"):
        WithFields(notes=1, **base)


def test_a_constructor_may_take_more_arguments(base):
    config = WithConstructor(note=7, rloo_k=4, **base)
    assert (config.note, config.num_generations, config.checked().note) == (7, 4, 7)
    with pytest.raises(OptionError, match="WithConstructor has no option 'notes'"):
        WithConstructor(notes=7, **base)
