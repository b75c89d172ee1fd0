"""Checks of arguments of an engine and of its requests."""

from __future__ import annotations

import numbers
from typing import Any

from mpjax.arguments import positive_whole
from mpjax.constraints.byte_automaton import MOST_STATES
from mpjax.kernels import device
from mpjax.sampling.draw import TOP_LOGPROBS

# Default (slots, chunk_tokens).
USUAL_ON_GPU, USUAL_ON_CPU = (64, 4096), (8, 256)

RUNNING = ("continue", "reread", "restart", "hold")


def read_sizes(slots: Any, chunk_tokens: Any) -> tuple[int, int]:
    """The checked slots and chunk tokens; None becomes the default for the device.

    Raises ValueError unless both are positive whole numbers or None.
    """
    usual = USUAL_ON_GPU if device.on_gpu() else USUAL_ON_CPU
    given = {"slots": slots, "chunk_tokens": chunk_tokens}
    found = [
        default if value is None else positive_whole(name, value)
        for (name, value), default in zip(given.items(), usual, strict=True)
    ]
    return found[0], found[1]


class TooLongError(ValueError):
    """A request has more tokens than the engine's max_tokens, or than its cache can hold."""


def read_steps(steps: Any, page_size: int) -> int:
    """The checked decoding steps of a program. Raises ValueError for more than a page's tokens."""
    steps = positive_whole("steps", steps)
    if steps > page_size:
        raise ValueError(f"steps is {steps}: expected at most {page_size}, a page's tokens")
    return steps


def require_table_states(table_states: Any) -> None:
    """Raises ValueError unless table_states is an integer from 0 to MOST_STATES."""
    if type(table_states) is not int or not 0 <= table_states <= MOST_STATES:
        raise ValueError(
            f"table_states is {table_states!r}: expected the most states of a table, 0 to "
            f"{MOST_STATES}"
        )


def require_gap(max_gap: Any) -> None:
    """Raises ValueError unless max_gap is a positive number of seconds or None."""
    is_number = isinstance(max_gap, numbers.Real) and not isinstance(max_gap, bool)
    if max_gap is not None and not (is_number and max_gap > 0):
        raise ValueError(f"max_gap is {max_gap!r}: expected seconds above 0, inf, or None")


def require_observer(observer: Any) -> None:
    """Raises ValueError unless the observer is callable or None."""
    if observer is not None and not callable(observer):
        raise ValueError(
            f"observer is {observer!r}: expected a function of a ProgramRun, or None for none"
        )


def require_running(running: Any) -> None:
    """Raises ValueError unless `running` is one of RUNNING."""
    if not isinstance(running, str) or running not in RUNNING:
        raise ValueError(f"running is {running!r}: expected {', '.join(RUNNING)}")


def require_priority(priority: Any) -> None:
    """Raises ValueError unless the priority is an integer."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise ValueError(f"priority is {priority!r}: expected a whole number")


def require_top_logprobs(logprobs: Any) -> None:
    """Raises ValueError unless logprobs is an integer from 0 to TOP_LOGPROBS."""
    if type(logprobs) is not int or not 0 <= logprobs <= TOP_LOGPROBS:
        raise ValueError(
            f"logprobs is {logprobs!r}: expected the number of likeliest tokens to return, 0 to "
            f"{TOP_LOGPROBS}"
        )


def read_max_tokens(max_tokens: Any, positions: int) -> int:
    """The checked max_tokens; None becomes the model's `positions`. Raises ValueError."""
    most = positions if max_tokens is None else positive_whole("max_tokens", max_tokens)
    if most < 2:
        raise ValueError(f"max_tokens is {most}: expected 2 or more, a prompt's and a new one")
    if most > positions:
        raise ValueError(
            f"max_tokens is {most}, and the model has {positions} positions: ask for fewer, or "
            "load the model with max_positions"
        )
    return most
