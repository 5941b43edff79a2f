"""Lets a model call tools while it answers, in TRL 0.11's request and response format.

A query and what model and tools add to it, with the default tokens:

    What is 13-3?
    <request><Calculator>13-3<call>     written by the model, which stops here
    10<response>                        written by the environment
    Result=10<submit>                   written by the model, the end
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from accelerate.utils import extract_model_from_parallel
from rich.console import Console
from rich.text import Text
from torch import Tensor
from transformers import StoppingCriteria, StoppingCriteriaList

from kedge.classic.trainer import PPOTrainer

Tool = Callable[[str], str]
PROMPT, SYSTEM, MODEL = "black on grey85", "black on cyan3", "black on deep_sky_blue1"
REWARD = "black on plum1"


class TextHistory:
    """An episode as a list of segments, each written by the environment (system) or the model.

    Args:
        text: the first segment, which is the query.
        tokens: tokens of the first segment, int64 [n].
        system: whether the environment wrote it.
    """

    def __init__(self, text: str, tokens: Tensor, system: bool = True) -> None:
        self.system_spans: list[bool] = []
        self.text_spans: list[tuple[int, int]] = []
        self.token_spans: list[tuple[int, int]] = []
        self.text = ""
        self.tokens = tokens.new_empty(0)
        self.token_masks = torch.empty(0, dtype=torch.long, device=tokens.device)
        self.completed = False
        self.truncated = False
        self.reward: Tensor | float = 0.0
        self.append_segment(text, tokens, system=system)

    def append_segment(self, text: str, tokens: Tensor, system: bool = True) -> None:
        """Add a segment; ``token_masks`` is 1 at the model's tokens.

        Raises:
            ValueError: text or tokens are empty.
        """
        if not text or not len(tokens):
            raise ValueError("a segment of a TextHistory must have text and tokens, got none")
        self.text_spans.append((len(self.text), len(self.text) + len(text)))
        self.token_spans.append((len(self.tokens), len(self.tokens) + len(tokens)))
        self.system_spans.append(system)
        self.text += text
        self.tokens = torch.cat([self.tokens, tokens])
        mask = torch.full_like(tokens, int(not system), dtype=torch.long)
        self.token_masks = torch.cat([self.token_masks, mask])

    def complete(self, truncated: bool = False) -> None:
        """End the episode; ``truncated``: a limit ended it."""
        self.completed, self.truncated = True, truncated

    @property
    def last_text_segment(self) -> str:
        """The text of the last segment."""
        return self.text[slice(*self.text_spans[-1])]

    def split_query_response_tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Query int64 [P], the tokens after it int64 [R], and their mask [R]."""
        end = self.token_spans[0][1]
        return self.tokens[:end], self.tokens[end:], self.token_masks[end:]

    def show_text(self, show_legend: bool = False) -> None:
        """Print the episode; colors show who wrote what."""
        text = Text(self.text)
        for (start, end), style in zip(self.text_spans, self._styles(), strict=True):
            text.stylize(style, start, end)
        self._show(text, show_legend)

    def show_tokens(self, tokenizer: object, show_legend: bool = False) -> None:
        """Print the tokens of the episode; colors show who wrote what."""
        text = Text()
        for (start, end), style in zip(self.token_spans, self._styles(), strict=True):
            ids = self.tokens[start:end].tolist()
            for token in tokenizer.convert_ids_to_tokens(ids):  # type: ignore[attr-defined]
                text.append(token, style=style).append(" ")
        self._show(text, show_legend)

    def show_colour_legend(self) -> None:
        """Print what the colors mean."""
        legend = Text("\n\n(Color legend: ")
        styles = {"Prompt": PROMPT, "System": SYSTEM, "Model": MODEL, "Reward": REWARD}
        for i, (name, style) in enumerate(styles.items()):
            legend.append("|" if i else "").append(name, style=style)
        Console().print(legend.append(")"))

    def _styles(self) -> list[str]:
        return [PROMPT, *(SYSTEM if system else MODEL for system in self.system_spans[1:])]

    def _show(self, text: Text, show_legend: bool) -> None:
        Console().print(text.append(f"\n\nReward: {self.reward}", style=REWARD))
        if show_legend:
            self.show_colour_legend()


class StopAt(StoppingCriteria):
    """Ends a row whose newest token completes a stop string; works with every tokenizer."""

    def __init__(self, strings: Sequence[str], tokenizer: Any) -> None:
        self.strings, self.tokenizer = strings, tokenizer
        self.width = max(len(string.encode()) for string in strings)  # upper bound, in tokens

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        """Bool [b] for ids int64 [b, n]."""
        recent = input_ids[:, -self.width :].tolist()
        after = self.tokenizer.batch_decode(recent)
        before = self.tokenizer.batch_decode([ids[:-1] for ids in recent])
        ended = [
            any(new.count(stop) > old.count(stop) for stop in self.strings)
            for new, old in zip(after, before, strict=True)
        ]
        return torch.tensor(ended, device=input_ids.device)


class TextEnvironment:
    """Runs queries through model and tools; the results are those that ``step`` takes.

    Args:
        model: a model with a value head, to sample from.
        tokenizer: the model's tokenizer.
        tools: functions text -> text by name, or a list (named after function or class).
        reward_fn: gets the last segment of every episode and the keywords of ``run``.
        prompt: comes before every query; may show how tools are called.
        max_turns: maximum turns of the model in an episode.
        max_tool_reponse: longer answers of tools are cut to this many characters (TRL's spelling).
        max_length: maximum tokens of an episode; None: no limit.
        generation_kwargs: arguments of transformers' ``generate``.
    """

    request_token = "<request>"
    call_token = "<call>"
    response_token = "<response>"
    submit_token = "<submit>"

    def __init__(
        self,
        model: Any = None,
        tokenizer: Any = None,
        tools: Mapping[str, Tool] | Sequence[Tool] = (),
        reward_fn: Callable[..., Any] | None = None,
        prompt: str | None = None,
        max_turns: int = 4,
        max_tool_reponse: int = 100,
        max_length: int | None = None,
        generation_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.tools: Mapping[str, Tool] = (
            tools
            if isinstance(tools, Mapping)
            else {getattr(tool, "__name__", type(tool).__name__): tool for tool in tools}
        )
        self.reward_fn = reward_fn
        self.prompt = prompt or ""
        self.max_turns = max_turns
        self.max_tool_response = max_tool_reponse
        self.max_length = max_length
        self.generation_kwargs = dict(generation_kwargs or {})
        base = extract_model_from_parallel(model)
        self.is_encoder_decoder = bool(getattr(base, "is_encoder_decoder", False))
        self.current_device = base.pretrained_model.device

    def run(
        self, queries: Sequence[str], **rewards_kwargs: Any
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Any], list[TextHistory]]:
        """Play one episode per query.

        Args:
            queries: each is appended to ``prompt``.
            **rewards_kwargs: passed to ``reward_fn``.

        Returns:
            Queries int64 [P_i], responses int64 [R_i], their masks [R_i] (1 at the model's tokens),
            rewards, and the episodes.  ``PPOTrainer.step`` takes the first four as its arguments
            queries, responses, response_masks and scores.
        """
        texts = [self.prompt + query for query in queries]
        histories = [TextHistory(text, self._encode(text)) for text in texts]
        for _ in range(self.max_turns):
            if all(history.completed for history in histories):
                break
            histories = self.tasks_end_check(self.generate(histories))
            histories = [self.step(history) for history in histories]
            histories = self.tasks_end_check(histories, model_turn=False)
        self.compute_reward(histories, **rewards_kwargs)
        query, response, mask = (
            list(column)
            for column in zip(*(h.split_query_response_tokens() for h in histories), strict=True)
        )
        return query, response, mask, [history.reward for history in histories], histories

    def step(self, history: TextHistory) -> TextHistory:
        """Answer the tool call at the end of an episode; ended episodes are returned unchanged."""
        truncated, ended = self.task_end_check(history)
        if ended:
            history.complete(truncated=truncated)
        if history.completed:
            return history
        response = self._call(history.last_text_segment)
        if len(response) > self.max_tool_response:
            response = response[: max(0, self.max_tool_response - 3)] + "..."
        response += self.response_token
        history.append_segment(response, self._encode(response))
        return history

    def _call(self, text: str) -> str:
        tool, query = self.parse_tool_call(text)
        if tool is None or query is None:
            return f"Unknown tool call: {text}"
        if tool not in self.tools:
            return f"Unknown tool {tool}."
        try:
            return str(self.tools[tool](query))
        except Exception as error:
            return f"Tool error: {error}"

    def parse_tool_call(self, text: str) -> tuple[str | None, str | None]:
        """Name and argument of ``<request><name>argument<call>``; None twice if there is none."""
        start, end = re.escape(self.request_token), re.escape(self.call_token)
        call = re.search(f"{start}(.*?){end}", text, re.DOTALL)
        named = call and re.match(r"[^<]*<(.*?)>(.*)", call[1], re.DOTALL)
        return (named[1], named[2]) if named else (None, None)

    def compute_reward(
        self, histories: list[TextHistory], **reward_kwargs: Any
    ) -> list[TextHistory]:
        """Set the rewards of all episodes with ``reward_fn``.

        Raises:
            ValueError: there is no ``reward_fn``, or it does not return one reward per episode.
        """
        if self.reward_fn is None:
            raise ValueError("TextEnvironment has no reward_fn; pass reward_fn=...")
        texts = [history.last_text_segment for history in histories]
        rewards = self.reward_fn(texts, **reward_kwargs)
        if len(rewards) != len(texts):
            raise ValueError(
                f"reward_fn must return one reward per episode ({len(texts)}), got {len(rewards)}"
            )
        for history, reward in zip(histories, rewards, strict=True):
            history.reward = reward
        return histories

    def generate(self, histories: list[TextHistory]) -> list[TextHistory]:
        """Append the model's next turn to every episode that has not ended."""
        active = [history for history in histories if not history.completed]
        responses = self._generate_batched([history.tokens for history in active])
        for history, response in zip(active, responses, strict=True):
            history.append_segment(self.tokenizer.decode(response), response, system=False)
        return histories

    def tasks_end_check(
        self, histories: list[TextHistory], model_turn: bool = True
    ) -> list[TextHistory]:
        """End the episodes for which ``task_end_check`` is true."""
        for history in histories:
            truncated, ended = self.task_end_check(history, model_turn=model_turn)
            if ended:
                history.complete(truncated=truncated)
        return histories

    def task_end_check(self, history: TextHistory, model_turn: bool = True) -> tuple[bool, bool]:
        """Whether an episode was cut off, and whether it has ended.

        It ends with a submitted answer, at EOS, at ``max_length``, or, if the model wrote last,
        without a tool call.
        """
        if history.completed:
            return False, False
        if self.max_length is not None and len(history.tokens) > self.max_length:
            return True, True
        last = history.last_text_segment
        calls = self.request_token in last and self.call_token in last
        eos = self.tokenizer.eos_token
        ended = self.submit_token in last or (model_turn and not calls)
        return False, ended or (eos is not None and eos in history.text)

    def _generate_batched(
        self,
        query_tensors: list[Tensor],
        batch_size: int = 16,
        pad_to_multiple_of: int | None = None,
    ) -> list[Tensor]:
        """The model's next turn [n_i] for token sequences [P_i], up to a call or an answer."""
        stops = [self.call_token, self.submit_token]
        sampler: Any = self  # provides the tokenizer and the model type that the method reads
        responses = PPOTrainer._generate_batched(
            sampler,
            extract_model_from_parallel(self.model),
            query_tensors,
            batch_size=batch_size,
            return_prompt=False,
            pad_to_multiple_of=pad_to_multiple_of,
            **{
                "stopping_criteria": StoppingCriteriaList([StopAt(stops, self.tokenizer)]),
                **self.generation_kwargs,
            },
        )
        return [self._cut(response, stops) for response in responses]

    def _cut(self, response: Tensor, stops: list[str]) -> Tensor:
        """The tokens up to and including the first that completes a stop string."""
        if any(stop in self.tokenizer.decode(response) for stop in stops):
            for end in range(1, len(response)):
                if any(stop in self.tokenizer.decode(response[:end]) for stop in stops):
                    return response[:end]
        return response

    def _encode(self, text: str) -> Tensor:
        ids: Tensor = self.tokenizer(text, return_tensors="pt").input_ids[0]
        return ids.to(self.current_device)
