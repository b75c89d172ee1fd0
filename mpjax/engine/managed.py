"""Managing a running engine: its statistics, new weights, and giving memory back."""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable
from typing import Any

from mpjax.engine import options as checks
from mpjax.engine.handle import Event
from mpjax.engine.program_run import ProgramRun
from mpjax.engine.request import Request
from mpjax.engine.runner import Runner
from mpjax.engine.turn import Turn
from mpjax.kernels.checks import require_type
from mpjax.language_model import LanguageModel
from mpjax.rollouts.update import check_update, update


class Managed(abc.ABC):
    """The part of an Engine that is about no request in particular."""

    lm: LanguageModel
    _runner: Runner
    _turn: Turn
    _wake: threading.Event
    _inbox: Any
    _late: list[Event]  # of programs that were waited for between two steps

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
    def _require_open(self) -> None:
        """Raises ValueError for an engine that is closed."""
