"""Engine: requests that come and go, over one model and one cache."""

from __future__ import annotations

import collections
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from mpjax.constraints.automaton import SMALL_STATES
from mpjax.constraints.kinds import Constraint, Constraints
from mpjax.engine import options as checks
from mpjax.engine import request as requests
from mpjax.engine.call import Call, Generation
from mpjax.engine.handle import CancelledError, Event, Handle
from mpjax.engine.histories import require_fit, state_bytes
from mpjax.engine.memory import SNAPSHOTS, count_pages
from mpjax.engine.program_run import ProgramRun
from mpjax.engine.request import AdapterNames, Options, Request, RowsOptions
from mpjax.engine.row import Row
from mpjax.engine.runner import Runner
from mpjax.engine.sizes import Sizes
from mpjax.engine.state import snapshot_bytes
from mpjax.engine.turn import Turn
from mpjax.generation.speculation.proposer import Proposer, read_speculate
from mpjax.kernels import device
from mpjax.kernels.checks import require_type
from mpjax.language_model import LanguageModel
from mpjax.sampling.processors import Processor, read_processors
from mpjax.sampling.random_keys import only_seed
from mpjax.sampling.settings import Sampling, Samplings
from mpjax.text.prompts import Prompt, Prompts

SEQUENCES = 32  # the most prompts that a program reads pieces of
CHUNK_UNIT = 128  # chunks that hold all tokens of all slots are a multiple of it


class Engine:
    """Generates for requests that come and go, in one batch that always takes the next.

        with mpjax.Engine(lm, slots=64) as engine:
            handle = engine.submit("def f(x):", max_new_tokens=64)
            for piece in handle:
                print(piece, end="")

    lm: the model, with its KV format and page size.
    slots: the most requests that run at once; others wait. By default 64, and 8 on a CPU.
    cache_memory: of the cache: bytes, or a share of what is free (by default 0.9, and 0.1 on a
        CPU). There is never more than all slots can fill; `capacity` says how many tokens it holds.
    max_tokens: the most tokens of a request in the cache, its prompt's and all new ones but the
        last; the model's positions by default. Attention plans for such rows, so a smaller number
        is faster.
    chunk_tokens: the most tokens of prompts that a program reads. It reads so many where there are
        as many to read, and no row decodes. By default 4096, and 256 on a CPU.
    steps: tokens that are drawn for each row between two returns to the host.
    max_gap: the most seconds that rows which decode wait for prompts: programs read as much as fits
        into them, by the seconds of those before. Where nothing fits, the smallest one runs, of a
        sixteenth of chunk_tokens, or a quarter where a token is drawn at random. By default 0.05,
        and up to four times as many while more rows wait for their first token than decode; with
        inf all prompts that have a place are read first.
    share_prefixes: whether requests share pages of the cache that begin with the same tokens; with
        recurrent layers up to where a copy of their states was kept.
    speculate: such as an Ngram, which proposes tokens that decoding steps verify.
    processors: that requests may have, each with any arrays of these shapes; see `submit`.
    table_states: of constraints that are tables on the device, if quickly made; 0: none are.

    Prompts are read from the cache as it stores them, in pieces and beside other prompts. So
    results don't depend on when requests come, on sharing, and on whether a request had to make
    room for another, but for rounding: kernels choose their tiles, and so the order of sums, by the
    number of tokens.

    A row whose logits are NaN ends with an error, alone. When pages run out, the youngest request
    gives up its own and is read again later. Requests of a higher priority go first.

    Nothing runs by itself: iterating over a handle runs `step`, which runs all requests, until
    `start` runs a thread for it. Submitting and cancelling may come from any thread.

    Raises ValueError for numbers that don't fit, and DeviceMemoryError where memory is lacking.
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
        speculate: Proposer | None = None,
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
            (),  # until the others tell how much memory is left
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
        # Where layers keep a state of a sequence, others can begin only from a copy of it.
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
        """An engine of exactly these sizes, whose requests share no pages. Nothing is checked."""
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
        # Requests that have come, and handles of those to cancel.
        self._inbox: collections.deque[Request | Handle] = collections.deque()
        self._numbers = itertools.count()
        self._turn = Turn()  # of the thread that runs a step or ends all requests
        self._door = threading.Lock()  # held while a request comes in, or the engine closes
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def capacity(self) -> int:
        """The number of tokens that the cache holds, of all requests together."""
        return self._runner.planner.sizes.tokens(self.max_tokens)

    @property
    def state_bytes(self) -> int:
        """The bytes that recurrent layers keep of a request beside its pages, on each device."""
        return snapshot_bytes(self.lm)

    @property
    def slots(self) -> int:
        """The most requests that run at once."""
        return self._runner.planner.sizes.slots

    @property
    def is_closed(self) -> bool:
        """Whether no request can be submitted: the engine was closed, or a step has failed."""
        return self._is_closed

    @property
    def has_work(self) -> bool:
        """Whether any request has not ended."""
        return not self._is_closed and (bool(self._inbox) or self._runner.has_work)

    def statistics(self) -> dict[str, float]:
        """Current numbers of requests and pages, and sums since the engine was made.

        pages: of the cache, of all groups of layers. free_pages: of them, those that no request
        owns. kept_pages: of these, those that hold tokens which later requests may share.
        snapshots: the most copies of recurrent layers' states. kept_snapshots: of them, those from
        which later requests may begin.
        prompt_tokens: read or shared. shared_tokens: of them, those found in the cache.
        new_tokens: drawn. programs: compiled. preemptions: how often a request gave up its pages.
        proposed_tokens: by speculation. accepted_tokens: of them, those that the model has said.
        steps: of the engine. late_steps: of them, those before which the device had nothing to do;
        with speculation on a GPU most are, since the host waits for programs that decode.
        work_seconds: in which there were requests, but for compiling. idle_seconds: of them, those
        in which the device had nothing to do, at most.
        """
        coming = sum(isinstance(one, Request) for one in [*self._inbox])
        return self._runner.statistics(coming)

    def observe(self, observer: Callable[[ProgramRun], None] | None) -> None:
        """Calls `observer` with each program that has ended, in the thread that runs steps.

        None ends that. The observer may submit and cancel requests, but not run, stop or close the
        engine, whose step waits for it. An error of the observer is one of the step, and so closes
        the engine.

        Raises ValueError for an observer that can't be called.
        """
        checks.require_observer(observer)
        self._runner.observer = observer

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
    ) -> Handle:
        """Adds a request, which waits for its turn.

        prompt: a text, token ids, or the messages of a chat, as for `generate`, whose arguments the
            others are too. max_new_tokens may be 0 with prompt_logprobs, for a request that only
            scores its prompt.
        seed: an integer or a key. priority: an integer; requests with higher ones go first.
        prompt_logprobs: whether to compute those of the prompt, which then shares nothing.
        logprobs: how many of the likeliest tokens to return beside each, with their
            log-probabilities, 0 to 20. All running requests then decode one step at a time.
        adapter: the name of one of the model's adapters, which may come and go.
        processors: of the logits, each like one of the engine's. constraint: as for `generate`.

        Raises TooLongError for a request that the cache or the model can never hold, and
        ValueError for arguments that don't fit and for an engine that is closed.
        """
        checks.require_priority(priority)
        require_type("prompt_logprobs", prompt_logprobs, bool)
        checks.require_top_logprobs(logprobs)
        self._require_open()
        ids = requests.encode_one(self.lm, prompt, chat_template)
        sampling, seed = Sampling.of(sampling, self.lm.sampling), only_seed(seed)
        given = Options(max_new_tokens, sampling, stop, seed, adapter, processors, constraint)
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
        """Adds a request of known token ids, with the options of one of several rows.

        Arguments and errors are those of `submit`, whose checks have been made.
        """
        self.lm.require_predictions()
        settings = options.settings(row, self._runner.planner.sizes.stop_ids, logprobs)
        settings = options.controlled(row, settings, self.lm, self._runner.processors)
        only_scores = not settings.most
        # The last token is scored, and not read. A prompt of one token has no other to read.
        read = ids[:-1] if only_scores and len(ids) > 1 else ids
        most = max(settings.most, 1)
        if len(read) + most - 1 > self.max_tokens:  # the last token is never read
            raise checks.TooLongError(
                f"the prompt has {len(ids)} tokens, and with {settings.most} new ones it would "
                f"pass the {self.max_tokens} tokens of a request: shorten it, or ask for fewer"
            )
        if reason := self._runner.planner.why_never(len(read), most):
            raise checks.TooLongError(f"the prompt's {reason}")
        number = next(self._numbers)
        text = requests.row_text(self.lm, ids, settings)
        handle = Handle(self, number, list(ids), text, only_scores=only_scores)
        planned = Row(
            *(number, list(read), len(read), most),
            priority=priority,
            shares=self._shares and not scored,
            scored=scored,
            behind=ids[len(read) :],
            greedy_from=settings.greedy_from,
            is_controlled=settings.control is not None,
            is_constrained=settings.matcher is not None,
            scaling=self.lm.config.scaling_by_length,
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
    ) -> Generation:
        """Completes a batch of prompts; arguments, result and errors are those of `generate`."""
        encoded = requests.encode_batch(self.lm, prompts, chat_template)
        given = Options(max_new_tokens, sampling, stop, seeds, adapter, processors, constraint)
        return Call(self, encoded, given.read(self.lm, len(encoded))).result()

    # -- running

    def compile(self, *, greedy_only: bool = False) -> None:
        """Compiles all programs, several at a time; else each is compiled at its first use.

        greedy_only: whether to leave out those of rows that are drawn at random, and of prompts'
            log-probabilities.

        Raises ValueError for an engine that is closed. An error of the device closes it.
        """
        require_type("greedy_only", greedy_only, bool)
        with self._turn:
            self._require_open()
            try:
                self._runner.compile(greedy_only=greedy_only)
            except BaseException as error:
                why = error if isinstance(error, Exception) else CancelledError("it was stopped")
                self._end_all("error", why)
                raise

    def step(self) -> list[Event]:
        """Starts the next program, and reads what the one before has drawn.

        Returns an event for each request with new tokens or an end.

        Raises ValueError for an engine that is closed or that a thread runs. An error of the
        device, such as of lacking memory, ends all requests and closes the engine: the program that
        failed has taken the cache over. So does an interruption, which would lose tokens.
        """
        self._require_open()
        self._require_no_thread()
        return self._step()

    def _step(self) -> list[Event]:
        """A step; nothing where another thread has closed the engine since the caller looked."""
        with self._turn:
            if self._is_closed:
                return []
            try:
                return self._take_inbox() + self._runner.step()
            except Exception as error:
                self._end_all("error", error)
                raise
            except BaseException:
                self._end_all("cancelled", CancelledError("a step of the engine was interrupted"))
                raise

    def __iter__(self) -> Iterator[Event]:
        """Events of all requests, until all have ended.

        Raises ValueError for an engine that is closed or that a thread runs.
        """
        self._require_open()
        self._require_no_thread()
        return self._events()

    def _events(self) -> Iterator[Event]:
        while self.has_work:
            self._require_no_thread()
            yield from self._step()

    def wait(self, handle: Handle, version: int) -> None:
        """Runs a step, or waits for the thread to report of a handle after report `version`."""
        self._turn.require_other()
        # Whoever closes an engine ends its requests.
        if self._thread is not None or self._is_closed:
            handle.wait(version)
        elif not handle.is_finished:
            self._step()

    def start(self) -> None:
        """Runs steps in a thread, as long as there are requests, until `stop`.

        Raises ValueError where other processes have parts of the model: each process runs the same
        steps with the same requests then, and threads would not.
        """
        if self.lm.devices > 1 and jax.process_count() > 1:
            raise ValueError(
                f"the model is divided among devices of {jax.process_count()} processes, whose "
                "threads would take different steps: submit the same requests in each process, and "
                "iterate over the engine there"
            )
        with self._door:
            self._require_open()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mpjax engine", daemon=True)
                self._thread.start()

    def stop(self) -> None:
        """Ends the thread of `start` after its step; requests stay as they are.

        An `async for` over a handle waits for the next `start`.
        """
        self._turn.require_other()
        if (thread := self._thread) is not None:
            self._thread = None
            self._wake.set()
            thread.join()

    def close(self) -> None:
        """Cancels all requests and frees the cache, once a step that runs has ended."""
        self._turn.require_other()
        with self._door:
            self._is_closed = True  # so that no other step begins
        with self._turn:
            self._end_all("cancelled", CancelledError("the engine was closed"))
        self.stop()

    def __enter__(self) -> Engine:
        """Itself. Raises ValueError for an engine that is closed."""
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
            except Exception:  # which all requests have been told
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
        """Lets no more requests in, ends all that there are, and frees the cache.

        The caller has the turn, so that no step runs.
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

    def _take_inbox(self) -> list[Event]:
        """Adds the requests that have come, and ends those that were cancelled."""
        events = []
        while self._inbox:
            what = self._inbox.popleft()
            if isinstance(what, Request):
                self._runner.submit(what)
            elif (request := self._runner.requests.get(what)) is not None:
                error = CancelledError(f"request {what.number} was cancelled")
                events.append(self._runner.end(request, "cancelled", error))
        return events
