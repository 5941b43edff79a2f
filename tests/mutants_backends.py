"""Seeded bugs of backends, kernels, environments and the classic API; see ``mutants.py``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """One bug: in ``file`` the text ``old`` becomes ``new``; ``tests`` must notice."""

    name: str
    file: str
    old: str
    new: str
    tests: str


LEARNER = "tests/unit/test_learner.py"
GRADIENT = "tests/property/test_gradient_invariance.py"
CLASSIC = "tests/unit/test_classic_step.py"
TURNS = "tests/unit/test_turn_credit.py"
EPISODES = "tests/environments/test_rollouts.py"
REPLACED = "tests/property/test_replaced_groups.py"
MUTANTS = [
    Mutant(
        "random numbers depend on the place in the batch",
        "rollout/embedded/generation.py",
        "torch.tensor([row.number for row in new], device=self._device)",
        "torch.arange(len(new), device=self._device)",
        "tests/property/test_rollout_properties.py",
    ),
    Mutant(
        "greedy baselines in the order in which they were sampled",
        "rollout/scheduler/scheduler.py",
        "greedy = greedy.rows(greedy.prompts.group.argsort())",
        "pass",
        REPLACED,
    ),
    Mutant(
        "groups of equal scores are replaced for ever",
        "rollout/scheduler/scheduler.py",
        "if self._prompts.turn(number) < rounds]",
        "if self._prompts.turn(number) < rounds + 1]",
        REPLACED,
    ),
    Mutant(
        "all turns of an episode have the random numbers of the first",
        "environments/rollout.py",
        "turn_seed(first.seed, first.turns),",
        "first.seed,",
        EPISODES,
    ),
    Mutant(
        "every rank takes the first slots of a launch",
        "ray/placement.py",
        "first = at.rank * count if each else 0",
        "first = 0",
        "tests/unit/test_ray_placement.py",
    ),
    Mutant(
        "a rank may get more groups than the others",
        "rollout/scheduler/dispatch.py",
        "if len(dealt[rank]) * ranks < len(tokens):",
        "if True:",
        "tests/property/test_as_completed.py",
    ),
    Mutant(
        "all engines have the same ranks in the group that receives weights",
        "rollout/vllm/nccl_transfer.py",
        "offsets = [first + i * self._workers for",
        "offsets = [first for",
        "tests/unit/test_weight_transfer.py",
    ),
    Mutant(
        "what engines must report is that of another policy",
        "rollout/vllm/policy_template.py",
        "if found is None or model is not self.meta_model:",
        "if found is None:",
        "tests/unit/test_weight_transfer.py",
    ),
    Mutant(
        "temperature forgotten in training",
        "learner/settings.py",
        "temperature=self.temperature",
        "temperature=1.0",
        LEARNER,
    ),
    Mutant(
        "value of the state after its token",
        "models/packing.py",
        "return (after - 1).clamp(min=0)",
        "return after",
        GRADIENT + " " + LEARNER,
    ),
    Mutant(
        "classic scores are scaled by the deviation of nothing",
        "classic/samples.py",
        "            running.update(self.totals)\n",
        "",
        "tests/unit/test_classic_step.py",
    ),
    Mutant(
        "classic moments of batches are averaged",
        "math/running.py",
        "self.squares += squares + gap**2 * self.count * count / both",
        "self.squares += squares",
        "tests/unit/test_classic_step.py",
    ),
    Mutant(
        "a mask of classic responses is forgotten",
        "classic/samples.py",
        "loss_mask=pad_tensors(samples.masks)",
        "loss_mask=pad_tensors([torch.ones_like(r, dtype=torch.bool) for r in responses])",
        CLASSIC,
    ),
    Mutant(
        "statistics stand one token to the right",
        "classic/samples.py",
        "starts = [len(q) - 1 for q in queries]",
        "starts = [len(q) for q in queries]",
        "tests/golden/test_classic.py",
    ),
    Mutant(
        "a decoder reads the token that it shall predict",
        "classic/models.py",
        "ids=torch.cat([begin, target], dim=1)",
        "ids=torch.cat([target, begin], dim=1)",
        CLASSIC,
    ),
    Mutant(
        "shared layers are copies",
        "classic/models.py",
        "        memo[id(weights[name])] = weights[name]  # deepcopy keeps these tensors\n",
        "",
        "tests/unit/test_classic_models.py",
    ),
    Mutant(
        "a classic state forgets where the random numbers stood",
        "classic/trainer.py",
        '            set_random_state(saved.local["random"])',
        "            pass",
        "tests/unit/test_classic_loop.py",
    ),
    Mutant(
        "an end token inside a query ends the response",
        "classic/trainer.py",
        "ended = torch.isin(new, ends.long()).nonzero()[:1, 0].tolist()",
        "ended = torch.isin(row, ends.long()).nonzero()[:1, 0].tolist()",
        "tests/unit/test_classic_loop.py",
    ),
    Mutant(
        "mini-batches of an overridden step count the same, however long",
        "classic/steps.py",
        "if weighted else",
        "if weighted is None else",
        "tests/unit/test_classic_overrides.py",
    ),
    Mutant(
        "the bias of a linear layer is lost",
        "ops/cpu/matmul.py",
        "_linear_pointwise(x, w, bias,",
        "_linear_pointwise(x, w, None,",
        "tests/unit/test_matmul.py",
    ),
    Mutant(
        "turns that touch are one",
        "math/turns.py",
        "starts[:, 1:] &= turn[:, 1:] != turn[:, :-1]",
        "starts[:, 1:] &= turn[:, :-1] < 0",
        TURNS,
    ),
    Mutant(
        "turns of other groups are compared",
        "math/turns.py",
        "(index[:, None] * most + turn)[starts]",
        "(0 * index[:, None] + turn)[starts]",
        TURNS,
    ),
    Mutant(
        "the first token alone gets the turn's advantage",
        "algorithms/ppo.py",
        "advantages = broadcast_turns(advantages, turn)",
        "advantages = advantages * actions",
        TURNS,
    ),
    Mutant(
        "advantages of turns are whitened over tokens",
        "algorithms/ppo.py",
        "scaled = whiten(raw, trained,",
        "scaled = whiten(raw, mask,",
        TURNS,
    ),
    Mutant(
        "the reward of an episode is at its end",
        "environments/episode.py",
        "token_rewards=rewards - place_score(total, rollout.loss_mask)",
        "token_rewards=rewards * 0",
        EPISODES,
    ),
    Mutant(
        "tokens of the environment are trained on",
        "environments/episode.py",
        "self.turn += [-1] * len(ids)",
        "self.turn += [self.turns] * len(ids)",
        EPISODES,
    ),
    Mutant(
        "every turn is sampled with the seed of the first",
        "environments/episode.py",
        'return seed if turn == 0 else derive_seed(f"{seed}/turn/{turn}")',
        "return seed",
        EPISODES,
    ),
]
