"""The requests of one `generate` call, the seconds they take, and their result."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpjax.engine.handle import Handle, cancelled_on_error
from mpjax.engine.request import RowsOptions
from mpjax.errors import NotFiniteError
from mpjax.generation.speculation.report import SpeculationReport

if TYPE_CHECKING:
    from mpjax.engine.engine import Engine


@dataclasses.dataclass(frozen=True)
class Generation:
    """Completions of a batch, as `generate` returns them; lists have an entry for each prompt.

    text: the completions, without stop strings. Prompt + completion is the text that the tokenizer
        decodes from the tokens of both.
    tokens: ids of the completions, stop token included.
    logprobs: natural logarithm of each token's probability under the softmax of the unmodified
        logits.
    finish_reasons: `stop` (a stop token or string) or `length`.
    prompt_tokens: number of tokens of each prompt.
    prefill_seconds: wall time until the first token of all rows. decode_seconds: wall time after
        it. Both include compilation of programs that were not compiled before.
    speculation: how many tokens were proposed and accepted; None without `speculate`.
    captured: for each prompt its captured activations, as in Handle; None without `capture`.
    """

    text: list[str]
    tokens: list[list[int]]
    logprobs: list[list[float]]
    finish_reasons: list[str]
    prompt_tokens: list[int]
    prefill_seconds: float
    decode_seconds: float
    speculation: SpeculationReport | None = None
    captured: list[dict[str, dict[int, np.ndarray]]] | None = None

    @property
    def tokens_per_second(self) -> float:
        """Decoded tokens per second of all rows together, without each row's first token."""
        decoded = sum(len(row) - 1 for row in self.tokens)
        return decoded / self.decode_seconds if self.decode_seconds else 0.0


class Call:
    """The requests of one call in an engine; each iteration runs one step of the engine.

    encoded: the token ids of each prompt. options: the options of the requests.

    The requests are cancelled if the loop over it is left early or raises.
    """

    def __init__(
        self, engine: Engine, encoded: Sequence[Sequence[int]], options: RowsOptions
    ) -> None:
        self._engine, self._begin = engine, time.perf_counter()
        self.handles: list[Handle] = []
        self.prefill_seconds = self.decode_seconds = 0.0
        with cancelled_on_error(self.handles):
            for row, ids in enumerate(encoded):
                self.handles.append(engine.submit_row(ids, options, row))

    def __iter__(self) -> Iterator[None]:
        """Runs until all requests have ended; yields whenever there may be new tokens.

        Time that the caller spends between two steps isn't counted.

        Raises NotFiniteError with the prompt's index for NaN or infinite logits, and the errors of
        `Handle.result`.
        """
        with cancelled_on_error(self.handles):
            begin = self._begin
            for handle in self.handles:
                while not handle.is_finished:
                    reads = not all(one.tokens or one.is_finished for one in self.handles)
                    self._engine.wait(handle, handle.version)
                    seconds = time.perf_counter() - begin
                    if reads:
                        self.prefill_seconds += seconds
                    else:
                        self.decode_seconds += seconds
                    self._raise_errors()
                    yield
                    begin = time.perf_counter()

    def result(self) -> Generation:
        """The Generation, after all requests have ended. Raises the errors of iteration."""
        for _ in self:
            pass
        handles = self.handles
        captured = [found for handle in handles if (found := handle.captured) is not None]
        return Generation(
            text=[handle.text for handle in handles],
            tokens=[handle.tokens for handle in handles],
            logprobs=[handle.logprobs for handle in handles],
            finish_reasons=[str(handle.finish_reason) for handle in handles],
            prompt_tokens=[len(handle.prompt) for handle in handles],
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            speculation=SpeculationReport.join([handle.speculation for handle in handles]),
            captured=captured or None,
        )

    def _raise_errors(self) -> None:
        for row, handle in enumerate(self.handles):
            if handle.is_finished:
                try:
                    handle.result()
                except NotFiniteError as error:
                    raise NotFiniteError("prompt", row, error.dtype) from None
