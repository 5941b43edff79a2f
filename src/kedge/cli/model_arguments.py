"""The model and its adapter on the command line, and what they mean to PEFT and bitsandbytes."""

# ruff: noqa: RUF009  (option() returns dataclasses.field)

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from kedge.config.declare import Count, option
from kedge.records.errors import ConfigError, install_command


@dataclass
class ModelConfig:
    """Model and adapter options of a script.

    ``torch_dtype`` is the name of ``dtype`` in TRL 0.12 to 0.22.  ``trust_remote_code`` is readable
    for scripts of older versions, but is not a flag: it is now an option of the configs.

    Raises:
        ConfigError: both 8 and 4 bits are requested, or two data types.
    """

    model_name_or_path: str | None = option(None, "Folder or hub name of the model.")
    model_revision: str = option("main", "Branch, tag or commit of the model on the hub.")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] | None = option(
        "float32", "Data type of the weights."
    )
    attn_implementation: str | None = option(
        None, "Attention implementation: sdpa, eager, flash_attention_2, ..."
    )
    use_peft: bool = option(False, "Train a LoRA adapter instead of the model's own weights.")
    lora_r: Count = option(16, "Rank of the LoRA adapter; a higher rank trains more weights.")
    lora_alpha: Count = option(32, "The adapter's output is scaled by lora_alpha / lora_r.")
    lora_dropout: float = option(0.05, "Dropout of the adapter; Kedge's trainers turn it off.")
    lora_target_modules: list[str] | None = option(None, "Names of layers that get an adapter.")
    lora_target_parameters: list[str] | None = option(None, "Parameters that get an adapter.")
    lora_modules_to_save: list[str] | None = option(None, "Layers that are also trained in full.")
    lora_task_type: str = option("CAUSAL_LM", "Task type that PEFT records in the adapter.")
    use_rslora: bool = option(False, "Scale the adapter by lora_alpha / sqrt(lora_r) instead.")
    use_dora: bool = option(False, "Train weights' magnitude and direction apart (DoRA).")
    load_in_8bit: bool = option(False, "Keep frozen weights in 8 bits, with bitsandbytes.")
    load_in_4bit: bool = option(False, "Keep frozen weights in 4 bits, with bitsandbytes.")
    bnb_4bit_quant_type: Literal["nf4", "fp4"] = option("nf4", "Data type of 4-bit weights.")
    use_bnb_nested_quant: bool = option(False, "Also quantize the scales of 4-bit weights.")
    bnb_4bit_quant_storage: str | None = option(None, "Type in which 4-bit weights are stored.")
    torch_dtype: Literal["auto", "bfloat16", "float16", "float32"] | None = option(
        None, "Older name of dtype."
    )
    trust_remote_code: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        given = {self.dtype, self.torch_dtype or self.dtype} - {type(self).dtype}
        if len(given) > 1:
            raise ConfigError(
                f"torch_dtype={self.torch_dtype!r} is another name of dtype, but"
                f" dtype={self.dtype!r} is set; set only dtype"
            )
        self.dtype = self.torch_dtype = self.torch_dtype or self.dtype
        if self.load_in_8bit and self.load_in_4bit:
            raise ConfigError("load_in_8bit and load_in_4bit are both set; set only one of them")


def get_peft_config(model_args: ModelConfig) -> Any:
    """``peft.LoraConfig`` of the adapter; None without ``use_peft``.

    Raises:
        ConfigError: PEFT is not installed.
    """
    if not model_args.use_peft:
        return None
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ConfigError(
            f"use_peft=True needs PEFT: {install_command('peft')} ({error})"
        ) from error
    targets: Any = model_args.lora_target_modules
    if isinstance(targets, list) and len(targets) == 1:
        targets = targets[0]  # "all-linear", or a regular expression
    settings = {
        "task_type": model_args.lora_task_type,
        "r": model_args.lora_r,
        "lora_alpha": model_args.lora_alpha,
        "lora_dropout": model_args.lora_dropout,
        "target_modules": targets,
        "target_parameters": model_args.lora_target_parameters,
        "modules_to_save": model_args.lora_modules_to_save,
        "use_rslora": model_args.use_rslora,
        "use_dora": model_args.use_dora,
    }
    return LoraConfig(**{name: x for name, x in settings.items() if x is not None})


def get_quantization_config(model_args: ModelConfig) -> Any:
    """The ``BitsAndBytesConfig`` of the base weights; None without 8 or 4 bits."""
    from transformers import BitsAndBytesConfig

    if model_args.load_in_8bit:
        return BitsAndBytesConfig(load_in_8bit=True)
    if not model_args.load_in_4bit:
        return None
    return BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=None if model_args.dtype == "auto" else model_args.dtype,
        bnb_4bit_quant_type=model_args.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=model_args.use_bnb_nested_quant,
        bnb_4bit_quant_storage=model_args.bnb_4bit_quant_storage,
    )
