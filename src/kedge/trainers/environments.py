"""The edge at which four ways to say how episodes are sampled become one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kedge.background import CallThread
from kedge.config.declare import read_mapping
from kedge.environments import EpisodeReward, FunctionRollouts, tool_environments
from kedge.environments.load import EMPTY_PROMPT, Environments, Make, add_prompts, load_environment
from kedge.environments.pool import Calls, close_all
from kedge.models.compatibility import vocabulary
from kedge.records.errors import ConfigError
from kedge.rewards.build import as_list
from kedge.trainers.spec import TrainerInputs


def resolve_environment(inputs: TrainerInputs) -> tuple[TrainerInputs, Environments | None]:
    """Replace ``environment``, ``tools`` and ``environment_factory`` by environments.

    ``rollout_func`` becomes a rollout engine.  The arguments that are returned have the reward,
    prompts or engine that these imply, and none of the four: nothing else looks at them.
    """
    args, tools = inputs.args, inputs.tools or inputs.environment_factory
    given = {
        "environment": inputs.environment,
        "environment (option)": args.environment,
        "rollout_func": inputs.rollout_func,
        "tools or environment_factory": tools,
        "rollout_engine": inputs.rollout_func and inputs.rollout_engine is not None,
    }
    both = [name for name, value in given.items() if value][:2]
    if len(both) > 1:
        raise ConfigError(f"{' and '.join(both)} both decide how episodes are sampled; pass one")
    environment = inputs.environment or args.environment
    if args.environment_kwargs is not None and not environment:
        raise ConfigError("environment_kwargs needs environment; set it, or leave the kwargs out")
    ways = ("environment", "tools", "environment_factory", "rollout_func")
    none: dict[str, Any] = dict.fromkeys(ways)
    if inputs.rollout_func is not None:
        return replace(inputs, rollout_engine=_function_engine(inputs), **none), None
    if tools:
        make, scored = _tool_environments(inputs)
    else:
        make, scored = load_environment(environment, read_mapping(args.environment_kwargs)), True
    rewards, models = as_list(inputs.reward_funcs), as_list(inputs.reward_model)
    if not (scored or rewards or models):
        raise ConfigError(
            "no reward is configured: pass reward_funcs, or an environment_factory whose class has"
            " a method get_reward"
        )
    weights = inputs.weights
    if weights is not None and len(weights) == len(rewards) + len(models):
        weights = [*weights, 1.0]  # the weight of the environments
    resolved = replace(
        inputs,
        **none,
        reward_funcs=[*rewards, EpisodeReward()],
        reward_weights=weights,
        train_dataset=_prompts(inputs, make),
        eval_dataset=_fill_prompts(inputs, inputs.eval_dataset),
    )
    return resolved, Environments(make=make, own_tools=bool(tools))


def _function_engine(inputs: TrainerInputs) -> FunctionRollouts:
    if inputs.args.max_lag:
        raise ConfigError(
            f"rollout_func samples with the weights that are being trained, so max_lag must be"
            f" 0, got {inputs.args.max_lag}"
        )
    return FunctionRollouts(
        inputs.rollout_func,
        lambda: inputs.trainer,
        pad_id=0,
        vocabulary=lambda: vocabulary(inputs.trainer.model),
    )


def _tool_environments(inputs: TrainerInputs) -> tuple[Make, bool]:
    """What makes environments of tools, and whether some give rewards."""
    args = inputs.args
    make: Make = tool_environments(
        inputs.tools or (),
        inputs.environment_factory,
        max_iterations=args.max_tool_calling_iterations,
    )
    # Make one of each kind, to check its tools.
    made = []
    for factory in make.values() if isinstance(make, Mapping) else [make]:
        thread = CallThread("environment")  # what is made there may have to be closed there
        made.append((thread.start(factory).result(), thread))
    scored = any(environment.gives_rewards for environment, _ in made)
    close_all(made, Calls(timeout=args.environment_timeout))
    return make, scored


def _prompts(inputs: TrainerInputs, make: Make) -> Any:
    """The dataset, or a single row whose prompt comes from ``reset``."""
    if inputs.train_dataset is not None:
        return _fill_prompts(inputs, inputs.train_dataset)
    if isinstance(make, Mapping):
        raise ConfigError(
            "several environments need a train_dataset with a column 'environment', which names"
            " that of each row"
        )
    if inputs.args.max_steps <= 0 and inputs.args.total_episodes is None:
        raise ConfigError("without a train_dataset, set max_steps or total_episodes")
    return [{"prompt": EMPTY_PROMPT}]


def _fill_prompts(inputs: TrainerInputs, dataset: Any) -> Any:
    """Add an empty user message to rows that only have columns for ``reset``."""
    if dataset is None or isinstance(dataset, Mapping) or inputs.data_collator is not None:
        return dataset
    if inputs.tools and not inputs.environment_factory:
        return dataset  # tools come without prompts
    return add_prompts(dataset)
