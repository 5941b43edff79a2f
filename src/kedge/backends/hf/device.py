"""Processes and precision."""

from __future__ import annotations

from accelerate import Accelerator
from transformers import TrainingArguments


def accelerator_for(args: TrainingArguments) -> Accelerator:
    """The accelerator of a run: device, precision and the processes that ``launch`` started."""
    precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "no"
    return Accelerator(cpu=args.use_cpu, mixed_precision=precision)
