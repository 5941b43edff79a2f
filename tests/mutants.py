"""Seeded bugs: each is put into a copy of the source, and the tests named beside it must fail.

    python tests/mutants.py            all of them
    python tests/mutants.py whiten     those whose name holds the word

A bug that survives is a bug in the tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Mutant:
    """One bug: in ``file`` the text ``old`` becomes ``new``; ``tests`` must notice."""

    name: str
    file: str
    old: str
    new: str
    tests: str


MATH, LOOP = "tests/unit/test_math.py", "tests/unit/test_loop.py"
COMPLETED = "tests/property/test_as_completed.py"
NPLUS = "tests/reference/test_nplus_ppo.py"
UPDATE = "tests/reference/test_whole_update.py -k formula[ppo]"
RULES = f"tests/unit/test_algorithms.py {MATH}"
GROUPS = "tests/unit/test_algorithms_engine.py"
FAILURES = "tests/e2e/test_failures.py"
LEARNER = "tests/unit/test_learner.py"
GRADIENT = "tests/property/test_gradient_invariance.py"
CLASSIC = "tests/unit/test_classic_step.py"
TURNS = "tests/unit/test_turn_credit.py"
TRANSFORMS = "tests/property/test_transforms.py"
EPISODES = "tests/environments/test_rollouts.py"
REPLACED = "tests/property/test_replaced_groups.py"
# The file of src/kedge and the tests that must notice; then each bug: a text, and what it becomes.
BUGS = {
    ("math/losses.py", MATH): {
        "policy loss with the wrong sign": (
            "torch.max(-bounded * advantages, -ratio.clamp",
            "torch.max(bounded * advantages, ratio.clamp",
        ),
        "value clipped around the new value": (
            "bounded = old + (values - old).clamp(-clip, clip)\n    return 0.5",
            "bounded = values + (values - old).clamp(-clip, clip)\n    return 0.5",
        ),
        "weights sum to one per row": (
            "return mask / _count(mask, all_reduce)",
            "return mask / mask.sum(1, keepdim=True).clamp(min=1)",
        ),
    },
    ("math/masked.py", MATH): {
        "whitening adds the mean back": (
            "return scaled if center else",
            "return scaled if not center else",
        ),
        "means over padding": (
            "torch.where(mask, x, 0.0).sum(), mask.sum()",
            "x.sum(), mask.sum()",
        ),
    },
    ("math/advantage.py", MATH): {
        "GAE sees values beyond the end": (
            "next_value = torch.where(real, values[:, t], next_value)",
            "next_value = values[:, t]",
        ),
        "GAE without lambda": ("delta + gamma * lam * advantage", "delta + gamma * advantage"),
    },
    ("math/masked.py", RULES): {
        "whitening per rank": (
            "mean = masked_mean(x, mask, all_reduce=all_reduce)",
            "mean = masked_mean(x, mask)",
        )
    },
    ("math/rewards.py", MATH): {
        "score on the slot before the last": (
            "slots == last_true(mask)[:, None]",
            "slots == last_true(mask)[:, None] - 1",
        )
    },
    ("math/kl.py", MATH): {
        "k3 with the sign of k1": (
            "return (ref - logp).expm1() - (ref - logp)",
            "return (logp - ref).expm1() - (logp - ref)",
        )
    },
    ("algorithms/ppo.py", UPDATE): {
        "KL added to the reward": ("else rewards - kl_coef * kl", "else rewards + kl_coef * kl"),
        "returns from whitened advantages": (
            "returns = (target + values) * value_mask",
            "returns = (whiten(target, mask, all_reduce=e.all_reduce) + values) * value_mask",
        ),
    },
    ("algorithms/ppo.py", NPLUS): {
        "value loss over the policy's mask": ("value_mask=value_mask", "value_mask=mask")
    },
    ("loop/stages.py", NPLUS): {
        "micro-batches weighted one by one": (
            "token_weight=token[part],",
            "token_weight=token_weights(step.rows(part).loss_mask, all_reduce),",
        ),
        "the same order every pass": (
            "order = torch.randperm(len(experience), generator=shuffle)",
            "order = torch.arange(len(experience))",
        ),
    },
    ("loop/stages.py", LOOP): {
        "dropped rows keep their loss": (
            "mask = rollout.loss_mask & reward_output.valid[:, None]",
            "mask = rollout.loss_mask",
        )
    },
    ("loop/loop.py", LOOP): {
        "weights never reach the sampler": (
            "            self.scheduler.send(self._weight_update())\n            report",
            "            report",
        )
    },
    ("rollout/scheduler/worker.py", LOOP): {
        "receipts are not read": (
            "if (receipt.version, receipt.fingerprint) != (sent.version, sent.fingerprint):",
            "if False:",
        )
    },
    ("loop/updater.py", "tests/e2e/test_resume.py -k n_plus_n"): {
        "a checkpoint forgets the KL coefficient": (
            '        self.kl.load_state_dict(state["kl"])',
            "",
        )
    },
    ("rollout/scheduler/scheduler.py", LOOP): {
        "an exception of the sampler becomes another": (
            "                    raise state.failure\n",
            "                    raise RuntimeError\n",
        )
    },
    ("rollout/scheduler/in_order.py", FAILURES): {
        "a failure loses the responses that were sampled ahead": (
            "self._requeue([] if self.state.collector.more else rollouts, step)",
            "self._requeue([], step)",
        )
    },
    ("rollout/scheduler/in_order.py", "tests/property/test_staleness.py"): {
        "new weights are loaded before what may start with the old ones": (
            "if worker.update is not None:",
            "if worker.update is not None and not updates:",
        )
    },
    ("loop/updater.py", FAILURES): {
        "a state in mid-update is saved": (
            "        self.state_consistent = False\n",
            "        pass\n",
        )
    },
    ("rollout/scheduler/dispatch.py", COMPLETED): {
        "groups that are due may wait for those that were done first": (
            "            if required > len(taken):\n",
            "            if False:\n",
        ),
        "groups start as long as engines are free": (
            "return min(self.end, (version + self.max_lag + 1) * self.per_step)",
            "return self.end",
        ),
        "a resume starts groups again that are there": (
            "self.next += len(self.done) + len(self.returned)",
            "self.next += len(self.returned)",
        ),
        "a rank may get more groups than the others": (
            "if len(dealt[rank]) * ranks < len(tokens):",
            "if True:",
        ),
    },
    ("loop/stages.py", "tests/reference/test_whole_update.py -k too_old"): {
        "tokens that are too old are trained on": (
            "age > max_token_lag",
            "age > max_token_lag + 1",
        ),
        "tokens that are too old lose their value target": (
            "loss_mask = loss_mask & ~inputs.excluded",
            "value_mask = loss_mask = loss_mask & ~inputs.excluded",
        ),
    },
    ("algorithms/base.py", "tests/environments/test_trainers.py -k however"): {
        "rewards of turns keep their scale when scores are normalized": (
            "dense = factor[:, None] * dense",
            "dense = 1 * dense",
        )
    },
    ("algorithms/reinforce_pp.py", "tests/environments/test_trainers.py -k however"): {
        "the baseline of a turn is that of the whole response": (
            "zeros.masked_scatter(ends, means), ends, gamma=1.0, lam=0.0)",
            "zeros.masked_scatter(ends, means), ends, gamma=0.0, lam=0.0)",
        )
    },
    ("learner/models.py", "tests/e2e/test_models_together.py -k reference_of_a"): {
        "the reference of a trained adapter is its base": (
            "return AdapterReference(policy, trained), True",
            "return AdapterReference(policy), False",
        )
    },
    ("loop/stages.py", "tests/reference/test_whole_update.py -k rejected"): {
        "rejected responses stay in the denominator": (
            "for x in (too_old, rejected) if x",
            "for rejected in [None] for x in (too_old,) if x",
        )
    },
    ("records/types.py", "tests/unit/test_token_versions.py"): {
        "tokens are stale as their row is": (
            "return self.token_version.where(self.token_version >= 0, of_row)",
            "return of_row",
        )
    },
    ("loop/control.py", NPLUS): {
        "adaptive KL without its clip": (
            "min(max(kl / self.target - 1, -0.2), 0.2)",
            "kl / self.target - 1",
        )
    },
    ("math/advantage.py", RULES): {
        "groups by position": (
            "_, index = group.unique(return_inverse=True)",
            "index = torch.arange(len(group)) // int((group == group[0]).sum())",
        ),
        "a dropped row stays in its group's count": (
            "index_add_(0, index, valid.double())",
            "index_add_(0, index, torch.ones_like(kept))",
        ),
        "the baseline holds the row itself": (
            "kept - (sums - kept) / (counts - 1).clamp(min=1)",
            "kept - sums / counts.clamp(min=1)",
        ),
    },
    ("algorithms/rloo.py", RULES): {
        "KL per token charged to the whole response": (
            "rewards_to_go(penalty.float(), mask, gamma=1.0)",
            "penalty.sum(1, keepdim=True) * mask",
        ),
        "advantages normalized per rank": (
            "standardize(centered, compared, all_reduce=e.all_reduce)",
            "standardize(centered, compared)",
        ),
    },
    ("algorithms/base.py", RULES): {
        "rewards clipped before they are normalized": (
            "whole, factor = standardize(whole, valid, all_reduce=e.all_reduce),",
            "whole, factor = standardize(whole if clip is None else whole.clamp(-1, 1), valid),",
        )
    },
    ("math/losses.py", RULES): {
        "clip-higher forgotten": (
            "return 1 + (self.low if self.high is None else self.high)",
            "return 1 + self.low",
        ),
        "a clipped token of CISPO gets no gradient": (
            "-ratio.detach().clamp(max=top) * advantages * logprobs",
            "-ratio.clamp(max=top) * advantages",
        ),
    },
    ("math/ratios.py", RULES): {
        "GSPO passes a token's gradient without its weight": (
            "return whole.exp()[:, None] * (log_ratio - fixed).exp()",
            "return (log_ratio - fixed).exp()",
        )
    },
    ("algorithms/grpo.py", RULES): {
        "KL in the loss without its ratio": ("(kl * ratio if use_bias_correction_kl else kl)", "kl")
    },
    ("loop/stages.py", GROUPS): {
        "rows left out by credit are trained on": (
            "mask if outputs.loss_mask is None else mask & outputs.loss_mask",
            "mask",
        )
    },
    ("rollout/scheduler/collector.py", GROUPS): {
        "the greedy baseline of another prompt": (
            "greedy_scores=baseline.scores[group]",
            "greedy_scores=baseline.scores[group.flip(0)]",
        ),
        "greedy responses that are sampled": ("temperature=0.0, top_k=0", "top_k=0"),
    },
    ("loop/control.py", "tests/unit/test_loop.py"): {
        "early stopping takes the offending step": (
            "return not over_ratio and (self.keep_last or not self.should_stop(metrics))",
            "return not over_ratio",
        )
    },
    ("rollout/embedded/generation.py", "tests/property/test_rollout_properties.py"): {
        "random numbers depend on the place in the batch": (
            "torch.tensor([row.number for row in new], device=self._device)",
            "torch.arange(len(new), device=self._device)",
        )
    },
    ("rollout/scheduler/as_completed.py", REPLACED): {
        "groups of equal scores are replaced for ever": (
            "if self._prompts.turn(number) < rounds]",
            "if self._prompts.turn(number) < rounds + 1]",
        ),
    },
    ("environments/turn_tokens.py", "tests/environments/test_drop_reasoning.py"): {
        "earlier reasoning stays whatever the template says": (
            "return reasoning_blocks(texts[0]) != reasoning_blocks(texts[1])",
            "return False",
        )
    },
    ("environments/episode.py", "tests/environments/test_drop_reasoning.py"): {
        "a conversation that is read again counts as an observation": (
            "before + (self.max_observation_tokens or length)",
            "self.max_observation_tokens or length",
        )
    },
    ("environments/rollout.py", EPISODES): {
        "all turns of an episode have the random numbers of the first": (
            "turn_seed(first.seed, first.turns),",
            "first.seed,",
        )
    },
    ("ext/ray/placement.py", "tests/unit/test_ray_placement.py"): {
        "every rank takes the first slots of a launch": (
            "first = at.rank * count if each else 0",
            "first = 0",
        )
    },
    ("ext/vllm/weights.py", "tests/unit/test_weight_transfer.py"): {
        "all engines have the same ranks in the group that receives weights": (
            "offsets = [first + i * self._gpus for",
            "offsets = [first for",
        )
    },
    ("ext/vllm/policy_template.py", "tests/unit/test_weight_transfer.py"): {
        "what engines must report is that of another policy": (
            "if found is None or model is not self.meta_model:",
            "if found is None:",
        )
    },
    ("learner/settings.py", LEARNER): {
        "temperature forgotten in training": ("temperature=self.temperature", "temperature=1.0")
    },
    ("models/packing.py", GRADIENT + " " + LEARNER): {
        "value of the state after its token": ("return (after - 1).clamp(min=0)", "return after")
    },
    ("ext/trl/classic/samples.py", CLASSIC): {
        "classic scores are scaled by the deviation of nothing": (
            "        running.update(total_scores(scores))\n",
            "",
        ),
        "a mask of classic responses is forgotten": (
            "loss_mask=pad_tensors(samples.masks)",
            "loss_mask=pad_tensors([torch.ones_like(r, dtype=torch.bool) for r in responses])",
        ),
    },
    ("math/running.py", CLASSIC): {
        "classic moments of batches are averaged": (
            "self.squares += squares + gap**2 * self.count * count / both",
            "self.squares += squares",
        )
    },
    ("ext/trl/classic/samples.py", "tests/golden/test_classic.py"): {
        "statistics stand one token to the right": (
            "starts = [len(q) - 1 for q in queries]",
            "starts = [len(q) for q in queries]",
        )
    },
    ("ext/trl/classic/models.py", CLASSIC): {
        "a decoder reads the token that it shall predict": (
            "ids=torch.cat([begin, target], dim=1)",
            "ids=torch.cat([target, begin], dim=1)",
        )
    },
    ("ext/trl/classic/models.py", "tests/unit/test_classic_models.py"): {
        "shared layers are copies": (
            "        memo[id(weights[name])] = weights[name]  # deepcopy keeps these tensors\n",
            "",
        )
    },
    ("ext/trl/classic/trainer.py", "tests/unit/test_classic_loop.py"): {
        "a classic state forgets where the random numbers stood": (
            '            set_random_state(saved.local["random"])',
            "            pass",
        ),
        "an end token inside a query ends the response": (
            "ended = torch.isin(new, ends.long()).nonzero()[:1, 0].tolist()",
            "ended = torch.isin(row, ends.long()).nonzero()[:1, 0].tolist()",
        ),
    },
    ("ext/trl/classic/steps.py", "tests/unit/test_classic_overrides.py"): {
        "mini-batches of an overridden step count the same, however long": (
            "if weighted else",
            "if weighted is None else",
        )
    },
    ("ext/cpu/matmul.py", "tests/unit/test_matmul.py"): {
        "the bias of a linear layer is lost": (
            "_linear_pointwise(x, w, bias,",
            "_linear_pointwise(x, w, None,",
        )
    },
    ("math/turns.py", TURNS): {
        "turns that touch are one": (
            "starts[:, 1:] &= turn[:, 1:] != turn[:, :-1]",
            "starts[:, 1:] &= turn[:, :-1] < 0",
        ),
        "turns of other groups are compared": (
            "(index[:, None] * most + turn)[starts]",
            "(0 * index[:, None] + turn)[starts]",
        ),
    },
    ("algorithms/ppo.py", TURNS): {
        "the first token alone gets the turn's advantage": (
            "advantages = broadcast_turns(advantages, turn)",
            "advantages = advantages * actions",
        ),
        "advantages of turns are whitened over tokens": (
            "scaled = whiten(raw, trained,",
            "scaled = whiten(raw, mask,",
        ),
    },
    ("algorithms/transforms.py", TRANSFORMS): {
        "filtered responses stay in the statistics": (
            "replace(e, excluded=excluded), kl_coef",
            "e, kl_coef",
        ),
        "truncated responses train the value model": (
            "value_mask=output.value_mask & kept",
            "value_mask=output.value_mask",
        ),
        "the overlong penalty makes no group differ": (
            "algorithm.uniform(rollout, change(rollout, reward_output))",
            "algorithm.uniform(rollout, reward_output)",
        ),
        "a constant length divides the sum of every response": (
            "mb.row_weight[:, None] / (response_length * weight)",
            "mb.row_weight[:, None] / response_length",
        ),
    },
    ("environments/episode.py", EPISODES): {
        "the reward of an episode is at its end": (
            "token_rewards=rewards - place_score(total, rollout.loss_mask)",
            "token_rewards=rewards * 0",
        ),
        "tokens of the environment are trained on": (
            "self.turn += [-1] * len(ids)",
            "self.turn += [self.turns] * len(ids)",
        ),
        "every turn is sampled with the seed of the first": (
            'return seed if turn == 0 else seed_for(seed, "turn", turn)',
            "return seed",
        ),
    },
}
MUTANTS = [
    Mutant(name, file, old, new, tests)
    for (file, tests), bugs in BUGS.items()
    for name, (old, new) in bugs.items()
]


def survives(mutant: Mutant) -> bool:
    """Whether the tests pass with the bug in."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source)
        file = source / "kedge" / mutant.file
        text = file.read_text()
        if mutant.old not in text:
            raise SystemExit(f"{mutant.name}: {mutant.file} no longer holds {mutant.old!r}")
        file.write_text(text.replace(mutant.old, mutant.new))
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pytest",
                "-q",
                "-x",
                "-p",
                "no:cacheprovider",
                *mutant.tests.split(),
            ],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            env=os.environ | {"PYTHONPATH": f"{source}:{ROOT}", "OMP_NUM_THREADS": "1"},
        )
    return done.returncode == 0


def main() -> int:
    """Print CAUGHT or MISSED for each; the number missed is the exit status."""
    wanted = [m for m in MUTANTS if all(word in m.name for word in sys.argv[1:])]
    missed = 0
    for mutant in wanted:
        alive = survives(mutant)
        missed += alive
        sys.stdout.write(f"{'MISSED' if alive else 'CAUGHT'} {mutant.name}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(wanted) - missed} of {len(wanted)} caught\n")
    return missed


if __name__ == "__main__":
    raise SystemExit(main())
