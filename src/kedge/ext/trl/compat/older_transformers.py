"""Behavior of older transformers that programs of the step API rely on."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

_MARK = "_kedge_compat"


def restore() -> None:
    """Restore what transformers 5 dropped, where it is missing.

    * ``return_all_scores=True`` of a text-classification pipeline: all labels, in their order.
    * ``tokenizer.additional_special_tokens_ids``.
    """
    from transformers.pipelines.text_classification import TextClassificationPipeline

    if not hasattr(TextClassificationPipeline, "return_all_scores"):
        _restore_all_scores(TextClassificationPipeline)
    tokenizer: Any = PreTrainedTokenizerBase
    if not hasattr(tokenizer, "additional_special_tokens_ids"):
        tokenizer.additional_special_tokens_ids = property(_additional_ids)


def restore_template_ids() -> None:
    """Make ``apply_chat_template`` return token ids unless ``return_dict`` is given."""
    current: Any = PreTrainedTokenizerBase.apply_chat_template
    if hasattr(current, _MARK):
        return

    def apply(self: Any, *args: Any, **kwargs: Any) -> Any:
        return current(self, *args, **{"return_dict": False} | kwargs)

    setattr(apply, _MARK, True)
    PreTrainedTokenizerBase.apply_chat_template = apply  # type: ignore[method-assign]


def _restore_all_scores(pipeline: Any) -> None:
    current = pipeline._sanitize_parameters
    if hasattr(current, _MARK):
        return

    def sanitize(
        self: Any, *args: Any, return_all_scores: bool | None = None, **kwargs: Any
    ) -> Any:
        preprocess, forward, postprocess = current(self, *args, **kwargs)
        if return_all_scores is not None:
            postprocess["top_k"] = None if return_all_scores else 1
        return preprocess, forward, postprocess

    setattr(sanitize, _MARK, True)
    pipeline._sanitize_parameters = sanitize


def _additional_ids(tokenizer: Any) -> list[int]:
    """Ids of special tokens without a role such as EOS."""
    named = {getattr(tokenizer, name, None) for name in tokenizer.SPECIAL_TOKENS_ATTRIBUTES}
    extra = [token for token in tokenizer.all_special_tokens if token not in named]
    ids: list[int] = tokenizer.convert_tokens_to_ids(extra)
    return ids
