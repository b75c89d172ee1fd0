"""Generates text: `generate` for batches, `stream` and `stream_batch` piece by piece.

Each call submits its prompts to a temporary engine, which it closes at the end.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Generator, Sequence
from types import MappingProxyType
from typing import Any

from mpjax.constraints.kinds import Constraints
from mpjax.engine.call import Call, Generation
from mpjax.engine.engine import Engine
from mpjax.engine.request import AdapterNames, Options, RowsOptions, encode_batch
from mpjax.engine.temporary import temporary_engine
from mpjax.engine.watching import Steers
from mpjax.generation.speculation.argument import read_speculate
from mpjax.generation.speculation.proposer import Proposer
from mpjax.kernels.checks import require_type
from mpjax.language_model import LanguageModel
from mpjax.models.watch import Capture
from mpjax.sampling.processors import Processor
from mpjax.sampling.random_keys import only_seed
from mpjax.sampling.settings import Samplings
from mpjax.text.prompts import EXPECTED, Prompt, Prompts, is_single


@dataclasses.dataclass(frozen=True)
class TextPiece:
    """A part of a row's text, as `stream_batch` yields it.

    row: index of the prompt. text: the text after the row's earlier pieces.
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
    sampling: Samplings = None,
    stop: str | Sequence[str] | None = (),
    seeds: Any = None,
    chat_template: str | None = None,
    speculate: Proposer | str | None = None,
    adapter: AdapterNames = None,
    processors: Sequence[Processor] = (),
    constraint: Constraints = None,
    capture: Capture = MappingProxyType({}),
    steer: Steers = None,
) -> Generation:
    """Completes a batch of prompts.

    prompts: a list of prompts, or a single one. A prompt is a string; token ids in a list or array,
        to which nothing is added; or a chat, a list of `{"role": ..., "content": ...}` that a chat
        template turns into a prompt. An array [batch, tokens] is a batch of token ids.
    max_new_tokens: the most new tokens of each row.
    sampling: a Sampling, or a mapping such as {"temperature": 0.7}, which changes only these fields
        of the model's own, `lm.sampling`; or a list with one for each prompt. By default the
        model's own, which is greedy unless its files say otherwise; {"temperature": 0} and
        Sampling() are greedy for every model. With min_new_tokens, no stop token is drawn and no
        stop string ends the row before that number.
    stop: a string, or several, that end a row; the text ends before them.
    seeds: one for each prompt; row numbers by default. Integers or JAX keys, as for
        generate_tokens. A row's draws depend on its seed, and on its neighbours only by rounding,
        because kernels choose their tiles by the size of the batch.
    chat_template: for chats: the name of one of the checkpoint's templates, or Jinja source; by
        default the checkpoint's own.
    speculate: speculative decoding, which is faster if many proposed tokens are accepted: `Ngram()`
        for texts that repeat themselves, `Draft(lm)` with a smaller model, `MTP()` or "mtp" with
        the model's own head (`load(mtp=True)`), or `Eagle()` or "eagle" with an EAGLE-3 head
        (`load(drafter=...)`). With Ngram, tokens are those of plain decoding, greedy or sampled,
        except for rounding: kernels choose their tiles by the number of tokens. With the others
        that holds for greedy rows, and sampled tokens have the same distribution.
    adapter: the name of one of the model's adapters (`load(adapters=...)`, `lm.add_adapter`), or a
        list with one for each prompt; None for none.
    processors: logits processors of all rows, applied in order after those of the sampling; see
        `mpjax.Processor`.
    constraint: restricts the generated text, such as mpjax.JsonSchema(...): one for all prompts, or
        a list with one (or None) for each.
    capture: activations to return for all prompts: layers by point, as for `Decoder.inspect`.
    steer: changes of activations: a Steer, or a tuple that is applied in order, of all prompts; or
        a list with one of these (or None) for each.

    A program is compiled for each size of the batch, of the longest prompt and of max_new_tokens.
    To compile few of them, all three are rounded up: the batch to 1, 2, 4 or a multiple of 8, the
    others to a power of two from 16 to 512 or a multiple of 512. Padding changes no row's result,
    but costs time and memory. If the device lacks the memory for padding rows, there are none.

    Raises ValueError for an empty prompt, a prompt that leaves no room for max_new_tokens in the
    model's positions, and invalid arguments; mpjax.errors.NotFiniteError, a ValueError, for NaN or
    infinite logits; mpjax.memory.DeviceMemoryError, before anything is allocated, if the cache is
    too large.
    """
    control = processors, constraint, capture, steer
    options = Options(max_new_tokens, sampling, stop, seeds, adapter, *control)
    job = _Job.of(lm, prompts, options, chat_template, speculate)
    with job.engine() as engine:
        return Call(engine, job.encoded, job.options).result()


def stream(
    lm: LanguageModel,
    prompt: Prompt,
    *,
    max_new_tokens: int = 128,
    sampling: Samplings = None,
    stop: str | Sequence[str] | None = (),
    seed: Any = 0,
    chat_template: str | None = None,
    speculate: Proposer | str | None = None,
    adapter: str | None = None,
    processors: Sequence[Processor] = (),
    constraint: Constraints = None,
    capture: Capture = MappingProxyType({}),
    steer: Steers = None,
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
    control = processors, constraint, capture, steer
    options = Options(max_new_tokens, sampling, stop, only_seed(seed), adapter, *control)
    pieces = _pieces(_Job.of(lm, [prompt], options, chat_template, speculate))
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        if piece.text:
            yield piece.text


def stream_batch(
    lm: LanguageModel,
    prompts: Prompts,
    *,
    max_new_tokens: int = 128,
    sampling: Samplings = None,
    stop: str | Sequence[str] | None = (),
    seeds: Any = None,
    chat_template: str | None = None,
    speculate: Proposer | str | None = None,
    adapter: AdapterNames = None,
    processors: Sequence[Processor] = (),
    constraint: Constraints = None,
    capture: Capture = MappingProxyType({}),
    steer: Steers = None,
) -> Generator[TextPiece, None, Generation]:
    """Completes a batch of prompts and yields the text of all rows in pieces, as it is generated.

        for piece in mpjax.stream_batch(lm, ["def f(", "import "]):
            texts[piece.row] += piece.text

    The texts of a row's pieces joined are the text that `generate` returns for it, and each row has
    one piece with a finish_reason, its last. The generator's return value is the Generation.
    Arguments and errors are those of `generate`; errors are raised when the first piece is asked
    for.
    """
    control = processors, constraint, capture, steer
    options = Options(max_new_tokens, sampling, stop, seeds, adapter, *control)
    return (yield from _pieces(_Job.of(lm, prompts, options, chat_template, speculate)))


def _pieces(job: _Job) -> Generator[TextPiece, None, Generation]:
    with job.engine() as engine:
        call = Call(engine, job.encoded, job.options)
        left = dict(enumerate(call.handles))
        for _ in call:
            for row, handle in list(left.items()):
                reason = handle.finish_reason
                text = handle.take()
                if text or reason:
                    yield TextPiece(row, text, reason)
                if reason:
                    del left[row]
        return call.result()


@dataclasses.dataclass(frozen=True)
class _Job:
    """A call's model, the ids of its prompts, and the options of its requests."""

    lm: LanguageModel
    encoded: list[list[int]]
    options: RowsOptions
    speculate: Proposer | None

    @classmethod
    def of(
        cls,
        lm: LanguageModel,
        prompts: Prompts,
        options: Options,
        chat_template: str | None,
        speculate: Proposer | str | None,
    ) -> _Job:
        """Encodes the prompts and checks the arguments. Raises the ValueErrors of `generate`."""
        require_type("lm", lm, LanguageModel, hint=", as mpjax.load gives it")
        proposer = read_speculate(speculate)
        encoded = encode_batch(lm, prompts, chat_template)
        return cls(lm, encoded, options.read(lm, len(encoded)), proposer)

    def engine(self) -> Engine:
        """A temporary engine for these prompts."""
        most = self.options.most
        positions = self.lm.config.max_position_embeddings
        for index, ids in enumerate(self.encoded):
            if len(ids) + most - 1 > positions:  # the last new token needs no position
                raise ValueError(
                    f"prompt {index} has {len(ids)} tokens, and with {most} new ones it would pass "
                    f"the {positions} positions of this model: shorten it, ask for fewer, or load "
                    "the model with max_positions"
                )
        lengths = [len(ids) for ids in self.encoded]
        return temporary_engine(
            self.lm,
            lengths,
            most,
            stop_ids=self.options.stop_ids,
            speculate=self.speculate,
            processors=self.options.places,
            constrained=any(self.options.constraints),
        )
