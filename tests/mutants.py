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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.mutants_backends import MUTANTS as BACKENDS
from tests.mutants_backends import Mutant

ROOT = Path(__file__).parents[1]


MATH, LOOP = "tests/unit/test_math.py", "tests/unit/test_loop.py"
COMPLETED = "tests/property/test_as_completed.py"
NPLUS = "tests/reference/test_nplus_ppo.py"
UPDATE = "tests/reference/test_whole_update.py -k formula[ppo]"
RULES = f"tests/unit/test_algorithms.py {MATH}"
GROUPS = "tests/unit/test_algorithms_engine.py"
FAILURES = "tests/e2e/test_failures.py"
MUTANTS = [
    Mutant(
        "policy loss with the wrong sign",
        "math/losses.py",
        "torch.max(-bounded * advantages, -ratio.clamp",
        "torch.max(bounded * advantages, ratio.clamp",
        MATH,
    ),
    Mutant(
        "value clipped around the new value",
        "math/losses.py",
        "bounded = old + (values - old).clamp(-clip, clip)\n    return 0.5",
        "bounded = values + (values - old).clamp(-clip, clip)\n    return 0.5",
        MATH,
    ),
    Mutant(
        "whitening adds the mean back",
        "math/masked.py",
        "return scaled if center else",
        "return scaled if not center else",
        MATH,
    ),
    Mutant(
        "whitening per rank",
        "math/masked.py",
        "mean = masked_mean(x, mask, all_reduce=all_reduce)",
        "mean = masked_mean(x, mask)",
        MATH,
    ),
    Mutant(
        "means over padding",
        "math/masked.py",
        "torch.where(mask, x, 0.0).sum(), mask.sum()",
        "x.sum(), mask.sum()",
        MATH,
    ),
    Mutant(
        "GAE sees values beyond the end",
        "math/advantage.py",
        "next_value = torch.where(real, values[:, t], next_value)",
        "next_value = values[:, t]",
        MATH,
    ),
    Mutant(
        "GAE without lambda",
        "math/advantage.py",
        "delta + gamma * lam * advantage",
        "delta + gamma * advantage",
        MATH,
    ),
    Mutant(
        "score on the slot before the last",
        "math/rewards.py",
        "slots == last_true(mask)[:, None]",
        "slots == last_true(mask)[:, None] - 1",
        MATH,
    ),
    Mutant(
        "k3 with the sign of k1",
        "math/kl.py",
        "return (ref - logp).expm1() - (ref - logp)",
        "return (logp - ref).expm1() - (logp - ref)",
        MATH,
    ),
    Mutant(
        "weights sum to one per row",
        "math/losses.py",
        "return mask / _count(mask, all_reduce)",
        "return mask / mask.sum(1, keepdim=True).clamp(min=1)",
        MATH,
    ),
    Mutant(
        "KL added to the reward",
        "algorithms/ppo.py",
        "else rewards - kl_coef * kl",
        "else rewards + kl_coef * kl",
        UPDATE,
    ),
    Mutant(
        "returns from whitened advantages",
        "algorithms/ppo.py",
        "returns = (target + values) * value_mask",
        "returns = (whiten(target, mask, all_reduce=e.all_reduce) + values) * value_mask",
        UPDATE,
    ),
    Mutant(
        "value loss over the policy's mask",
        "algorithms/ppo.py",
        "value_mask=value_mask",
        "value_mask=mask",
        NPLUS,
    ),
    Mutant(
        "micro-batches weighted one by one",
        "loop/stages.py",
        "token_weight=token[part],",
        "token_weight=token_weights(step.rows(part).loss_mask, all_reduce),",
        NPLUS,
    ),
    Mutant(
        "the same order every pass",
        "loop/stages.py",
        "order = torch.randperm(len(experience), generator=shuffle)",
        "order = torch.arange(len(experience))",
        NPLUS,
    ),
    Mutant(
        "dropped rows keep their loss",
        "loop/stages.py",
        "mask = rollout.loss_mask & reward_output.valid[:, None]",
        "mask = rollout.loss_mask",
        LOOP,
    ),
    Mutant(
        "weights never reach the sampler",
        "loop/loop.py",
        "            self.scheduler.send(self._weight_update())\n            report",
        "            report",
        LOOP,
    ),
    Mutant(
        "receipts are not read",
        "rollout/scheduler/worker.py",
        "if (receipt.version, receipt.fingerprint) != (sent.version, sent.fingerprint):",
        "if False:",
        LOOP,
    ),
    Mutant(
        "a checkpoint forgets the KL coefficient",
        "loop/updater.py",
        '        self.kl.load_state_dict(state["kl"])',
        "",
        LOOP,
    ),
    Mutant(
        "an exception of the sampler becomes another",
        "rollout/scheduler/scheduler.py",
        "                    raise self._failure\n",
        "                    raise RuntimeError\n",
        LOOP,
    ),
    Mutant(
        "a failure loses the responses that were sampled ahead",
        "rollout/scheduler/fifo.py",
        "self._requeue([] if self.collector.more else rollouts, step)",
        "self._requeue([], step)",
        FAILURES,
    ),
    Mutant(
        "new weights are loaded before what may start with the old ones",
        "rollout/scheduler/fifo.py",
        "if worker.update is not None:",
        "if worker.update is not None and not self._updates:",
        "tests/property/test_staleness.py",
    ),
    Mutant(
        "a state in mid-update is saved",
        "loop/updater.py",
        "        self.state_consistent = False\n",
        "        pass\n",
        FAILURES,
    ),
    Mutant(
        "groups that are due may wait for those that were done first",
        "rollout/scheduler/dispatch.py",
        "            if required > len(taken):\n",
        "            if False:\n",
        COMPLETED,
    ),
    Mutant(
        "groups start as long as engines are free",
        "rollout/scheduler/dispatch.py",
        "return min(self.end, (version + self.max_lag + 1) * self.per_step)",
        "return self.end",
        COMPLETED,
    ),
    Mutant(
        "a resume starts groups again that are there",
        "rollout/scheduler/dispatch.py",
        "self.next += len(self.done) + len(self.returned)",
        "self.next += len(self.returned)",
        COMPLETED,
    ),
    Mutant(
        "tokens that are too old are trained on",
        "loop/stages.py",
        "age > max_token_lag",
        "age > max_token_lag + 1",
        "tests/unit/test_token_versions.py",
    ),
    Mutant(
        "tokens that are too old lose their value target",
        "loop/stages.py",
        "loss_mask = loss_mask & ~inputs.excluded",
        "value_mask = loss_mask = loss_mask & ~inputs.excluded",
        "tests/unit/test_token_versions.py",
    ),
    Mutant(
        "rewards of turns keep their scale when scores are normalized",
        "algorithms/base.py",
        "dense = factor[:, None] * dense",
        "dense = 1 * dense",
        "tests/environments/test_trainers.py -k however",
    ),
    Mutant(
        "the baseline of a turn is that of the whole response",
        "algorithms/reinforce_pp.py",
        "zeros.masked_scatter(ends, means), ends, gamma=1.0, lam=0.0)",
        "zeros.masked_scatter(ends, means), ends, gamma=0.0, lam=0.0)",
        "tests/environments/test_trainers.py -k however",
    ),
    Mutant(
        "the reference of a trained adapter is its base",
        "trainers/assembly/models.py",
        "return AdapterReference(policy, trained), True",
        "return AdapterReference(policy), False",
        "tests/e2e/test_models_together.py -k reference_of_a",
    ),
    Mutant(
        "rejected responses stay in the denominator",
        "loop/stages.py",
        "for x in (too_old, rejected) if x",
        "for rejected in [None] for x in (too_old,) if x",
        "tests/reference/test_whole_update.py -k rejected",
    ),
    Mutant(
        "tokens are stale as their row is",
        "types.py",
        "return self.token_version.where(self.token_version >= 0, of_row)",
        "return of_row",
        "tests/unit/test_token_versions.py",
    ),
    Mutant(
        "adaptive KL without its clip",
        "loop/control.py",
        "min(max(kl / self.target - 1, -0.2), 0.2)",
        "kl / self.target - 1",
        NPLUS,
    ),
    Mutant(
        "groups by position",
        "math/advantage.py",
        "_, index = group.unique(return_inverse=True)",
        "index = torch.arange(len(group)) // int((group == group[0]).sum())",
        RULES,
    ),
    Mutant(
        "a dropped row stays in its group's count",
        "math/advantage.py",
        "index_add_(0, index, valid.double())",
        "index_add_(0, index, torch.ones_like(kept))",
        RULES,
    ),
    Mutant(
        "the baseline holds the row itself",
        "math/advantage.py",
        "kept - (sums - kept) / (counts - 1).clamp(min=1)",
        "kept - sums / counts.clamp(min=1)",
        RULES,
    ),
    Mutant(
        "KL per token charged to the whole response",
        "algorithms/rloo.py",
        "rewards_to_go(penalty, mask, gamma=1.0)",
        "penalty.sum(1, keepdim=True) * mask",
        RULES,
    ),
    Mutant(
        "rewards clipped before they are normalized",
        "algorithms/base.py",
        "whole, factor = standardize(whole, valid, all_reduce=e.all_reduce),",
        "whole, factor = standardize(whole if clip is None else whole.clamp(-1, 1), valid),",
        RULES,
    ),
    Mutant(
        "advantages normalized per rank",
        "algorithms/rloo.py",
        "standardize(centered, compared, all_reduce=e.all_reduce)",
        "standardize(centered, compared)",
        RULES,
    ),
    Mutant(
        "clip-higher forgotten",
        "math/losses.py",
        "return 1 + (self.low if self.high is None else self.high)",
        "return 1 + self.low",
        RULES,
    ),
    Mutant(
        "a clipped token of CISPO gets no gradient",
        "math/losses.py",
        "-ratio.detach().clamp(max=top) * advantages * logprobs",
        "-ratio.clamp(max=top) * advantages",
        RULES,
    ),
    Mutant(
        "GSPO passes a token's gradient without its weight",
        "math/ratios.py",
        "return whole.exp()[:, None] * (log_ratio - fixed).exp()",
        "return (log_ratio - fixed).exp()",
        RULES,
    ),
    Mutant(
        "KL in the loss without its ratio",
        "algorithms/grpo.py",
        "(kl * ratio if use_bias_correction_kl else kl)",
        "kl",
        RULES,
    ),
    Mutant(
        "rows left out by credit are trained on",
        "loop/stages.py",
        "mask if outputs.loss_mask is None else mask & outputs.loss_mask",
        "mask",
        GROUPS,
    ),
    Mutant(
        "the greedy baseline of another prompt",
        "rollout/scheduler/collector.py",
        "greedy_scores=greedy.scores[group]",
        "greedy_scores=greedy.scores[group.flip(0)]",
        GROUPS,
    ),
    Mutant(
        "greedy responses that are sampled",
        "rollout/scheduler/collector.py",
        "temperature=0.0, top_k=0",
        "top_k=0",
        GROUPS,
    ),
    Mutant(
        "early stopping takes the offending step",
        "loop/control.py",
        "return not over_ratio and (self.keep_last or not self.should_stop(metrics))",
        "return not over_ratio",
        "tests/unit/test_loop.py",
    ),
    *BACKENDS,
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
