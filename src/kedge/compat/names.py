"""Which names of TRL's modules Kedge has, by generation of its API; see names.yaml."""

from __future__ import annotations

from pathlib import Path
from string import Template
from types import MappingProxyType

import yaml

Names = dict[str, str]  # name -> "module:attribute"
Modules = dict[str, Names]  # module -> its names

_DATA = yaml.safe_load(Path(__file__).with_name("names.yaml").read_text(encoding="utf-8"))
_TARGETS = {
    name: f"{module}:{name}" for module, names in _DATA["sources"].items() for name in names.split()
}
_TARGETS["OnlineTrainerState"] = "kedge.trainers.run.hf_callbacks:RunState"


def _modules(config: str, trainer: str, tables: Names) -> Modules:
    """The modules of an API, whose ``PPOConfig`` and ``PPOTrainer`` are in the given modules."""
    targets = _TARGETS | {"PPOConfig": f"{config}:PPOConfig", "PPOTrainer": f"{trainer}:PPOTrainer"}
    modules = {}
    for module, text in (_DATA["shared"] | tables).items():
        while "$" in text:
            text = Template(text).substitute(_DATA["lists"])  # noqa: PLW2901
        modules[module] = {name: targets[name] for name in text.split()}
    return modules


_SWIFT = _modules("kedge.compat.hf_trainer", "kedge.compat.hf_trainer", _DATA["trainers"])
for _names in _SWIFT.values():  # ms-swift's own: it derives from TRL's and overrides the loop
    _names.pop("GRPOConfig", None)
    _names.pop("GRPOTrainer", None)
APIS = MappingProxyType(
    {
        "trl-0.11": _modules("kedge.classic", "kedge.classic", _DATA["steps"]),
        "trl-1.12": _modules("kedge", "kedge.compat.trl_trainers", _DATA["trainers"]),
        "ms-swift": _SWIFT,
    }
)
VERSIONS = MappingProxyType({"trl-0.11": "0.11.4", "trl-1.12": "1.12.0", "ms-swift": "1.12.0"})
