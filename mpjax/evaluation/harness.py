"""Runs benchmarks of lm_eval, the Language Model Evaluation Harness.

It needs `pip install lm_eval`. Load a model in the precision to measure:

    lm = mpjax.load("Qwen/Qwen3-8B", precision="W4A16KV8")

    lm_eval.simple_evaluate(HarnessLM(lm), tasks=["arc_challenge", "gsm8k"])
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import rich.console
from rich.progress import Progress

from mpjax.engine.sizes import MOST_STOP_IDS
from mpjax.engine.temporary import temporary_engine
from mpjax.errors import NotFiniteError
from mpjax.evaluation.harness_arguments import GenerationArguments, generation_arguments
from mpjax.evaluation.perplexity import token_scores
from mpjax.evaluation.windows import document_tokens
from mpjax.kernels.checks import require_type, whole_number
from mpjax.language_model import LanguageModel
from mpjax.loading import load

try:
    from lm_eval.api.instance import Instance
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, simple_parse_args_string
except ImportError as error:
    raise ImportError("mpjax.evaluation.harness needs lm_eval: pip install lm_eval") from error


# Marks the end of a message in a rendered chat. A template that trims messages removes the tab.
END_OF_MESSAGE = "MPJAX_END_OF_MESSAGE\t"


@register_model("mpjax")
class HarnessLM(TemplateLM):
    """Adapts a LanguageModel to lm_eval, with a KV cache in the model's KV format.

    batch_size: number of requests that run together.
    max_length: the most tokens that a prediction depends on, the model's positions by default;
        longer contexts lose their beginning.
    max_new_tokens: the most new tokens for a request that doesn't set its own number.

    Raises ValueError for a model without a tokenizer, and for numbers below 1 or above the model's
    positions.
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
                f"max_length is {max_length}: expected at most {positions}, the positions of this "
                "model"
            )
        self.lm, self.tokenizer, self.max_length = lm, tokenizer, max_length
        self.batch_size = whole_number("batch_size", batch_size)
        self.max_new_tokens = whole_number("max_new_tokens", max_new_tokens)
        bos = tokenizer.special_tokens.get("bos_token", "")
        self._template: str | None = None  # name of the chosen chat template; None for "default"
        self._added = bos if tokenizer.encode("")[:1] == [tokenizer.bos_id] else ""

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: Mapping[str, Any], additional_config: Mapping[str, Any] | None = None
    ) -> HarnessLM:
        """Loads a model from lm_eval's `model_args={"pretrained": folder, "precision": ...}`.

        Keys are `pretrained`, the arguments of `mpjax.load` and those of this class. Raises
        ValueError for other keys.
        """
        given = {**arg_dict, **(additional_config or {})}
        given = {name: value for name, value in given.items() if value is not None}
        if "pretrained" not in given:
            raise ValueError("model_args has no pretrained: give the model's folder or hub id")
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
                f"batch_size is {size!r}: expected a whole number, such as 8, because mpjax "
                "doesn't look for the largest batch that fits"
            )
        of_loading = ("precision", "dtype", "max_positions", "page_size", "devices")
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
        """Loads a model from lm_eval's `model_args="pretrained=folder,precision=W4A16KV8,..."`."""
        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def get_model_info(self) -> dict[str, Any]:
        """The model's folder and precision, which lm_eval records with its results."""
        return {"pretrained": str(self.lm.source), "precision": self.lm.precision}

    @property
    def eot_token_id(self) -> int | None:
        """Id of the first stop token, None without one."""
        return next(iter(self.tokenizer.stop_ids), None)

    @property
    def prefix_token_id(self) -> int:
        """Id of the token that precedes a text without context: bos, or eos without bos."""
        if not (start := document_tokens(self.tokenizer, "")):
            raise ValueError(
                f"{self.lm.source} has neither a bos nor an eos token, and a text without context "
                "needs one in front: add one to tokenizer_config.json"
            )
        return start[0]

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids of a text, by default with the special tokens that `tokenizer.json` adds."""
        if add_special_tokens is False:
            return self.tokenizer.backend.encode(string, add_special_tokens=False).ids
        # A rendered chat already begins with a bos token, and `encode` adds another.
        return self.tokenizer.encode(string.removeprefix(self._added))

    @property
    def tokenizer_name(self) -> str:
        """A name for the tokenizer and chat template, under which lm_eval caches requests."""
        return f"{self.lm.source}{'' if self._template is None else '#' + self._template}"

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Chooses the template of `apply_chat_template`; returns its Jinja source, for records.

        chat_template: True for the checkpoint's default template, or the name of another. Raises
        ValueError for a name that the checkpoint lacks.
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
        """Renders a chat; without generation prompt, the text ends inside the last message.

        The model can then continue that message. Raises ValueError for a last message that isn't
        text, or that the template drops.
        """
        if add_generation_prompt or not chat_history:
            return self.tokenizer.chat(chat_history, add_generation_prompt, self._template)
        *before, last = chat_history
        if not isinstance(content := last.get("content"), str):
            raise ValueError(f"the last message has content {content!r:.40}: expected a text")
        # A marker, because the message's own text could also occur in the markup after it.
        marked = [*before, {**last, "content": content + END_OF_MESSAGE}]
        text = self.tokenizer.chat(marked, False, self._template)
        text, _, rest = text.rpartition(END_OF_MESSAGE.strip())
        if rest.startswith("\t"):
            return text
        # The template has trimmed the message, so the message's trailing spaces are removed too.
        inner = content.lstrip()
        return text.removesuffix(inner[len(inner.rstrip()) :])

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Scores requests (texts, context ids, continuation ids).

        Returns for each the continuation's ln p and whether all its tokens are the most likely.
        """
        spans = []
        for texts, context, continuation in requests:
            count = len(continuation)
            if not 1 <= count <= self.max_length:
                raise ValueError(
                    f"the continuation {texts[1]!r:.40} has {count} tokens: expected 1 to "
                    f"{self.max_length}, the max_length"
                )
            ids = [*(context or [self.prefix_token_id]), *continuation]
            spans.append((ids[-self.max_length - 1 :], count))
        return self._score(spans, disable_tqdm, "request")

    def loglikelihood_rolling(
        self, requests: Sequence[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Sums ln p over whole texts in windows of max_length.

        The last window is full too: it begins with tokens that the window before has predicted.
        """
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
        """Scores the last `count` tokens of each (ids, count).

        Returns for each the sum of ln p and whether all are the most likely tokens.
        """
        ids = [np.asarray(span, np.int32) for span, _ in spans]
        progress = False if quiet else None  # None shows a bar if stderr is a terminal
        scores = token_scores(self.lm, ids, batch=self.batch_size, progress=progress, kind=kind)
        return [
            (float(found.logprobs[-count:].sum(dtype="f8")), bool(found.greedy[-count:].all()))
            for found, (_, count) in zip(scores, spans, strict=True)
        ]

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generates a text for each context; a request's index is its seed."""
        requests = list(requests)
        asked = [generation_arguments(one.args[1], self.max_new_tokens) for one in requests]
        prompts = [
            self._cut_context(one.args[0], own) for one, own in zip(requests, asked, strict=True)
        ]
        texts = [""] * len(requests)
        if not requests:
            return texts
        lengths = sorted((len(ids) for ids in prompts), reverse=True)[: self.batch_size]
        most = max(own.max_new_tokens for own in asked)
        engine = temporary_engine(self.lm, lengths, most, stop_ids=MOST_STOP_IDS)
        console = rich.console.Console(stderr=True)
        hidden = disable_tqdm or not console.is_terminal
        with engine, Progress(console=console, disable=hidden) as bar:
            task = bar.add_task("Generating", total=len(requests))
            handles = {
                engine.submit(prompts[i], seed=i, **vars(asked[i])): i
                for i in sorted(range(len(requests)), key=lambda i: -len(prompts[i]))
            }
            while engine.has_work:
                for event in engine.step():
                    if event.finish_reason is None:
                        continue
                    index, handle = handles[event.handle], event.handle
                    if event.finish_reason == "error":
                        raise NotFiniteError("request", index, self.lm.config.dtype)
                    texts[index] = handle.text
                    self.cache_hook.add_partial("generate_until", requests[index].args, handle.text)
                    bar.advance(task)
        return texts

    def _cut_context(self, context: str, arguments: GenerationArguments) -> list[int]:
        """The token ids of a context, cut at its beginning to leave room for new tokens."""
        if (room := self.max_length - arguments.max_new_tokens) < 1:
            raise ValueError(
                f"the task asks for {arguments.max_new_tokens} new tokens, which leave no room for "
                f"a context in a max_length of {self.max_length}: raise max_length, or lower the "
                "task's max_gen_toks"
            )
        context = context.removeprefix(self._added)
        while len(ids := self.tokenizer.encode(context)) > room and context:
            found = self.tokenizer.backend.encode(context)
            # Ends of the text's tokens; special tokens such as bos are not part of the text.
            added = zip(found.offsets, found.special_tokens_mask, strict=True)
            ends = [end for (_, end), special in added if not special]
            cut = ends[min(len(ids) - room, len(ends)) - 1] if ends else len(context)
            # At least one character is cut, since a token may end within a character. The shorter
            # text may be tokenised differently, so the loop counts again.
            context = context[max(cut, 1) :]
        return ids
