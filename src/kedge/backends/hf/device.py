"""Processes and precision."""

from __future__ import annotations

import atexit
import os

import torch.distributed as dist
from accelerate import Accelerator
from transformers import TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config


def accelerator_for(args: TrainingArguments) -> Accelerator:
    """The accelerator of a run: device, precision and the processes that ``launch`` started."""
    # Else transformers fills models with noise on all ranks but the first.
    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
    made = Accelerator(cpu=args.use_cpu, mixed_precision=precision)
    unset_hf_deepspeed_config()  # else transformers loads empty weights under ZeRO stage 3
    if made.num_processes > 1:
        atexit.register(_leave)
    return made


def _leave() -> None:
    """End the process group while Python still runs: torn down later, gloo's threads may abort."""
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
