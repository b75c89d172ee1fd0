"""Calls with an argument that is wrong: they give a result, or name the argument."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpjax

FLOORS = [Path(floor.__path__[0]) for floor in (mpjax, mpjax.models, mpjax.kernels)]


def _refusal(call: Callable[..., Any], arguments: dict[str, Any]) -> ValueError | None:
    """The ValueError that a call raises, if it does; no other exception is caught."""
    try:
        call(**arguments)
    except ValueError as error:
        return error
    return None


def require_a_result_or_its_name(
    call: Callable[..., Any], arguments: dict[str, Any], name: str, value: Any, *words: str
) -> None:
    """Fails unless a call takes `value` for an argument, or refuses it as the library does.

    A refusal is a ValueError of its own, not of JAX, NumPy or Python, with a message of one line
    that has the argument's name or another of the words.
    """
    error = _refusal(call, arguments | {name: value})
    if error is None:
        return
    last = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
    ours = any(last.is_relative_to(folder) for folder in FLOORS)
    assert ours, f"{name}={value!r}: {last} raises: {error}"
    assert any(word in str(error) for word in (name, *words)), f"{name}={value!r}: {error}"
    assert "\n" not in str(error)
