"""Prompts from datasets."""

from kedge.data.encode import PromptReport
from kedge.data.prompts import DatasetPrompts

__all__ = ["DatasetPrompts", "PromptReport"]
