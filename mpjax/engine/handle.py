"""A request's handle: its results so far, and ways to wait for more."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from collections.abc import AsyncIterator, Container, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpjax.engine.watching import CapturedParts
from mpjax.generation.speculation.report import SpeculationReport
from mpjax.text.row_text import RowText

if TYPE_CHECKING:
    from mpjax.engine.engine import Engine


class CancelledError(RuntimeError):
    """A request was cancelled before it had ended."""


@dataclasses.dataclass(frozen=True)
class PromptLogprobs:
    """Log-probabilities of a prompt's tokens from the second on; arrays [tokens − 1].

    logprobs: float32, natural logarithm of each token's probability given the tokens before it.
    top: int32 [tokens − 1, number], the likeliest tokens at each position; number is what the
        request asked for, at least 1. top_logprobs: float32, their log-probabilities.
    """

    logprobs: np.ndarray
    top: np.ndarray
    top_logprobs: np.ndarray

    @property
    def best(self) -> np.ndarray:
        """The likeliest token at each position, int32 [tokens − 1]."""
        return self.top[:, 0]

    @property
    def best_logprobs(self) -> np.ndarray:
        """The log-probability of the likeliest token at each position, float32 [tokens − 1]."""
        return self.top_logprobs[:, 0]

    @classmethod
    def join(cls, scores: Sequence[Scores], prompt: int, number: int) -> PromptLogprobs:
        """Joins the scores of a prompt's pieces. prompt: the number of its tokens.

        number: how many of the likeliest tokens the request asked for.
        """
        fields = ("logprobs", "top", "top_logprobs")
        joined = (np.concatenate([getattr(one, name) for one in scores]) for name in fields)
        logprobs, *top = (array[: prompt - 1] for array in joined)
        return cls(logprobs, *(array[:, : max(1, number)] for array in top))


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores of one prefill chunk of a prompt: of the token after each position from `start` on.

    The arrays are as in PromptLogprobs, with TOP_LOGPROBS likeliest tokens.
    """

    start: int
    logprobs: np.ndarray
    top: np.ndarray
    top_logprobs: np.ndarray


@dataclasses.dataclass(frozen=True)
class New:
    """New tokens of a request and their log-probabilities.

    top_logprobs: for each token, the likeliest ids at its position with their log-probabilities;
        empty if not asked for.
    weights: the version of the weights that they were drawn with.
    """

    tokens: list[int]
    logprobs: list[float]
    top_logprobs: list[list[tuple[int, float]]] = dataclasses.field(default_factory=list)
    weights: int = 0

    def __add__(self, other: New) -> New:
        """These tokens followed by the other ones, which the same weights drew."""
        top = self.top_logprobs + other.top_logprobs
        return New(self.tokens + other.tokens, self.logprobs + other.logprobs, top, other.weights)


@dataclasses.dataclass(frozen=True)
class Event:
    """New tokens or the end of a request, as `Engine.step` returns it.

    text: the text after the request's earlier events; it may lag behind the tokens.
    finish_reason: in a request's last event: `stop`, `length`, `cancelled` or `error`.
    """

    handle: Handle
    tokens: list[int]
    text: str
    finish_reason: str | None = None


class Handle:
    """A request that was submitted to an engine.

        for piece in handle: ...         # its text, as it comes
        async for piece in handle: ...   # the same, while the engine runs in a thread
        handle.result()                  # waits for its end, and returns the handle

    Attributes:
      number: the request's index, in order of arrival.
      prompt: ids of the prompt.
      tokens, logprobs: ids of the new tokens, and the natural logarithm of each one's probability.
      top_logprobs: for each new token, the likeliest ids at its position with their
        log-probabilities, likeliest first, as many as `logprobs` asked for; empty for 0.
      weights: for each new token, the version of the weights that it was drawn with (`lm.version`).
      finish_reason: `stop` (a stop token or string), `length`, `cancelled`, `error`; None until the
        request has ended.
      prompt_logprobs: a PromptLogprobs, with as many likeliest tokens as `logprobs` asked for, at
        least one. None until the prompt is prefilled, and if not asked for.
      captured: activations on the host, by point and layer: NumPy arrays [tokens, ...] of the
        prompt and the new tokens but the last, which is never fed to the model. Until the request
        has ended, of the tokens computed so far. None without `capture`.
      only_scores: whether the prompt is scored and nothing is generated.
      shared_tokens: number of the prompt's tokens that were in the prefix cache.
      speculation: how many tokens were proposed and accepted so far; None without speculation.
      first_token_time: `time.perf_counter()` of the first report of new tokens; None before.
      version: the number of reports so far; each has new tokens or the end.
    """

    def __init__(
        self,
        engine: Engine,
        number: int,
        prompt: list[int],
        text: RowText | None,
        *,
        only_scores: bool = False,
    ) -> None:
        self._engine, self.only_scores = engine, only_scores
        self._row_text = text
        self._taken = 0  # characters that iteration and `take` have returned
        self._changed = threading.Condition()
        self._watchers: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._ending: tuple[str, Exception | None] | None = None
        self.number, self.prompt = number, prompt
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[list[tuple[int, float]]] = []
        self.weights: list[int] = []
        self.finish_reason: str | None = None
        self.prompt_logprobs: PromptLogprobs | None = None
        self.speculation: SpeculationReport | None = None
        self.first_token_time: float | None = None
        self.shared_tokens = self.version = 0
        self.certain = ""  # the text that has been reported
        self.parts = CapturedParts()

    @property
    def text(self) -> str:
        """The new text so far, without a stop string that has ended it."""
        return "" if self._row_text is None else self._row_text.text

    @property
    def captured(self) -> dict[str, dict[int, np.ndarray]] | None:
        """See the attributes of the class."""
        return self.parts.join(len(self.prompt) + len(self.tokens) - 1)

    @property
    def marker_places(self) -> Container[int]:
        """Positions in the text where a marker was generated as a single token (`AnswerReader`)."""
        return () if self._row_text is None else self._row_text.marker_places

    @property
    def is_finished(self) -> bool:
        """Whether the request has ended."""
        return self.finish_reason is not None

    def cancel(self) -> None:
        """Ends the request soon and keeps its results so far. No effect if it has ended."""
        self._engine.cancel(self)

    def result(self) -> Handle:
        """Waits until the request has ended; returns the handle.

        Raises CancelledError if it was cancelled, NotFiniteError for NaN logits, and ValueError if
        the constraint's matcher failed on the text.
        """
        while not self.is_finished:
            self._engine.wait(self, self.version)
        self._raise()
        return self

    def __iter__(self) -> Iterator[str]:
        """Pieces of the text, as it comes; the errors are those of `result`."""
        while True:
            version, finished = self.version, self.is_finished
            if piece := self.take():
                yield piece
            elif finished:
                self._raise()
                return
            else:
                self._engine.wait(self, version)

    async def __aiter__(self) -> AsyncIterator[str]:
        """Pieces of the text, as it comes; starts the engine's thread if it needs one."""
        if not self.is_finished:
            self._engine.start()
        woken = asyncio.Event()
        watcher = asyncio.get_running_loop(), woken
        self._watchers.add(watcher)
        try:
            while True:
                woken.clear()
                finished = self.is_finished
                if piece := self.take():
                    yield piece
                elif finished:
                    self._raise()
                    return
                else:
                    await woken.wait()
        finally:
            self._watchers.discard(watcher)

    def wait(self, version: int) -> None:
        """Waits for a report after number `version`, for at most one second.

        For threads other than the engine's. The engine's thread may have stopped on return.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.version != version or self.is_finished, timeout=1)

    def push(self, new: New) -> int:
        """Adds new tokens, up to one that completes a stop string; returns how many it took."""
        if self.only_scores:
            return 0
        before = len(self.tokens)
        self.tokens.extend(new.tokens)
        if self._row_text is not None:
            self._row_text.push(new.tokens)
            del self.tokens[len(self._row_text.tokens) :]
        taken = len(self.tokens) - before
        self.logprobs.extend(new.logprobs[:taken])
        self.weights.extend([new.weights] * taken)
        self.top_logprobs.extend(new.top_logprobs[:taken])
        return taken

    def restart(self) -> None:
        """Forgets all new tokens and scores; text that iteration has returned is not taken back."""
        if self._row_text is not None:
            self._row_text.restart()
        for found in (self.tokens, self.logprobs, self.top_logprobs, self.weights):
            found.clear()
        self.prompt_logprobs, self.certain, self._taken = None, "", 0
        self.parts = CapturedParts()

    @property
    def has_stopped(self) -> bool:
        """Whether a stop string has ended the text."""
        return self._row_text is not None and self._row_text.stopped

    def finish(self, reason: str, error: Exception | None = None) -> None:
        """Sets the request's end, which the next `report` publishes."""
        if self._row_text is not None:
            self._row_text.finish()
        self._ending = reason, error

    def report(self, tokens: list[int]) -> Event:
        """Wakes all waiters on new tokens or the end; returns the event."""
        piece = "" if self._row_text is None else self._row_text.take()
        if tokens and self.first_token_time is None:
            self.first_token_time = time.perf_counter()
        with self._changed:
            self.certain += piece
            self.version += 1
            if self._ending is not None:
                self.finish_reason = self._ending[0]
            self._changed.notify_all()
        for watcher in list(self._watchers):
            loop, woken = watcher
            try:
                loop.call_soon_threadsafe(woken.set)
            except RuntimeError:  # the loop is closed, so nobody waits in it
                self._watchers.discard(watcher)
        return Event(self, tokens, piece, self.finish_reason)

    def take(self) -> str:
        """The reported text that iteration and `take` have not returned yet."""
        text = self.certain
        piece, self._taken = text[self._taken :], len(text)
        return piece

    def _raise(self) -> None:
        if self._ending is not None and self._ending[1] is not None:
            raise self._ending[1]


@contextlib.contextmanager
def cancelled_on_error(handles: Sequence[Handle]) -> Iterator[None]:
    """A context that cancels all requests of the list if its body raises."""
    try:
        yield
    except BaseException:
        for handle in handles:
            handle.cancel()
        raise
