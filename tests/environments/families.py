"""Chat templates of six model families, with tokenizers that split text as theirs do.

What is special in each: Qwen 3 drops earlier reasoning, Gemma and Mistral insist on alternation,
Gemma and Phi have no tool messages, Mistral shows tools before the last user message.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

MISTRAL = (
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% set ns = namespace(index=0) %}{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' or (m.role == 'assistant' and m.tool_calls is not defined) %}"
    "{% if (m.role == 'user') != (ns.index % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}"
    "{% if m.role == 'user' %}{% if tools and m == users[-1] %}"
    "[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{{ '[INST] ' + m.content + '[/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + eos_token }}"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}"
    "{{ raise_exception('Tool call IDs should be 9 characters') }}{% endif %}"
    '[TOOL_RESULTS] {"content": {{ m.content }}, "call_id": "{{ m.tool_call_id }}"}'
    "[/TOOL_RESULTS]{% endif %}{% endfor %}"
)

# How Llama 3 and Qwen split text: words with one character before them, numbers, lines.
WORDS = Regex(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "go north and open the red door, the key is in the room where you are",
    "the answer is 42, what is the sum of the numbers 17 and 25 and 100",
    'user assistant system model {"name": "calculator", "arguments": {"a": 1, "b": 2}}',
] * 4


@dataclass(frozen=True)
class Family:
    shipped: str | None  # name of the template among those of TRL; None: Mistral's
    special: tuple[str, ...]
    end: str  # of a turn
    bos: str | None = None
    eos: str | None = None  # None: the end of a turn
    bytes: bool = True  # byte-level BPE; else with blanks as in SentencePiece
    tool_role: bool = True

    @property
    def template(self) -> str:
        if self.shipped is None:
            return MISTRAL
        return (resources.files("trl") / "chat_templates" / f"{self.shipped}.jinja").read_text()


FAMILIES = {
    "qwen2.5": Family("qwen2_5", ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "qwen3": Family("qwen3", ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "llama3": Family(
        "llama3_1",
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        bos="<|begin_of_text|>",
    ),
    "gemma2": Family(
        "gemma",
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
        bos="<bos>",
        eos="<eos>",
        bytes=False,
        tool_role=False,
    ),
    "phi3": Family(
        "phi3",
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "<|end|>",
        eos="<|endoftext|>",
        bytes=False,
        tool_role=False,
    ),
    "mistral": Family(
        None,
        ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]",
         "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        "</s>",
        bos="<s>",
        bytes=False,
    ),
}  # fmt: skip


@cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer of the family's kind, with merges of a few sentences."""
    family = FAMILIES[name]
    core = Tokenizer(models.BPE())
    if family.bytes:
        core.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(WORDS, "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
        core.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        core.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
        alphabet = [chr(i) for i in range(32, 127)] + ["\n", "\u2581"]
    trainer = trainers.BpeTrainer(
        vocab_size=420, initial_alphabet=alphabet, special_tokens=[], show_progress=False
    )
    core.train_from_iterator(CORPUS, trainer)
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in family.special])
    names = {} if family.bos is None else {"bos_token": family.bos}
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=family.eos or family.end,
        chat_template=family.template,
        **names,
    )
