"""Engine: continuous batching of requests over one model and one cache."""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mpjax.constraints.automaton import SMALL_STATES
from mpjax.constraints.kinds import Constraint, Constraints
from mpjax.engine import options as checks
from mpjax.engine import request as requests
from mpjax.engine.call import Call, Generation
from mpjax.engine.handle import CancelledError, Event, Handle
from mpjax.engine.histories import require_fit, state_bytes
from mpjax.engine.managed import Managed
from mpjax.engine.memory import SNAPSHOTS, count_pages
from mpjax.engine.request import AdapterNames, Options, Request, RowsOptions
from mpjax.engine.row import Row
from mpjax.engine.runner import Runner
from mpjax.engine.sizes import Sizes
from mpjax.engine.state import snapshot_bytes
from mpjax.engine.turn import Turn
from mpjax.engine.watching import Steers
from mpjax.generation.speculation.argument import read_speculate
from mpjax.generation.speculation.proposer import Proposer
from mpjax.kernels import device
from mpjax.kernels.checks import require_type
from mpjax.language_model import LanguageModel
from mpjax.models import Steer
from mpjax.models.watch import Capture
from mpjax.sampling.processors import Processor, read_processors
from mpjax.sampling.random_keys import only_seed
from mpjax.sampling.settings import Sampling, Samplings
from mpjax.text.prompts import Prompt, Prompts

SEQUENCES = 32  # the most prompts in one prefill program
CHUNK_UNIT = 128  # chunks that are shortened to the tokens of all slots are a multiple of it


class Engine(Managed):
    """Generates for requests that come at any time, with continuous batching.

        with mpjax.Engine(lm, slots=64) as engine:
            handle = engine.submit("def f(x):", max_new_tokens=64)
            for piece in handle:
                print(piece, end="")

    lm: the model, with its KV format and page size.
    slots: the most requests that run at once; others wait. By default 64, and 8 on a CPU.
    cache_memory: bytes of the cache, or a share of the free memory (by default 0.9, and 0.1 on a
        CPU). It never exceeds what all slots can fill; `capacity` is its number of tokens.
    max_tokens: the most tokens of a request in the cache: its prompt and all new tokens but the
        last; the model's positions by default. Attention is planned for this length, so a smaller
        number is faster.
    chunk_tokens: the largest prefill chunk, in tokens. While rows decode, chunks may be smaller
        (see max_gap). By default 4096, and 256 on a CPU.
    steps: the most decoding steps of a program, between two returns to the host.
    max_gap: the most seconds that decoding rows wait for prefill: a prefill chunk is sized to end
        within max_gap, as predicted from the seconds of earlier programs. If no size fits, the
        smallest is used: a sixteenth of chunk_tokens, or a quarter if a row is not greedy. By
        default 0.05, and up to four times as long while more rows wait for their first token than
        decode; with inf all prompts with a slot are prefilled first.
    share_prefixes: whether requests share cache pages of common prefixes; with recurrent layers,
        only up to a snapshot of their states.
    speculate: a Proposer such as Ngram, or "mtp", for speculative decoding; as for `generate`.
    processors: logits processors that requests may use, with any arrays of these shapes.
    table_states: of constraints that are tables on the device, if quickly made; 0: none are.

    Prefill attends to keys and values as the cache stores them, so chunked prefill, prefix sharing,
    preemption and the time of arrival change results only by rounding: kernels choose their tiles,
    and so the order of sums, by the number of tokens. In deterministic mode they change no bit.

    If a request's logits are NaN, only that request ends with an error. When pages run out, the
    youngest request is preempted and prefilled again later. Requests of a higher priority go first.

    Nothing runs in the background until `start` runs a thread: iterating over a handle calls
    `step`, which advances all requests. Any thread may submit and cancel.

    Raises ValueError for invalid arguments, and DeviceMemoryError if memory is insufficient.
    """

    def __init__(
        self,
        lm: LanguageModel,
        *,
        slots: int | None = None,
        cache_memory: float | None = None,
        max_tokens: int | None = None,
        chunk_tokens: int | None = None,
        steps: int = 8,
        max_gap: float | None = None,
        share_prefixes: bool = True,
        speculate: Proposer | str | None = None,
        processors: Sequence[Processor] = (),
        table_states: int = SMALL_STATES,
    ) -> None:
        checks.require_gap(max_gap)
        checks.require_table_states(table_states)
        require_type("share_prefixes", share_prefixes, bool)
        require_type("lm", lm, LanguageModel, hint=", as mpjax.load gives it")
        slots, chunk = checks.read_sizes(slots, chunk_tokens)
        steps = checks.read_steps(steps, lm.page_size)
        most = checks.read_max_tokens(max_tokens, lm.config.max_position_embeddings)
        chunk = min(chunk, -(-slots * most // CHUNK_UNIT) * CHUNK_UNIT)
        proposer = require_fit(read_speculate(speculate), lm, most)
        sizes = Sizes(
            slots,
            (),  # computed by `count_pages`, from the other sizes
            lm.page_size,
            lm.config.page_groups,
            lm.kv_format.block,
            chunk=chunk,
            max_gap=max_gap,
            sequences=min(slots, SEQUENCES),
            steps=steps,
            proposed=0 if proposer is None else proposer.k,
            fine=not device.on_gpu(),
            snapshots=SNAPSHOTS * slots if share_prefixes else 0,
            table_states=table_states,
        )
        beside = state_bytes(proposer, slots, most)
        sizes = count_pages(lm, sizes, most, cache_memory, beside)
        # With recurrent layers, a prefix can be shared only where a snapshot is kept.
        self._shares = share_prefixes and (sizes.snapshots > 0 or not lm.config.keeps_sequences)
        self._open(lm, sizes, most, proposer, read_processors(processors))

    @classmethod
    def of_sizes(
        cls,
        lm: LanguageModel,
        sizes: Sizes,
        max_tokens: int,
        proposer: Proposer | None,
        processors: tuple[Processor, ...] = (),
    ) -> Engine:
        """An engine of exactly these sizes, without prefix sharing. Arguments aren't checked."""
        engine = object.__new__(cls)
        engine._shares = False
        engine._open(lm, sizes, max_tokens, proposer, processors)
        return engine

    def _open(
        self,
        lm: LanguageModel,
        sizes: Sizes,
        max_tokens: int,
        proposer: Proposer | None,
        processors: tuple[Processor, ...],
    ) -> None:
        self.lm, self.max_tokens = lm, max_tokens
        self._runner = Runner(lm, sizes, max_tokens, proposer, processors)
        # New requests, and handles of requests to cancel.
        self._inbox: collections.deque[Request | Handle] = collections.deque()
        self._late: list[Event] = []
        self._numbers = itertools.count()
        self._turn = Turn()  # held by the thread that runs a step or ends all requests
        self._door = threading.Lock()  # held while a request is added, or the engine closes
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def capacity(self) -> int:
        """The number of tokens that the cache holds for all requests together."""
        return self._runner.planner.sizes.tokens(self.max_tokens)

    @property
    def state_bytes(self) -> int:
        """The bytes of one request's recurrent states on each device; 0 without such layers."""
        return snapshot_bytes(self.lm)

    @property
    def slots(self) -> int:
        """The most requests that run at once."""
        return self._runner.planner.sizes.slots

    @property
    def is_closed(self) -> bool:
        """Whether the engine was closed, by `close` or a failed step: it takes no requests."""
        return self._is_closed

    @property
    def has_work(self) -> bool:
        """Whether there is a next step: not while an engine sleeps, or holds all its requests."""
        if self._is_closed or self.is_asleep:
            return False
        return bool(self._inbox or self._late) or self._runner.has_work

    def submit(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int = 128,
        sampling: Sampling | Mapping[str, Any] | None = None,
        stop: str | Sequence[str] | None = (),
        seed: Any = 0,
        priority: int = 0,
        prompt_logprobs: bool = False,
        logprobs: int = 0,
        chat_template: str | None = None,
        adapter: str | None = None,
        processors: Sequence[Processor] = (),
        constraint: Constraint | None = None,
        capture: Capture = MappingProxyType({}),
        steer: Steer | Sequence[Steer] = (),
    ) -> Handle:
        """Adds a request, which waits for its turn.

        prompt: a string, token ids, or the messages of a chat. Arguments not listed are as for
            `generate`. max_new_tokens may be 0 with prompt_logprobs, for a request that only scores
            its prompt.
        seed: an integer or a key. priority: an integer; requests with higher ones go first.
        prompt_logprobs: whether to compute log-probabilities of the prompt's tokens, which then
            shares no pages.
        logprobs: the number of likeliest tokens to return for each new token, 0 to 20, with their
            log-probabilities. All running requests then run in programs for sampled rows.
        adapter: the name of one of the model's loaded adapters, or None.
        processors: logits processors, each of the type and shapes of one of the engine's.
        constraint: as for `generate`. capture, steer: as for `Decoder.inspect`; see
            `Handle.captured`. A request that captures uses no shared pages; one with a steer
            shares pages only with requests with an equal steer.

        Raises TooLongError for a request that exceeds the cache or the model's positions, and
        ValueError for invalid arguments and for a closed engine.
        """
        checks.require_priority(priority)
        require_type("prompt_logprobs", prompt_logprobs, bool)
        checks.require_top_logprobs(logprobs)
        self._require_open()
        ids = requests.encode_one(self.lm, prompt, chat_template)
        sampling, seed = Sampling.of(sampling, self.lm.sampling), only_seed(seed)
        control = processors, constraint, capture, [steer]
        given = Options(max_new_tokens, sampling, stop, seed, adapter, *control)
        options, how = given.read(self.lm, 1, scores=prompt_logprobs), {"logprobs": logprobs}
        return self.submit_row(ids, options, priority=priority, scored=prompt_logprobs, **how)

    def submit_row(
        self,
        ids: Sequence[int],
        options: RowsOptions,
        row: int = 0,
        *,
        priority: int = 0,
        scored: bool = False,
        logprobs: int = 0,
    ) -> Handle:
        """Adds a request with token ids `ids` and the options of row `row`.

        Arguments and errors are those of `submit`, whose checks have been made.
        """
        self.lm.require_predictions()
        self._require_possible(options, row)
        settings = options.settings(row, self._runner.planner.sizes.stop_ids, logprobs)
        settings = options.controlled(row, settings, self.lm, self._runner.processors)
        only_scores = not settings.most
        # A prompt that is only scored is prefilled without its last token, unless it has only one.
        read = ids[:-1] if only_scores and len(ids) > 1 else ids
        most = max(settings.most, 1)
        if len(read) + most - 1 > self.max_tokens:  # the last new token is never fed to the model
            raise checks.TooLongError(
                f"the prompt has {len(ids)} tokens, and with {settings.most} new ones it would "
                f"pass the {self.max_tokens} tokens of a request: shorten it, or ask for fewer"
            )
        if reason := self._runner.planner.why_never(len(read), most):
            raise checks.TooLongError(f"the prompt's {reason}")
        watched = self._runner.watches.read(*options.watches[row])
        number = next(self._numbers)
        text = requests.row_text(self.lm, ids, settings)
        handle = Handle(self, number, list(ids), text, only_scores=only_scores)
        planned = Row(
            *(number, list(read), len(read), most),
            priority=priority,
            shares=self._shares and not scored and not (watched and watched.capture),
            scored=scored,
            behind=ids[len(read) :],
            greedy_from=settings.greedy_from,
            is_controlled=settings.control is not None,
            is_constrained=settings.masker is not None,
            scaling=self.lm.config.scaling_by_length,
            watched=watched,
        )
        planned.owner = Request(handle, settings, planned)
        with self._door:
            self._require_open()
            planned.adapter = self.lm.adapters.take(options.adapters[row])
            self._inbox.append(planned.owner)
        self._wake.set()
        return handle

    def cancel(self, handle: Handle) -> None:
        """Ends a request soon; see Handle.cancel."""
        require_type("handle", handle, Handle, hint=", as submit returns it")
        if handle.is_finished or self._is_closed:
            return
        self._inbox.append(handle)
        self._wake.set()

    def generate(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int = 128,
        sampling: Samplings = None,
        stop: str | Sequence[str] | None = (),
        seeds: Any = None,
        chat_template: str | None = None,
        adapter: AdapterNames = None,
        processors: Sequence[Processor] = (),
        constraint: Constraints = None,
        capture: Capture = MappingProxyType({}),
        steer: Steers = None,
    ) -> Generation:
        """Completes a batch of prompts; arguments, result and errors are those of `generate`."""
        encoded = requests.encode_batch(self.lm, prompts, chat_template)
        control = processors, constraint, capture, steer
        given = Options(max_new_tokens, sampling, stop, seeds, adapter, *control)
        return Call(self, encoded, given.read(self.lm, len(encoded))).result()

    # -- running

    def compile(self, *, greedy_only: bool = False) -> None:
        """Compiles all programs, several at a time. Without it, each is compiled at its first use.

        greedy_only: whether to leave out programs for sampled rows and for prompt
            log-probabilities.

        Raises ValueError for an engine that is closed or asleep. An error of the device closes it.
        """
        require_type("greedy_only", greedy_only, bool)
        with self._turn:
            self._require_open()
            self._require_awake()
            self._require_no_followers("compile")
            try:
                self._runner.compile(greedy_only=greedy_only)
            except BaseException as error:
                why = error if isinstance(error, Exception) else CancelledError("it was stopped")
                self._end_all("error", why)
                raise

    def step(self) -> list[Event]:
        """Launches the next program, and reads the tokens of the previous one.

        Returns an event for each request that has new tokens or has ended.

        Raises ValueError for an engine that is closed or run by a thread. A device error, such as
        out of memory, ends all requests and closes the engine, since the cache was donated to the
        failed program. An interruption does so too, since it would lose tokens.
        """
        self._require_open()
        self._require_no_thread()
        return self._step()

    def _step(self) -> list[Event]:
        """Runs a step; returns [] if another thread has closed the engine in the meantime."""
        with self._turn:
            if self._is_closed:
                return []
            self._require_awake()
            try:
                late, self._late = self._late, []
                return late + self._take_inbox() + self._runner.step()
            except Exception as error:
                cause = self._cause(error)
                self._end_all("error", cause)
                if cause is not error:
                    raise cause from error
                raise
            except BaseException:
                self._end_all("cancelled", CancelledError("a step of the engine was interrupted"))
                raise

    def __iter__(self) -> Iterator[Event]:
        """Events of all requests, until all have ended.

        Raises ValueError for an engine that is closed or run by a thread.
        """
        self._require_open()
        self._require_no_thread()
        return self._events()

    def _events(self) -> Iterator[Event]:
        while self.has_work:
            self._require_no_thread()
            yield from self._step()

    def wait(self, handle: Handle, version: int) -> None:
        """Runs a step, or waits until the thread reports on a handle after report `version`."""
        self._turn.require_other()
        # Closing an engine ends its requests, so waiting for them returns.
        if self._thread is not None or self._is_closed:
            handle.wait(version)
        elif not handle.is_finished:
            if not self.has_work:
                why, what = ("sleeps", "wake") if self.is_asleep else ("holds it", "release")
                raise ValueError(
                    f"request {handle.number} waits for an engine that {why}: call {what}"
                )
            self._step()

    def start(self) -> None:
        """Runs steps in a background thread, whenever there are requests, until `stop`.

        Raises ValueError if the model is divided among several processes, before `lead`.
        """
        self._require_lead()
        with self._door:
            self._require_open()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mpjax engine", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Ends the thread of `start` after its current step; requests are kept.

        An `async for` over a handle waits for the next `start`.
        """
        self._turn.require_other()
        if (thread := self._thread) is not None:
            self._thread = None
            self._wake.set()
            thread.join()

    def close(self) -> None:
        """Waits for a running step, then cancels all requests and frees the cache."""
        self._turn.require_other()
        with self._door:
            self._is_closed = True  # no further step begins
        if self.lost_process is not None:
            return  # all requests end, and a step may wait forever
        with self._turn:
            self._end_all("cancelled", CancelledError("the engine was closed"))
        self.stop()

    def __enter__(self) -> Engine:
        """Returns the engine. Raises ValueError if it is closed."""
        self._require_open()
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _run(self) -> None:
        me = threading.current_thread()
        while self._thread is me:
            self._wake.clear()
            if not self.has_work:
                if self._thread is me:  # `stop` may have come before the event was cleared
                    self._wake.wait()
                continue
            try:
                self._step()
            except Exception:  # `_step` has ended all requests with it
                return

    def _require_open(self) -> None:
        if self._is_closed:
            raise ValueError("the engine is closed: make another one")

    def _require_no_thread(self) -> None:
        if self._thread is not None:
            raise ValueError(
                "a thread runs the engine and takes its events: read the handles of requests, or "
                "call stop first"
            )

    def _end_all(self, reason: str, error: Exception) -> None:
        """Closes the engine: refuses new requests, ends all present ones, frees the cache.

        The caller holds the turn, so no step is running.
        """
        with self._door:
            self._is_closed = True
        while self._inbox:
            request = self._inbox.popleft()
            if isinstance(request, Request):
                self._runner.submit(request)
        for request in list(self._runner.requests.values()):
            self._runner.end(request, reason, error)
        self._runner.free()
        if self._followers is not None:
            self._followers.close()

    def _take_inbox(self) -> list[Event]:
        """Adds new requests to the runner, and ends cancelled ones."""
        events = []
        while self._inbox:
            what = self._inbox.popleft()
            if isinstance(what, Request):
                self._runner.submit(what)
            elif (request := self._runner.requests.get(what)) is not None:
                error = CancelledError(f"request {what.number} was cancelled")
                events.append(self._runner.end(request, "cancelled", error))
        return events
