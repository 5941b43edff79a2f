"""Chat templates of six model families, with tokenizers that split text as theirs do.

The templates keep the markup of the families for user, assistant, system and tool messages, and
what is special in each: Qwen 3 drops earlier reasoning, Gemma and Mistral insist on alternation,
Gemma and Phi have no tool messages, Mistral shows tools before the last user message.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

QWEN_TOOLS = (
    "{% elif m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
)
QWEN_2_5 = (
    "{% if tools %}<|im_start|>system\nYou are Qwen.\n\n# Tools\n{% for t in tools %}"
    "{{ t | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% elif messages[0].role != 'system' %}"
    "<|im_start|>system\nYou are Qwen.<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role in ('user', 'system', 'assistant') %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}" + QWEN_TOOLS + "{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN_3 = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% set content = m.content.split('</think>')[-1].lstrip('\n') %}"
    "{% if loop.index0 > ns.last and loop.last %}"
    "{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' + content + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>assistant\n' + content + '<|im_end|>\n' }}{% endif %}"
    "{% elif m.role in ('user', 'system') %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}" + QWEN_TOOLS + "{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{% set role = 'ipython' if m.role == 'tool' else m.role %}"
    "{{ '<|start_header_id|>' + role + '<|end_header_id|>\n\n' }}"
    "{{ m.content | tojson if m.role == 'tool' else m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
GEMMA_2 = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% set role = 'model' if m.role == 'assistant' else m.role %}"
    "{{ '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
PHI_3 = (
    "{% for m in messages %}{% if m.role in ('system', 'user', 'assistant') %}"
    "{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
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
    template: str
    special: tuple[str, ...]
    end: str  # of a turn
    bos: str | None = None
    eos: str | None = None  # None: the end of a turn
    bytes: bool = True  # byte-level BPE; else with blanks as in SentencePiece
    tool_role: bool = True


FAMILIES = {
    "qwen2.5": Family(QWEN_2_5, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "qwen3": Family(QWEN_3, ("<|im_start|>", "<|im_end|>"), "<|im_end|>"),
    "llama3": Family(
        LLAMA_3,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        "<|eot_id|>",
        bos="<|begin_of_text|>",
    ),
    "gemma2": Family(
        GEMMA_2,
        ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        "<end_of_turn>",
        bos="<bos>",
        eos="<eos>",
        bytes=False,
        tool_role=False,
    ),
    "phi3": Family(
        PHI_3,
        ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"),
        "<|end|>",
        eos="<|endoftext|>",
        bytes=False,
        tool_role=False,
    ),
    "mistral": Family(
        MISTRAL,
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
