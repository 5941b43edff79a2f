"""Prompts from datasets."""

from kedge.backends.data.encode import PromptReport
from kedge.backends.data.prompts import DatasetPrompts

__all__ = ["DatasetPrompts", "PromptReport"]
