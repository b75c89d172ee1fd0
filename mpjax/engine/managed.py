"""Managing a running engine: its statistics, new weights, and giving memory back."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

import mpjax
from mpjax.engine import options as checks
from mpjax.engine.alike import outline, require_alike
from mpjax.engine.handle import CancelledError, Event
from mpjax.engine.processes import Followers, launches
from mpjax.engine.program_run import ProgramRun
from mpjax.engine.request import Request, RowsOptions
from mpjax.engine.runner import Runner
from mpjax.engine.turn import Turn
from mpjax.kernels.checks import require_type
from mpjax.language_model import LanguageModel
from mpjax.rollouts.update import check_update, update

STEP_SECONDS = 5.0  # for a step to end after a process is lost


class Managed(abc.ABC):
    """The part of an Engine that is about no request in particular."""

    lm: LanguageModel
    _runner: Runner
    _turn: Turn
    _wake: threading.Event
    _inbox: Any
    _late: list[Event]  # of programs that were waited for between two steps
    _door: threading.Lock
    _is_closed: bool
    max_tokens: int
    _followers: Followers | None = None
    _led_adapters: int  # the version of the model's adapters at `lead`

    def statistics(self) -> dict[str, float]:
        """Current counts of requests and pages, and totals since the engine was made.

        pages: of the cache, for all groups of layers. free_pages: pages without an owner.
        kept_pages: free pages whose content later requests may share. snapshots: places for copies
        of recurrent states. kept_snapshots: snapshots from which later requests may begin.
        prompt_tokens: prefilled or shared. shared_tokens: prompt_tokens found in the cache.
        new_tokens: generated tokens. programs: compiled programs in use.
        preemptions: how often a request gave up its pages. proposed_tokens, accepted_tokens: of
        speculative decoding. steps: of the engine. late_steps: steps before which the device was
        idle; with speculation on a GPU most are, since the host waits for decoding programs.
        work_seconds: time with requests, without compilation. idle_seconds: upper bound of the part
        of work_seconds in which the device was idle.
        """
        coming = sum(isinstance(one, Request) for one in [*self._inbox])
        return self._runner.statistics(coming)

    def observe(self, observer: Callable[[ProgramRun], None] | None) -> None:
        """Calls `observer` with a ProgramRun after each program, in the thread that runs steps.

        None removes the observer. It may submit and cancel requests, but not run, stop or close the
        engine, whose step waits for it. An exception in the observer fails the step, which closes
        the engine.

        Raises ValueError if the observer is not callable.
        """
        checks.require_observer(observer)
        self._runner.observer = observer

    @property
    def is_asleep(self) -> bool:
        """Whether the engine has no cache: after `sleep`, before `wake`."""
        return self._runner.is_asleep

    def update_weights(
        self,
        tree: Any,
        *,
        running: str = "continue",
        scales: str = "new",
        version: int | None = None,
    ) -> None:
        """Writes new weights over those of the model, in place, between two steps.

        tree, scales, version: as for `mpjax.update`, whose errors are also raised here.
        running: what happens to running requests. They continue with the keys and values of the
            old weights (`continue`), are prefilled again and continue (`reread`), start again from
            their prompts (`restart`), or wait for `release` and are prefilled again then (`hold`).
            If the engine sleeps, `continue` means `reread`, since keys and values are gone.

        `Handle.weights` has the version that drew each new token. Pages in the prefix cache that
        older weights computed are not reused.

        Raises ValueError for another value of `running`, and for an engine that is closed or whose
        weights are in the memory of the host.
        """
        checks.require_running(running)
        self._require_no_followers("update_weights")
        with self._turn:
            self._require_open()
            check_update(self.lm, scales, version)
            if not self.is_asleep:
                self._late += self._runner.drain()
            if self.is_asleep:
                update(self.lm, tree, scales=scales, version=version)
                self._put_back(running)
                return
            programs = self._runner.programs
            programs.renew(None)  # so that no program keeps the old arrays
            try:
                update(self.lm, tree, scales=scales, version=version)
            finally:
                programs.renew(self.lm.for_device)
            self._runner.planner.renew(self.lm.version)
            self._put_back(running)

    def hold(self) -> None:
        """Frees the pages of running and preempted requests, which wait for `release`.

        Requests that have not started, and new ones, run meanwhile. Raises ValueError for an engine
        that is closed or asleep.
        """
        with self._turn:
            self._require_open()
            self._require_awake()
            self._late += self._runner.drain()
            self._put_back("hold")

    def release(self) -> None:
        """Resumes the held requests, whose tokens are prefilled again."""
        with self._turn:
            self._require_open()
            self._runner.planner.release()
        self._wake.set()

    def sleep(self, *, weights: bool = False) -> None:
        """Frees the memory of the cache until `wake`; requests wait, and are prefilled again then.

        weights: whether to move the model's weights to the memory of the host, too. No engine and
            no caller can use the model until `wake`.

        No effect if the engine sleeps. Raises ValueError for a closed engine, and with `weights`
        for a model that is divided among devices.
        """
        require_type("weights", weights, bool)
        self._require_no_followers("sleep")
        if weights:
            self.lm.require_one_device("moving the weights to the host of")
        with self._turn:
            self._require_open()
            if self.is_asleep:
                return
            self._late += self._runner.drain()
            self._runner.sleep()
            if weights:
                self.lm.sleep()

    def wake(self) -> None:
        """Allocates the cache again; compiles nothing. No effect if the engine is awake.

        Raises ValueError for a closed engine, and the device's error if memory is insufficient,
        which leaves the engine asleep.
        """
        with self._turn:
            self._require_open()
            self.lm.wake()
            self._runner.wake()
        self._wake.set()

    def lead(self, host: str) -> None:
        """In process 0, lets the engine run over all processes; returns when all have connected.

        host: the name or address of this machine, by which the others reach it. They call `follow`
        with it. From then on process 0 takes requests, and tells the others which programs to
        launch, so all of the engine works but `compile`, `sleep`, `update_weights`, capture, steer,
        and adapters that are added or removed later. If a process ends, all requests end with a
        ProcessLostError that names it, and the engine closes; closing it ends the others' `follow`.

        Raises ValueError for another process, for a model that is not divided among the devices of
        several, for an engine with requests, for a host that is not of this machine, and if a
        process has another model or other arguments of its engine, as far as this is compared; and
        ProcessLostError if a process does not connect.
        """
        with self._turn:
            self._require_member(host, "lead")
            require_alike(self._parts())
            self._led_adapters = self.lm.adapters.version
            self._followers = Followers(host, self._lose)
            self._runner.programs.tell = self._followers.tell

    def follow(self, host: str) -> None:
        """In a process other than 0: runs process 0's programs until it closes its engine.

        host: as for `lead`. The engine must have the same model and arguments as that of process 0;
        it is closed afterwards.

        Raises ValueError as `lead` does, and ProcessLostError if process 0 or a third one ends.
        """
        with self._turn:
            self._require_member(host, "follow")
            try:
                require_alike(self._parts())
                with launches(host) as received:
                    for launch in received:
                        self._runner.follow(launch)
            finally:
                self._end_all("cancelled", CancelledError("the engine was closed"))

    def _parts(self) -> dict[str, Any]:
        """The properties of engine and model that must be equal in all processes, by name."""
        model, runner, proposer = self.lm.model, self._runner, self._runner.proposer
        plain = [it for it in (vars(proposer) if proposer else {}).items() if type(it[1]) is int]
        return {
            "versions of mpjax or JAX": (mpjax.__version__, jax.__version__),
            "models": (type(model).__name__, self.lm.config, str(self.lm.precision)),
            "weights": outline(nnx.state(model)),
            "adapters": self.lm.adapters.names,
            "sizes of engines": (runner.planner.sizes, self.max_tokens),
            "proposers": (type(proposer).__name__, plain, outline(proposer)),
        }

    @property
    def lost_process(self) -> Exception | None:
        """The error of the first process that has ended while it followed this one."""
        return None if self._followers is None else self._followers.lost

    def _lose(self, error: Exception) -> None:
        """Ends all requests after a process has ended. A step may wait for it forever."""
        with self._door:
            self._is_closed = True
        is_taken = self._turn.take_within(STEP_SECONDS)
        try:
            self._end_all("error", error)
        finally:
            if is_taken:
                self._turn.__exit__()

    def _cause(self, error: Exception) -> Exception:
        """The error that ends requests if a step has raised `error`: perhaps a lost process."""
        return error if self._followers is None else self._followers.why(error)

    def _require_member(self, host: object, what: str) -> None:
        """Raises ValueError where `lead` or `follow` is not possible."""
        require_type("host", host, str)
        self._require_open()
        if self.lm.processes == 1:
            raise ValueError(
                f"{what} needs a model that is divided among the devices of several processes: "
                "call jax.distributed.initialize, then mpjax.load(..., devices=jax.device_count())"
            )
        number = jax.process_index()
        if (number == 0) != (what == "lead"):
            raise ValueError(f"process {number} calls {what}: process 0 leads, the others follow")
        if self._inbox or self._runner.has_work or self._followers is not None:
            raise ValueError(f"the engine has requests or leads: call {what} once, before submit")

    def _require_lead(self) -> None:
        """Raises ValueError for a model divided among processes that don't follow this one."""
        if self.lm.processes > 1 and self._followers is None:
            raise ValueError(
                f"the model is divided among devices of {self.lm.processes} processes, whose "
                "threads would take different steps: call lead in process 0 and follow in the "
                "others, or submit the same requests in each and iterate over the engine there"
            )

    def _require_no_followers(self, what: str) -> None:
        """Raises ValueError if other processes follow this one, which can't do `what`."""
        if self._followers is not None:
            raise ValueError(
                f"{what} is not possible over several processes: only programs of requests are "
                "launched in all of them. Call compile in each before lead and follow; for the "
                "rest, start the engine again"
            )

    def _require_possible(self, options: RowsOptions, row: int) -> None:
        """Raises ValueError for a request that can't run over several processes."""
        if self._followers is None:
            return
        if any(options.watches[row]):
            self._require_no_followers("capture or steer")
        if options.adapters[row] is not None and self.lm.adapters.version != self._led_adapters:
            self._require_no_followers("an adapter after a change of the model's adapters")

    def _put_back(self, running: str) -> None:
        """Applies `running` to the requests that have started; no program may be in flight."""
        planner = self._runner.planner
        if running == "hold":
            planner.hold()
        elif running != "continue":
            planner.put_back()
        if running == "restart":
            for request in self._runner.requests.values():
                request.restart()

    def _require_awake(self) -> None:
        """Raises ValueError for an engine that sleeps."""
        if self.is_asleep:
            raise ValueError("the engine sleeps: call wake first")

    @abc.abstractmethod
    def _end_all(self, reason: str, error: Exception) -> None:
        """Closes the engine and ends all requests; the caller holds the turn."""

    @abc.abstractmethod
    def _require_open(self) -> None:
        """Raises ValueError for an engine that is closed."""
