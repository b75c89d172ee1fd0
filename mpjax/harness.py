"""Benchmarks with lm_eval, the Language Model Evaluation Harness (`pip install "mpjax[eval]"`).

Hand it a model that `mpjax.load` gave, in the precision to measure:

    lm_eval.simple_evaluate(HarnessLM(lm), tasks=["arc_challenge", "gsm8k"])
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import rich.console
from rich.progress import track

from mpjax.evaluation import document_tokens, token_scores
from mpjax.finite import NotFiniteError
from mpjax.generation import generate
from mpjax.generation_kwargs import GenerationArguments, parse
from mpjax.kernels.checks import require_type, whole_number
from mpjax.language_model import LanguageModel
from mpjax.loading import load

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, simple_parse_args_string
except ImportError as error:
    raise ImportError('mpjax.harness needs lm_eval: pip install "mpjax[eval]"') from error


# Marks where a message ends in a rendered chat; the tab is gone where the template trims messages.
END_OF_MESSAGE = "MPJAX_END_OF_MESSAGE\t"


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
        require_type("lm", lm, LanguageModel, hint=", as mpjax.load gives it")
        tokenizer = lm.require_tokenizer()
        positions = lm.config.max_position_embeddings
        max_length = positions if max_length is None else whole_number("max_length", max_length)
        if max_length > positions:
            raise ValueError(
                f"max_length is {max_length}; expected one that fits into the {positions} "
                "positions of this model"
            )
        self.lm, self.tokenizer, self.max_length = lm, tokenizer, max_length
        self.batch_size = whole_number("batch_size", batch_size)
        self.max_new_tokens = whole_number("max_new_tokens", max_new_tokens)
        bos = tokenizer.special_tokens.get("bos_token", "")
        self._template: str | None = None  # name of the chat template; by default the default one
        self._added = bos if tokenizer.encode("")[:1] == [tokenizer.bos_id] else ""

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> HarnessLM:
        """For `model="mpjax", model_args={"pretrained": folder, "precision": "W4A16KV8", ...}`."""
        given = {**arg_dict, **(additional_config or {})}
        given = {name: value for name, value in given.items() if value is not None}
        if "pretrained" not in given:
            raise ValueError("model_args lacks pretrained=, the model's folder or hub id")
        if "device" in given:
            raise ValueError(
                f"device is {given['device']!r}, and JAX chooses the device: leave it out, and set "
                "CUDA_VISIBLE_DEVICES or JAX_PLATFORMS in the environment"
            )
        if "max_batch_size" in given:
            raise ValueError(
                f"max_batch_size is {given['max_batch_size']!r}, and mpjax doesn't look for the "
                "largest batch that fits: leave it out, and give the number as batch_size"
            )
        if not str(size := given.get("batch_size", 1)).isdecimal():
            raise ValueError(
                f"batch_size is {size!r}; expected a whole number, as mpjax doesn't look for the "
                "largest batch that fits: give one, such as 8"
            )
        of_loading = ("precision", "dtype", "max_positions", "page_size")
        _, *others = inspect.signature(cls).parameters  # the first is the model
        known = ("pretrained", *of_loading, *others)
        if unknown := given.keys() - known:
            raise ValueError(
                f"model_args has {', '.join(sorted(unknown))}, which mpjax doesn't know: expected "
                + ", ".join(known)
            )
        if "batch_size" in given:
            given["batch_size"] = int(given["batch_size"])
        loading = {name: given.pop(name) for name in of_loading if name in given}
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
        return f"{self.lm.source}{'' if self._template is None else '#' + self._template}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """The Jinja source that apply_chat_template renders from now on, for lm_eval's records.

        chat_template: True for the default one, or the name of another of the checkpoint's. Raises
        ValueError for a name that there isn't.
        """
        templates = self.tokenizer.chat_templates
        named = isinstance(chat_template, str) and chat_template not in ("", "default")
        if named and chat_template not in templates:
            known = ", ".join(sorted({"default", *templates}))
            raise ValueError(
                f"{self.lm.source} has no chat template {chat_template!r}: name one of {known}"
            )
        self._template = str(chat_template) if named else None
        return templates.get(self._template or "default") if chat_template else None

    def apply_chat_template(
        self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True
    ) -> str:
        """A chat as text; without generation prompt it ends in the last message, unfinished.

        Raises ValueError for a last message that isn't text, or that the template leaves out.
        """
        if add_generation_prompt or not chat_history:
            return self.tokenizer.chat(chat_history, add_generation_prompt, self._template)
        *before, last = chat_history
        if not isinstance(content := last.get("content"), str):
            raise ValueError(f"the last message has content {content!r:.40}; expected a text")
        # The message alone could also stand in the markup behind it.
        marked = [*before, {**last, "content": content + END_OF_MESSAGE}]
        text = self.tokenizer.chat(marked, False, self._template)
        text, mark, rest = text.rpartition(END_OF_MESSAGE.strip())
        if not mark:
            raise ValueError(
                f"the chat template of {self.lm.source} doesn't write the end of the last message, "
                f"{content[-40:]!r}, which is to be continued: use a task without gen_prefix, or "
                "another chat template"
            )
        if rest.startswith("\t"):
            return text
        inner = content.lstrip()  # of only spaces the template has left none
        return text.removesuffix(inner[len(inner.rstrip()) :])

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
        return self._score(spans, disable_tqdm, "request")

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
        for owner, (logprob, _) in zip(
            owners, self._score(spans, disable_tqdm, "window"), strict=True
        ):
            sums[owner] += logprob
        return sums

    def _score(
        self, spans: list[tuple[list[int], int]], quiet: bool, kind: str
    ) -> list[tuple[float, bool]]:
        """For (ids, count): the last `count` tokens' ln p, and whether all are the likeliest."""
        ids = [np.asarray(span, np.int32) for span, _ in spans]
        progress = False if quiet else None  # None: in a terminal
        scores = token_scores(self.lm, ids, batch=self.batch_size, progress=progress, kind=kind)
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
            try:
                found = generate(self.lm, prompts, seeds=indices, **vars(arguments))
            except NotFiniteError as error:
                index = indices[error.row]
                raise NotFiniteError("request", index, self.lm.config.dtype) from None
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
            found = self.tokenizer.backend.encode(context)
            # Where each token of the text ends; bos and the like are added again to the rest.
            added = zip(found.offsets, found.special_tokens_mask, strict=True)
            ends = [end for (_, end), special in added if not special]
            cut = ends[min(count - room, len(ends)) - 1] if ends else len(context)
            # A token can be a part of a character, and what is left be split another way.
            context = context[max(cut, 1) :]
        return count, context
