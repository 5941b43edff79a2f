"""The reward of the chat example that Kedge does not have ready: the answer is named."""

from kedge.verifiers import string_contains

names_the_answer = string_contains.on("answer")
