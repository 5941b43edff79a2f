"""Prompts from datasets: what is read, how it is tokenized, and what is refused."""

from __future__ import annotations

import logging
import pickle

import pytest
import torch
from datasets import Dataset, DatasetDict
from tokenizers import processors
from transformers import DataCollatorWithPadding

from kedge.data import DatasetPrompts
from kedge.records.errors import ConfigError, DataError
from tests.e2e.small import length_reward, small

from .text_toys import EOS, PAD, TEMPLATE, eos_adding_tokenizer, word_tokenizer

ROWS = [
    {"prompt": "w3 w4 w5", "answer": 1},
    {"prompt": "w6", "answer": 2},
    {"prompt": "w7 w8", "answer": 3},
]


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return len(ROWS)

    def __getitem__(self, at):
        return ROWS[at]


def make(dataset=ROWS, tokenizer=None, **options):
    options = {"prompts_per_step": 3, "seed": 0, "shuffle": False} | options
    return DatasetPrompts(dataset, tokenizer or word_tokenizer(), **options)


@pytest.mark.parametrize(
    "dataset",
    [
        ROWS,
        tuple(ROWS),
        Dataset.from_list(ROWS),
        Dataset.from_list(ROWS).with_format("torch"),
        {"prompt": [r["prompt"] for r in ROWS], "answer": torch.tensor([1, 2, 3])},
        Rows(),
    ],
)
@pytest.mark.parametrize("tokenizer", [word_tokenizer(), eos_adding_tokenizer()])
def test_every_kind_of_dataset_gives_the_same_batch(dataset, tokenizer):
    """An EOS that the tokenizer appends does not end the prompt."""
    batch = make(dataset, tokenizer).batch(0)
    assert batch.ids.tolist() == [[3, 4, 5], [PAD, PAD, 6], [PAD, 7, 8]]
    assert batch.mask.tolist() == [[True] * 3, [False, False, True], [False, True, True]]
    assert batch.group.tolist() == batch.row.tolist() == [0, 1, 2]
    assert batch.columns["answer"] == [1, 2, 3]
    assert batch.columns["prompt"] == ["w3 w4 w5", "w6", "w7 w8"]
    assert batch.ids.dtype == batch.group.dtype == batch.row.dtype == torch.int64


def test_a_query_column_is_a_prompt_column_and_others_can_be_left_out():
    rows = [{"query": "w3", "answer": 1, "long": "x"}]
    batch = make(rows, prompts_per_step=1, columns={"answer", "none"}).batch(0)
    assert batch.ids.tolist() == [[3]]
    assert batch.columns == {"query": ["w3"], "prompt": ["w3"], "answer": [1]}


def test_given_token_ids_are_taken_as_they_are():
    batch = make([{"input_ids": [PAD, 3, EOS]}, {"input_ids": [4]}], prompts_per_step=2).batch(0)
    assert batch.ids.tolist() == [[PAD, 3, EOS], [PAD, PAD, 4]]
    assert batch.mask.tolist() == [[True] * 3, [False, False, True]]  # by length, not by id
    assert batch.columns["prompt"] == ["w3", "w4"]


def test_an_attention_mask_says_what_padding_is():
    rows = [
        {"input_ids": [PAD, PAD, 3, 4], "attention_mask": [0, 0, 1, 1]},
        {"input_ids": [5, PAD, PAD, PAD], "attention_mask": [1, 1, 0, 0]},
    ]
    batch = make(rows, prompts_per_step=2).batch(0)
    assert batch.ids.tolist() == [[3, 4], [5, PAD]]
    assert batch.mask.all()
    assert set(batch.columns) == {"prompt"}


def test_chat_messages_use_the_chat_template():
    words = ["user", "assistant", "w5", "w6"]
    tokenizer = word_tokenizer(words, chat_template=TEMPLATE)
    chats = [
        [{"role": "user", "content": "w5"}],
        [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6"}],
    ]
    batch = make([{"prompt": c} for c in chats], tokenizer, prompts_per_step=2).batch(0)
    assert batch.ids[0].tolist()[-4:] == [3, 5, EOS, 4]  # user w5 <eos> assistant
    assert batch.ids[1].tolist() == [3, 5, EOS, 4, 6]  # a begun answer is continued
    assert batch.columns["prompt"] == chats


def test_a_tokenizer_without_pad_fills_with_eos_says_so_once_and_is_left_alone(caplog):
    tokenizer = word_tokenizer(pad=False)
    before = pickle.dumps(tokenizer.init_kwargs)
    with caplog.at_level(logging.WARNING):
        prompts = make(tokenizer=tokenizer)
        batch = prompts.batch(0)
        prompts.batch(1)
    assert batch.ids[1].tolist() == [EOS, EOS, 6]
    assert batch.mask[1].tolist() == [False, False, True]
    assert caplog.text.count("no pad token") == 1
    assert tokenizer.pad_token is None
    assert pickle.dumps(tokenizer.init_kwargs) == before


@pytest.mark.parametrize(
    ("overlong", "ids", "counts"),
    [
        ("drop", [[PAD, 6], [7, 8]], (3, 1, 0, 2)),
        ("truncate", [[4, 5], [PAD, 6], [7, 8]], (3, 0, 1, 2)),
    ],
)
def test_long_prompts_are_dropped_or_cut_to_their_end(overlong, ids, counts):
    source = make(prompts_per_step=len(ids), max_prompt_length=2, overlong=overlong)
    assert source.batch(0).ids.tolist() == ids
    report = source.report
    assert (report.rows, report.dropped, report.truncated, report.longest) == counts
    assert len(source) == len(ids)
    assert source.batch(0).columns["answer"][-1] == 3  # columns stay with their prompt


def test_several_generations_share_prompt_and_group_but_not_the_row():
    batch = make(num_generations=2).batch(0)
    assert batch.group.tolist() == [0, 0, 1, 1, 2, 2]
    assert batch.row.tolist() == [0, 1, 2, 3, 4, 5]
    assert batch.columns["answer"] == [1, 1, 2, 2, 3, 3]
    assert torch.equal(batch.ids[0], batch.ids[1])


def test_a_data_collator_pads_and_its_mask_is_believed():
    seen = []

    def collate(features):
        seen.append(features)
        ids = [f["input_ids"] + [PAD] * (4 - len(f["input_ids"])) for f in features]
        mask = [f["attention_mask"] + [0] * (4 - len(f["input_ids"])) for f in features]
        return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}

    batch = make(data_collator=collate).batch(0)
    assert seen[0][1] == {"input_ids": [6], "attention_mask": [1]}
    assert batch.ids.tolist() == [[PAD, 3, 4, 5], [PAD, PAD, PAD, 6], [PAD, PAD, 7, 8]]
    assert batch.mask.sum(1).tolist() == [3, 1, 2]
    tokenizer = word_tokenizer()
    batch = make(tokenizer=tokenizer, data_collator=DataCollatorWithPadding(tokenizer)).batch(0)
    assert batch.ids.tolist() == [[3, 4, 5], [PAD, PAD, 6], [PAD, 7, 8]]


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        (lambda rows: {"input_ids": [[1]] * 3}, r"input_ids of shapes \(3, 1\) and \(0,\)"),
        (lambda rows: {"input_ids": [[1]], "attention_mask": [[1]]}, r"\(1, 1\) for 3 prompts"),
        (
            lambda rows: {"input_ids": [[1]] * 3, "attention_mask": [[1], [0], [1]]},
            "each row with a real token",
        ),
    ],
)
def test_collators_that_cannot_be_used(collate, message):
    with pytest.raises(DataError, match=message):
        make(data_collator=collate).batch(0)


@pytest.mark.slow
def test_tokenizing_in_several_processes_changes_nothing():
    rows = Dataset.from_list(ROWS * 4)
    one, two = (make(rows, dataset_num_proc=n, prompts_per_step=12).batch(0) for n in (None, 2))
    assert torch.equal(one.ids, two.ids)


CHAT = [{"role": "user", "content": "w5"}]
TALKING = {"tokenizer": word_tokenizer(chat_template=TEMPLATE)}
SURROGATE = r"'prompt', row 1: .* is the lone surrogate '\\ud800'"


class Unreadable(torch.utils.data.Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, at):
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (None, {}, "the dataset is None; load it first"),
        (DatasetDict(train=Dataset.from_list(ROWS)), {}, "the splits train; pass one of them"),
        (Dataset.from_list(ROWS).to_iterable_dataset(), {}, "IterableDataset, a stream.*take"),
        (iter(ROWS), {}, "a stream without row indices"),
        (3, {}, "a dataset must be .*, got int"),
        ([], {}, "the dataset is empty"),
        ([{"text": "w3", "n": 1}], {}, "no prompts: its columns are 'text', 'n'. .*rename"),
        (["w3"], {}, "row 0 of the dataset .list. must be a dict .*, got str"),
        (Unreadable(), {}, "row 0 of the dataset, a Unreadable, cannot be read: OSError"),
        ([{"prompt": "w3"}, {"prompt": "w4 \ud800"}], {}, SURROGATE),
        ([{"prompt": CHAT}, {"prompt": [CHAT[0] | {"content": "w4 \ud800"}]}], TALKING, SURROGATE),
        ([{"prompt": CHAT}, {"prompt": "w3"}], TALKING, "expected chat messages, got str 'w3"),
        ({"prompt": "w3"}, {}, "column 'prompt' must be a list, got str"),
        ({"prompt": ["w3"], "n": [1, 2]}, {}, "columns must have the same length"),
        ([{"prompt": "w3"}, {"prompt": None}], {}, "row 1: expected text, got NoneType None"),
        ([{"prompt": 3}], {}, "row 0: expected text, got int 3"),
        (
            [{"prompt": [{"from": "human", "value": "w3"}]}],
            {},
            "row 0: expected chat messages, got",
        ),
        ([{"prompt": "w3"}, {"prompt": ""}], {}, r"row 1 of the dataset is an empty prompt"),
        ([{"prompt": CHAT}], {}, "holds chat messages, but the tokenizer has no chat template"),
        ([{"input_ids": [3, -1]}], {}, r"row 0: expected a list of token ids .*got list \[3, -1"),
        (
            [{"input_ids": [3], "attention_mask": [1, 1]}],
            {},
            "row 0 of the dataset: attention_mask and input_ids",
        ),
        (
            [{"input_ids": [3], "attention_mask": [0]}],
            {},
            "row 0 of the dataset is an empty prompt",
        ),
        (
            [{"prompt": "w3 w4"}, {"prompt": "w3 w4 w5"}],
            {"max_prompt_length": 1},
            r"all 2 prompts are longer than max_prompt_length=1 .*longest has 3.*'truncate'",
        ),
    ],
)
def test_datasets_that_cannot_be_used(dataset, options, message):
    with pytest.raises(DataError, match=message):
        make(dataset, **options)


def test_rows_that_ranks_cannot_share():
    with pytest.raises(ConfigError, match=r"world_size=2 does not divide the step's 3 .*do: 2, 4"):
        make(world_size=2)


@pytest.mark.parametrize(
    ("template", "error"),
    [
        ("{% for m in messages %}", ", line 1.* TemplateSyntaxError: Unexpected end"),
        ("{{ raise_exception('no \x1b[2J') }}", r"TemplateError: no \\x1b\[2J"),
        ("{{ nothing.x }}", "UndefinedError: 'nothing' is undefined"),
        ("{{ messages[0]['content'] + 1 }}", "TypeError: can only concatenate str"),
        ("{% for i in range(10**9) %}x{% endfor %}", "OverflowError: Range too big"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError: access to attribute '__class__'"),
    ],
)
def test_a_template_that_fails_is_named_with_column_row_and_file(template, error):
    tokenizer = word_tokenizer(chat_template=template)
    tokenizer.name_or_path = "models/mine"
    chats = [{"prompt": [{"role": "user", "content": "w3 w4"}]}] * 4
    said = rf"column 'prompt', row 0: the chat template of 'models/mine' \(chat_template.*{error}"
    with pytest.raises(DataError, match=said):
        small(processing_class=tokenizer, train_dataset=chats)


@pytest.mark.parametrize("given", [{"thinking": True}, '{"thinking": true}'])
def test_the_chat_template_gets_what_the_config_says(given):
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }} {{ 'w7' if thinking else 'w8' }}"
    chats = [{"prompt": [{"role": "user", "content": "w3 w4"}]}] * 4
    options = {"reward_model": None, "reward_funcs": length_reward, "value_source": "policy"}
    made = small(
        processing_class=tokenizer, train_dataset=chats, chat_template_kwargs=given, **options
    )
    assert made.engine.source.batch(0).ids.tolist() == [[3, 4, 7]] * 4
    plain = small(processing_class=tokenizer, train_dataset=chats, **options)
    assert plain.engine.source.batch(0).ids.tolist() == [[3, 4, 8]] * 4


def test_a_text_that_begins_with_bos_keeps_one(caplog):
    tokenizer = word_tokenizer(bos_token="w3")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="w3 $A", special_tokens=[("w3", 3)]
    )
    rows = [{"prompt": text} for text in ("w3 w5", "w6", "w3 w3 w7")]
    batch = make(rows, tokenizer).batch(0)
    found = [ids[mask].tolist() for ids, mask in zip(batch.ids, batch.mask, strict=True)]
    assert found == [[3, 5], [3, 6], [3, 3, 7]]  # what stood in the text stays
    assert caplog.messages == [
        "2 prompts already begin with the BOS token (already rendered by a chat template?); the"
        " second BOS was removed"
    ]
    caplog.clear()
    assert make([{"prompt": "w3 w3"}], word_tokenizer(bos_token="w3")).batch(0).ids[0].tolist() == [
        3,
        3,
    ]
    assert caplog.messages == []


def test_columns_have_names_of_text():
    with pytest.raises(DataError, match="column names must be text, got 3"):
        make([{"prompt": "w3", 3: "1"}])
