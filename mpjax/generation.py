"""Generates text: `generate` for batches, `stream` and `stream_batch` for text as it comes."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Generator, Mapping, Sequence
from typing import Any

from mpjax.batch import Batch, Job, run
from mpjax.language_model import LanguageModel
from mpjax.prompts import EXPECTED, Prompt, Prompts, is_single
from mpjax.sampling import Sampling
from mpjax.speculation.proposer import Proposer
from mpjax.speculation.report import SpeculationReport


@dataclasses.dataclass(frozen=True)
class Generation:
    """Completions of a batch, as `generate` returns them; lists have an entry for each prompt.

    text: the completions, without stop strings. Prompt and completion joined are the text that the
        tokenizer decodes from the tokens of both.
    tokens: ids of the completions, stop token included.
    logprobs: natural logarithm of each token's probability under the softmax of the unmodified
        logits.
    finish_reasons: `stop` (a stop token or string) or `length`.
    prompt_tokens: number of tokens of each prompt.
    prefill_seconds: wall time until the first token of all rows. decode_seconds: wall time after
        it. Both include compilation of programs that were not compiled before.
    speculation: how many tokens were proposed and accepted; None without `speculate`.
    """

    text: list[str]
    tokens: list[list[int]]
    logprobs: list[list[float]]
    finish_reasons: list[str]
    prompt_tokens: list[int]
    prefill_seconds: float
    decode_seconds: float
    speculation: SpeculationReport | None = None

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of decoding: of all rows together, without each row's first token."""
        decoded = sum(len(row) - 1 for row in self.tokens)
        return decoded / self.decode_seconds if self.decode_seconds else 0.0


@dataclasses.dataclass(frozen=True)
class TextPiece:
    """A part of a row's text, as `stream_batch` yields it.

    row: number of the prompt. text: the text after the row's earlier pieces.
    finish_reason: `stop` or `length` in the last piece of a row, whose text may be empty; None in
        earlier pieces.
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
    speculate: Proposer | None = None,
) -> Generation:
    """Completes a batch of prompts.

    prompts: a list of prompts, or a single one. A prompt is a text; token ids in a list or array,
        to which nothing is added; or a chat, a list of `{"role": ..., "content": ...}` that a chat
        template turns into a prompt. An array [batch, tokens] is a batch of token ids.
    max_new_tokens: the most new tokens of each row.
    sampling: a Sampling, or a mapping such as {"temperature": 0.7}, which changes only these fields
        of the model's own, `lm.sampling`. By default the model's own, which is greedy unless its
        files say otherwise; {"temperature": 0} and Sampling() are greedy for every model. With
        min_new_tokens, no stop token is drawn and no stop string ends the row before that number.
    stop: a string, or several, that end a row; the text ends before them.
    seeds: one for each prompt; row numbers by default. Integers or JAX keys, as for
        generate_tokens. A row's draws depend on its seed, and on its neighbours only by rounding,
        because kernels choose their tiles by the size of the batch.
    chat_template: for chats: the name of one of the checkpoint's templates, or Jinja source; by
        default the checkpoint's own.
    speculate: proposes tokens that the model verifies several at a time, which is faster where many
        are accepted and changes nothing else: `Ngram()` for texts that repeat themselves, or
        `Draft(lm)` with a smaller model. With Ngram the tokens are those of plain decoding, greedy
        or drawn, except for rounding: kernels choose their tiles by the number of tokens. With
        Draft that holds for greedy rows, and drawn tokens have the same distribution.

    A program is compiled for each size of the batch, of the longest prompt and of max_new_tokens.
    To compile few of them, all three are rounded up: the batch to 1, 2, 4 or a multiple of 8, the
    others to a power of two from 16 to 512 or a multiple of 512. Padding changes no row's result,
    and takes time and memory like other rows and tokens. If the device lacks the memory for
    padding rows, there are none.

    Raises ValueError for an empty prompt, a prompt that leaves no room for max_new_tokens in the
    model's positions, and arguments that don't fit; mpjax.finite.NotFiniteError, a ValueError, for
    NaN or infinite logits; mpjax.memory.DeviceMemoryError, before anything is allocated, where the
    cache is too large.
    """
    job = Job(prompts, max_new_tokens, sampling, stop, seeds, chat_template, speculate)
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
    speculate: Proposer | None = None,
) -> Generator[str, None, Generation]:
    """Completes one prompt and yields its text in pieces, as it is generated.

    The pieces joined are the text that `generate` returns. The generator's return value (of
    `yield from`, or StopIteration.value) is the Generation. Arguments and errors are those of
    `generate`; errors are raised when the first piece is asked for.
    """
    if not is_single(prompt):
        raise ValueError(
            f"prompt is not a single prompt: expected {EXPECTED}; stream_batch takes several"
        )
    job = Job([prompt], max_new_tokens, sampling, stop, [seed], chat_template, speculate)
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
    speculate: Proposer | None = None,
) -> Generator[TextPiece, None, Generation]:
    """Completes a batch of prompts and yields the text of all rows in pieces, as it is generated.

        for piece in mpjax.stream_batch(lm, ["def f(", "import "]):
            texts[piece.row] += piece.text

    The texts of a row's pieces joined are the text that `generate` returns for it, and each row has
    one piece with a finish_reason, its last. The generator's return value is the Generation.
    Arguments and errors are those of `generate`; errors are raised when the first piece is asked
    for.
    """
    ended: set[int] = set()
    job = Job(prompts, max_new_tokens, sampling, stop, seeds, chat_template, speculate)
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
    """Collects the lists of a finished batch."""
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
        speculation=batch.speculation,
    )
