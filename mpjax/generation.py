"""Text in, text out."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from mpjax.batch import Batch, Job, run
from mpjax.language_model import LanguageModel
from mpjax.prompts import EXPECTED, Prompt, Prompts, is_single
from mpjax.sampling import Sampling


@dataclasses.dataclass(frozen=True)
class Generation:
    """What `generate` returns: one entry per prompt in each list.

    text: the completions, without stop strings; behind the prompts they are what the tokenizer
        decodes of both. tokens: their ids, stop token included.
    logprobs: of each token, natural logarithm, under the unmodified distribution.
    finish_reasons: `stop` (a stop token or string) or `length`.
    prompt_tokens: tokens of each prompt. prefill_seconds: until the first token of all rows, and
    decode_seconds after it, both including compilation where something was new.
    """

    text: list[str]
    tokens: list[list[int]]
    logprobs: list[list[float]]
    finish_reasons: list[str]
    prompt_tokens: list[int]
    prefill_seconds: float
    decode_seconds: float

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all rows after the first, over the time that decoding took."""
        decoded = sum(len(row) - 1 for row in self.tokens)
        return decoded / self.decode_seconds if self.decode_seconds else 0.0


@dataclasses.dataclass(frozen=True)
class TextPiece:
    """What `stream_batch` yields: a part of a row's text.

    row: of which prompt. text: what follows the row's earlier pieces.
    finish_reason: `stop` or `length` in the last piece of a row, whose text may be empty; None in
        the others.
    """

    row: int
    text: str
    finish_reason: str | None = None


def generate(
    lm: LanguageModel,
    prompts: Prompts,
    *,
    max_new_tokens: int = 128,
    sampling: Sampling | Mapping[str, Any] | None = None,
    stop: str | Sequence[str] | None = (),
    seeds: Any = None,
    chat_template: str | None = None,
) -> Generation:
    """Completes a batch of prompts.

    prompts: texts; token ids, which are read as they are; or chats (lists of
        `{"role": ..., "content": ...}`) that go through a chat template. One of any is a batch of
        one. Ids may be lists or arrays, and an array [batch, tokens] is a batch.
    max_new_tokens: of each row.
    sampling: a Sampling, or a mapping such as {"temperature": 0.7}; greedy by default. Until its
        min_new_tokens, stop tokens are held back, and stop strings are text like any other.
    stop: strings that end a row; the text ends before them.
    seeds: one per prompt, which alone decide what it draws, whatever its neighbours (but for
        rounding: kernels choose their tiles by the batch's size); row numbers by default. Integers
        or JAX's keys, as for generate_tokens.
    chat_template: of chats: the name of one of the checkpoint's templates, or Jinja source. By
        default the checkpoint's own.

    A program is compiled for each size of the batch, of the longest prompt and of max_new_tokens,
    and all three are rounded up so that few are: the batch to 1, 2, 4 or a multiple of 8, the
    others to a power of two from 16 to 512 or a multiple of 512. Padding changes no row's result,
    and takes time and memory like any other row and token; where the device lacks the memory for
    padding rows, there are none.

    Raises ValueError for an empty prompt, a prompt that leaves no room, or arguments that don't
    fit; mpjax.finite.NotFiniteError, a ValueError, for a model that computes NaN or infinite
    logits; DeviceMemoryError, before anything is allocated, where the cache is too large.
    """
    job = Job(prompts, max_new_tokens, sampling, stop, seeds, chat_template)
    [batch] = collections.deque(run(lm, job, watch=False), maxlen=1)
    return _generation(batch)


def stream(
    lm: LanguageModel,
    prompt: Prompt,
    *,
    max_new_tokens: int = 128,
    sampling: Sampling | Mapping[str, Any] | None = None,
    stop: str | Sequence[str] | None = (),
    seed: Any = 0,
    chat_template: str | None = None,
) -> Generator[str, None, Generation]:
    """Completes one prompt and yields its text as it comes: `generate` in pieces.

    The pieces joined are the text that `generate` returns. The generator's return value (of
    `yield from`, or StopIteration.value) is the Generation. Arguments are those of `generate`, and
    errors are raised where the first piece is asked for.
    """
    if not is_single(prompt):
        raise ValueError(f"stream completes one prompt, {EXPECTED}: stream_batch takes several")
    job = Job([prompt], max_new_tokens, sampling, stop, [seed], chat_template)
    for batch in run(lm, job, watch=True):
        if text := batch.rows[0].take():
            yield text
    return _generation(batch)


def stream_batch(
    lm: LanguageModel,
    prompts: Prompts,
    *,
    max_new_tokens: int = 128,
    sampling: Sampling | Mapping[str, Any] | None = None,
    stop: str | Sequence[str] | None = (),
    seeds: Any = None,
    chat_template: str | None = None,
) -> Generator[TextPiece, None, Generation]:
    """Completes a batch of prompts and yields the text of all rows as it comes.

        for piece in mpjax.stream_batch(lm, ["def f(", "import "]):
            texts[piece.row] += piece.text

    The texts of a row's pieces joined are the text that `generate` returns for it, and each row has
    one piece with a finish_reason, its last. The generator's return value is the Generation.
    Arguments and errors are those of `generate`, as for `stream`.
    """
    ended: set[int] = set()
    job = Job(prompts, max_new_tokens, sampling, stop, seeds, chat_template)
    for batch in run(lm, job, watch=True):
        for row, found in enumerate(batch.rows):
            text = found.take()
            if found.ended and row not in ended:
                ended.add(row)
                yield TextPiece(row, text, batch.finish_reason(row))
            elif text:
                yield TextPiece(row, text)
    return _generation(batch)


def _generation(batch: Batch) -> Generation:
    """The finished batch."""
    return Generation(
        text=[row.text for row in batch.rows],
        tokens=[row.tokens for row in batch.rows],
        logprobs=[
            values[: len(row.tokens)].tolist()
            for row, values in zip(batch.rows, batch.logprobs, strict=False)
        ],
        finish_reasons=[batch.finish_reason(row) for row in range(len(batch.rows))],
        prompt_tokens=batch.prompt_tokens,
        prefill_seconds=batch.prefill_seconds,
        decode_seconds=batch.decode_seconds,
    )
