"""One side: generate and step a few times and print, as JSON, the seconds of each.

python -m benchmarks.classic_vs_trl.side kedge stories260k 4 2
python -m benchmarks.classic_vs_trl.side trl stories260k 4 2     (in TRL 0.11's own environment)
"""

from __future__ import annotations

import json
import platform
import resource
import sys
import time
import warnings
from typing import Any

import torch

from benchmarks.ppo_vs_trl.cases import CASES, EPOCHS, RESPONSE, models, prompts, tokenizer


def trainer(side: str, case: Any) -> Any:
    """The trainer of one side: the same arguments, from another package."""
    if side == "kedge":
        from kedge.ext.trl.classic import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
    else:
        from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
    model = AutoModelForCausalLMWithValueHead.from_pretrained(models(case)[0])
    config = PPOConfig(
        learning_rate=3e-4,
        batch_size=case.batch,
        mini_batch_size=case.batch,
        ppo_epochs=EPOCHS,
        init_kl_coef=0.05,
    )
    return PPOTrainer(config, model, None, tokenizer(case))


def used() -> float:
    found = resource.getrusage(resource.RUSAGE_SELF)
    return found.ru_utime + found.ru_stime


def rounds(made: Any, case: Any, updates: int) -> list[dict[str, float]]:
    """Seconds and CPU seconds of ``generate`` and of ``step``, and the tokens between them."""
    ids = prompts(case, case.batch * updates)
    scores = torch.randn(updates, case.batch, generator=torch.Generator().manual_seed(2))
    options = {"do_sample": True, "top_k": 0, "top_p": 1.0, "max_new_tokens": RESPONSE}
    options["pad_token_id"] = made.tokenizer.pad_token_id
    options["eos_token_id"] = made.tokenizer.eos_token_id
    out = []
    for i in range(updates):
        queries = [torch.tensor(x) for x in ids[i * case.batch : (i + 1) * case.batch]]
        times, cpu = [time.perf_counter()], [used()]
        responses = made.generate(queries, batch_size=case.batch, return_prompt=False, **options)
        times.append(time.perf_counter())
        cpu.append(used())
        made.step(queries, list(responses), list(scores[i]))
        times.append(time.perf_counter())
        cpu.append(used())
        out.append(
            {
                "generate": times[1] - times[0],
                "step": times[2] - times[1],
                "both": times[2] - times[0],
                "cpu_generate": cpu[1] - cpu[0],
                "cpu_step": cpu[2] - cpu[1],
                "cpu_both": cpu[2] - cpu[0],
                "tokens": float(sum(map(len, responses))),
            }
        )
    return out


def main() -> None:
    warnings.simplefilter("ignore")
    side, name, updates = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(int(sys.argv[4]) if len(sys.argv) > 4 else 2)
    case = CASES[name]
    found = rounds(trainer(side, case), case, updates)
    import transformers

    report = {
        "side": side,
        "case": name,
        "batch": case.batch,
        "rounds": found,
        "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
    }
    print("REPORT " + json.dumps(report))


if __name__ == "__main__":
    main()
