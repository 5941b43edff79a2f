"""Models and prompts for tests of the embedded engine."""

import pytest
import torch
from transformers import DynamicCache, Lfm2ForCausalLM

from kedge.models.compatibility import cache_argument
from kedge.records.types import PromptBatch, Rollout, Sampling
from kedge.rollout.embedded.engine import EmbeddedEngine
from kedge.testing import tiny_policy

PAD, VOCAB = 0, 64
FAMILIES = (
    "llama",
    "gpt2",
    "gpt_neo",
    "gpt_neox",
    "qwen2",
    "opt",
    "bloom",
    "mistral",
    "gemma2",
    "lfm2",
)


def policy(family="llama", **options):
    if family == "gpt_neo":  # alternates full attention with a window that is shorter than the text
        options |= {"attention_types": [[["global", "local"], 1]], "window_size": 4}
        options |= {
            "num_layers": 2
        }  # its name for num_hidden_layers, which early releases of 5 want
    if family in ("qwen2", "mistral", "gemma2", "lfm2"):
        options |= {"num_key_value_heads": 2}
    if family in ("mistral", "gemma2"):
        options |= {"sliding_window": 4, "head_dim": 8}
    if family == "lfm2":  # one layer of attention, one of convolution
        if not Lfm2ForCausalLM._supports_default_dynamic_cache():
            pytest.skip("the embedded engine refuses LFM2 with transformers before 5.5")
        options |= {"full_attn_idxs": [1]}
    if family == "opt":
        options |= {"ffn_dim": 64, "word_embed_proj_dim": 32}
    return tiny_policy(family, **options).requires_grad_(True)


def prompts(lengths=(7, 3, 5, 1, 6, 2), width=7, copies=1):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(8, VOCAB, (len(lengths), width), generator=generator)
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    group = torch.arange(len(lengths)).repeat_interleave(copies)
    return PromptBatch(
        ids=ids.masked_fill(~mask, PAD)[group],
        mask=mask[group],
        group=group,
        row=torch.arange(len(group)),
    )


def sample(model, **sampling):
    """One response to each of six prompts."""
    engine = EmbeddedEngine(model, pad_id=PAD)
    return engine.generate(prompts(), sampling=Sampling(**sampling), seed=0)


def full_logits(model, rollout):
    """Logits [B, R, V] of one forward pass over prompts and responses, without a cache."""
    ids = torch.cat([rollout.prompts.ids, rollout.ids], 1)
    mask = torch.cat([rollout.prompts.mask, rollout.response_mask], 1)
    out = []
    for row, real in zip(ids, mask, strict=True):  # one row at a time: no padding at all
        logits = model.eval()(input_ids=row[real][None]).logits[0].detach()
        n = int(real[-rollout.ids.shape[1] :].sum())
        padded = torch.zeros(rollout.ids.shape[1], logits.shape[-1])
        padded[:n] = logits[-n - 1 : -1]
        out.append(padded)
    return torch.stack(out)


def logprobs_of(logits, rollout):
    picked = logits.log_softmax(-1).gather(-1, rollout.ids[..., None])[..., 0]
    return picked.masked_fill(~rollout.response_mask, 0.0)


def drained(engine):
    """Everything that the engine holds, in the order of the groups."""
    parts = []
    while engine.unfinished:
        part = engine.advance()
        parts += [] if part is None else [part]
    whole = Rollout.cat(parts)
    return whole.rows(whole.prompts.group.argsort(stable=True))


@torch.no_grad()
def largest_gap(models, rollout, row):
    """Recorded log-probabilities against each token's own version after the earlier tokens."""
    cache, read = DynamicCache(), rollout.prompts.ids[row][rollout.prompts.mask[row]]
    gaps = [0.0]
    for slot in range(int(rollout.response_mask[row].sum())):
        model = models[int(rollout.token_versions[row, slot])].eval()
        out, read = (
            model(read[None], **{cache_argument(model): cache}),
            rollout.ids[row, slot][None],
        )
        own = out.logits[0, -1].float().log_softmax(-1)[read]
        gaps.append(float((own - rollout.behavior_logprobs[row, slot]).abs()))
    return max(gaps)


def gaps_of_run(models, trained):
    """The largest gap of all rows, and of one if each token is of the version before."""
    everything = [(rollout, row) for rollout, _ in trained for row in range(len(rollout))]
    swapped = largest_gap([models[0], *models], *everything[-1])
    return max(largest_gap(models, *row) for row in everything), swapped


def kill_after_update(monkeypatch, engine, held, kill):
    """Kill the process of an engine once it has requests that are older than its weights.

    ``held`` gives the keys of its requests; returns those that it lost.
    """
    older, lost, load, advance = set(), [], engine.load_weights, engine.advance

    def note_requests(weights, version):
        older.update(held())
        return load(weights, version)

    def kill_once():
        if not lost and (left := older & {*held()}):
            lost.extend(left)
            kill()
        return advance()

    monkeypatch.setattr(engine, "load_weights", note_requests)
    monkeypatch.setattr(engine, "advance", kill_once)
    return lost
