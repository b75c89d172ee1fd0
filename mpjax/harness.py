"""Benchmarks with lm_eval, the Language Model Evaluation Harness (`pip install "mpjax[eval]"`).

Hand it a model that `mpjax.load` gave, in the precision to measure:

    lm_eval.simple_evaluate(HarnessLM(lm), tasks=["arc_challenge", "gsm8k"])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import rich.console
from rich.progress import track

from mpjax.evaluate import document_tokens, token_scores
from mpjax.generation import generate
from mpjax.generation_kwargs import GenerationArguments, parse
from mpjax.language_model import LanguageModel
from mpjax.loading import load

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, simple_parse_args_string
except ImportError as error:
    raise ImportError('mpjax.harness needs lm_eval: pip install "mpjax[eval]"') from error


@register_model("mpjax")
class HarnessLM(TemplateLM):
    """A language model as lm_eval sees it; every token is read through a cache in `lm.kv_format`.

    batch_size: requests that are read at a time; those of near lengths share a batch.
    max_length: tokens that a prediction can see, all positions by default; earlier ones are cut.
    max_new_tokens: generated for a request that doesn't say how many.

    Raises ValueError for a model without a tokenizer, and numbers that don't fit the model.
    """

    def __init__(
        self,
        lm: LanguageModel,
        batch_size: int = 8,
        max_length: int | None = None,
        max_new_tokens: int = 256,
    ) -> None:
        super().__init__()
        if lm.tokenizer is None:
            raise ValueError(f"{lm.source} has no tokenizer.json, which tasks of text need")
        positions = lm.config.max_position_embeddings
        max_length = positions if max_length is None else max_length
        if not 1 <= max_length <= positions or int(batch_size) < 1:
            raise ValueError(
                f"max_length is {max_length} and batch_size {batch_size}; expected 1 to the "
                f"{positions} positions of this model, and 1 or more"
            )
        self.lm, self.tokenizer, self.batch_size = lm, lm.tokenizer, int(batch_size)
        self.max_length, self.max_new_tokens = max_length, max_new_tokens
        bos = lm.tokenizer.special_tokens.get("bos_token", "")
        self._added = bos if lm.tokenizer.encode("")[:1] == [lm.tokenizer.bos_id] else ""

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> HarnessLM:
        """For `model="mpjax", model_args={"pretrained": folder, "precision": "W4A16KV8", ...}`."""
        given = {**arg_dict, **(additional_config or {})}
        given = {name: value for name, value in given.items() if value is not None}
        if "pretrained" not in given:
            raise ValueError("model_args lacks pretrained=, the model's folder or hub id")
        loading = {name: given.pop(name, None) for name in ("precision", "dtype")}
        return cls(load(given.pop("pretrained"), **loading), **given)

    @classmethod
    def create_from_arg_string(
        cls, arg_string: str, additional_config: Mapping[str, Any] | None = None
    ) -> HarnessLM:
        """The same for `model_args="pretrained=folder,precision=W4A16KV8,..."`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def get_model_info(self) -> dict[str, Any]:
        """What lm_eval records beside its results."""
        return {"pretrained": str(self.lm.source), "precision": self.lm.precision}

    @property
    def eot_token_id(self) -> int | None:
        """The first of the tokens that end a text."""
        return next(iter(self.tokenizer.stop_ids), None)

    @property
    def prefix_token_id(self) -> int:
        """The token that stands before a text without context: bos, or else eos."""
        if not (start := document_tokens(self.tokenizer, "")):
            raise ValueError(f"{self.lm.source} has no bos or eos token to stand for no context")
        return start[0]

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids of a text, by default with what `tokenizer.json` adds to one."""
        if add_special_tokens is False:
            return self.tokenizer.backend.encode(string, add_special_tokens=False).ids
        # A rendered chat begins with the bos token that the tokenizer adds again.
        return self.tokenizer.encode(string.removeprefix(self._added))

    @property
    def tokenizer_name(self) -> str:
        """Tells tokenizers and chat templates apart where lm_eval caches requests."""
        return str(self.lm.source)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The Jinja source that apply_chat_template renders, for lm_eval's records."""
        return self.tokenizer.chat_templates.get("default") if chat_template else None

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """A chat as text; without generation prompt it ends in the last message, unfinished."""
        text = self.tokenizer.chat(chat_history, add_generation_prompt)
        if not add_generation_prompt:
            begun = chat_history[-1]["content"]
            begun = begun if begun in text else begun.strip()  # as many templates do
            text = text[: text.rindex(begun) + len(begun)]
        return text

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """For (texts, context, continuation): the continuation's ln p, and whether it's greedy."""
        spans = []
        for texts, context, continuation in requests:
            count = len(continuation)
            if not 1 <= count <= self.max_length:
                raise ValueError(
                    f"continuation {texts[1]!r:.40} has {count} tokens, not 1 to {self.max_length}"
                )
            ids = [*(context or [self.prefix_token_id]), *continuation]
            spans.append((ids[-self.max_length - 1 :], count))
        return self._score(spans, disable_tqdm)

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Sums over whole texts, by windows of max_length, of which the last reaches back."""
        spans, owners = [], []
        for owner, request in enumerate(requests):
            start, *ids = document_tokens(self.tokenizer, request.args[0]) or [0]
            for seen, predicted in get_rolling_token_windows(ids, start, self.max_length, 1):
                spans.append(([*seen, predicted[-1]], len(predicted)))
                owners.append(owner)
        sums = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._score(spans, disable_tqdm), strict=True):
            sums[owner] += logprob
        return sums

    def _score(self, spans: list[tuple[list[int], int]], quiet: bool) -> list[tuple[float, bool]]:
        """For (ids, count): the last `count` tokens' ln p, and whether all are the likeliest."""
        ids = [np.asarray(span, np.int32) for span, _ in spans]
        progress = False if quiet else None  # None: in a terminal
        scores = token_scores(self.lm, ids, batch=self.batch_size, progress=progress)
        return [
            (float(found.logprobs[-count:].sum(dtype="f8")), bool(found.greedy[-count:].all()))
            for found, (_, count) in zip(scores, spans, strict=True)
        ]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """What `mpjax.generate` writes for each context; a request's index is its seed."""
        groups: dict[GenerationArguments, list[int]] = {}
        for index, request in enumerate(requests):
            groups.setdefault(parse(request.args[1], self.max_new_tokens), []).append(index)
        batches = []
        for arguments, members in groups.items():
            rows = [(*self._end(requests[i].args[0], arguments), i) for i in members]
            rows.sort(reverse=True)  # near lengths share a batch, and batches a compiled program
            size = min(self.batch_size, len(rows))
            rows += rows[-1:] * (-len(rows) % size)  # the last batch is filled to the same shape
            batches += [(arguments, rows[i : i + size]) for i in range(0, len(rows), size)]
        texts = [""] * len(requests)
        console = rich.console.Console(stderr=True)
        hidden = disable_tqdm or not console.is_terminal
        for arguments, rows in track(batches, "Generating", console=console, disable=hidden):
            _, prompts, indices = zip(*rows, strict=True)
            found = generate(self.lm, prompts, seeds=indices, **vars(arguments))
            for index, text in zip(indices, found.text, strict=True):
                texts[index] = text
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
        return texts

    def _end(self, context: str, arguments: GenerationArguments) -> tuple[int, str]:
        """What of a context fits before the new tokens, its end, behind its number of tokens."""
        if (room := self.max_length - arguments.max_new_tokens) < 1:
            raise ValueError(f"{arguments.max_new_tokens} new tokens leave no room for a context")
        context = context.removeprefix(self._added)
        while (count := len(self.tokenizer.encode(context))) > room and context:
            context = context[count - room :]  # hardly a token is less than a character
        return count, context
