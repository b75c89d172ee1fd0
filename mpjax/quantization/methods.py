"""Method: the named steps that quantise a linear map, scalings and a rounding."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.kernels import PlainCodes, WeightFormat
from mpjax.kernels.checks import did_you_mean, nearest, require_type
from mpjax.kernels.grid import fit
from mpjax.quantization.clipping import learn_ranges, require_optax
from mpjax.quantization.gptq import gptq, gptq_fresh, why_not_fresh
from mpjax.quantization.learning.learned_linear import why_not
from mpjax.quantization.ranges import search_ranges
from mpjax.quantization.scaling import awq_scales, smooth_scales, threshold_scales
from mpjax.quantization.statistics import Statistics

SCALINGS: dict[str, Any] = {
    "awq": awq_scales,
    "smooth": smooth_scales,
    "os": threshold_scales,
}
ROUNDINGS = ("rtn", "range", "clip", "gptq", "gptq-fresh")
LEARN = "learn"
# Steps on the whole model, which come before those on linear maps.
ROTATE, HADAMARD = OF_MODEL = ("rotate", "hadamard")
DEFAULT_ROUNDING = "range"
STEPS = (*OF_MODEL, *SCALINGS, *ROUNDINGS, LEARN)


def read_method(text: str) -> tuple[tuple[str, ...], Method]:
    """Splits a method into its leading steps on the whole model and the Method of linear maps.

    The Method is `range` if nothing follows. Raises ValueError for unknown, repeated or misplaced
    steps.
    """
    names = _names(text)
    behind = list(itertools.dropwhile(lambda name: name in OF_MODEL, names))
    found = tuple(names[: len(names) - len(behind)])
    is_ordered = found == tuple(step for step in OF_MODEL if step in found)
    if not is_ordered or not set(OF_MODEL).isdisjoint(behind):
        raise ValueError(
            f"the method is {text!r}: {ROTATE} and {HADAMARD} are of the whole model, and come "
            "first, in this order and each once, as in rotate+hadamard+gptq"
        )
    return found, Method.of_steps(behind or [DEFAULT_ROUNDING], text)


def _names(text: str) -> list[str]:
    """The names of a method's steps, possibly empty. Raises ValueError for unknown names."""
    require_type("the method", text, str, hint=", such as 'awq+gptq'")
    names = [name.strip() for name in text.lower().split("+")]
    for name in names:
        if name and name not in STEPS:
            hint = did_you_mean(nearest(name, STEPS))
            raise ValueError(
                f"{text!r}: there is no method {name!r}{hint}: expected one or several of "
                f"{', '.join(STEPS)}, joined by +"
            )
    return names


@dataclasses.dataclass(frozen=True)
class Method:
    """The steps that quantise a linear map, written as `awq+gptq`.

    scalings: the steps that fold channel scales, in order: `awq`, `smooth`, `os`.
    rounding: the step that chooses codes. `rtn` rounds to nearest. `range` searches the clipping
        range of each group with the least error (`ranges`), and rounds to nearest; `clip` learns
        the range by gradient descent (`clipping`). `gptq` searches ranges as `range` does, and then
        runs GPTQ; `gptq-fresh` searches a group's range when GPTQ reaches it.
    learns: whether the step `learn` follows: scales are learned against the 16-bit layer's outputs.
    """

    scalings: tuple[str, ...]
    rounding: str
    learns: bool = False

    @classmethod
    def parse(cls, text: str) -> Method:
        """Reads steps joined by `+`: scalings, a rounding, `learn`.

        The rounding is `range` if there is none.

        Raises ValueError for unknown, repeated or misplaced steps, and for steps on the whole
        model, which only `read_method` accepts.
        """
        steps = _names(text)
        for step in OF_MODEL:
            if step in steps:
                raise ValueError(
                    f"the method is {text!r}: {step} is of the whole model, and comes first in the "
                    "method of the recipe, not in that of a rule"
                )
        return cls.of_steps(steps, text)

    @classmethod
    def of_steps(cls, steps: list[str], text: str) -> Method:
        """The method with the named steps, all on linear maps.

        text: the whole method, for messages. Raises ValueError for repeated or misplaced steps.
        """
        learns = steps[-1] == LEARN
        steps = steps[:-1] if learns else steps
        roundings = [step for step in steps if step in ROUNDINGS]
        scalings = tuple(step for step in steps if step in SCALINGS)
        is_ordered = steps == [*scalings, *roundings[:1]] and len(set(steps)) == len(steps)
        if not is_ordered:
            raise ValueError(
                f"the method is {text!r}: expected {' and '.join(OF_MODEL)} first, if at all, then "
                f"any of the scalings {', '.join(SCALINGS)}, each once, one of "
                f"{', '.join(ROUNDINGS)} behind them, and learn last, joined by +, such as awq+gptq"
            )
        return cls(scalings, roundings[0] if roundings else DEFAULT_ROUNDING, learns)

    @classmethod
    def of(cls, method: Method | str) -> Method:
        """Returns a Method unchanged, or parses a string."""
        return method if isinstance(method, Method) else cls.parse(method)

    def __str__(self) -> str:
        return "+".join((*self.scalings, self.rounding, *[LEARN] * self.learns))

    def require_usable(self, format: WeightFormat) -> None:
        """Raises ValueError if a step doesn't support a format, or its package is not installed."""
        if self.rounding == "clip" or self.learns:
            require_optax(LEARN if self.learns else self.rounding)
        reason = why_not(format) if self.learns else None
        if self.rounding == "gptq-fresh":
            reason = reason or why_not_fresh(format)
        if reason:
            raise ValueError(f"the method {self} can't serve weights of {format}: {reason}")

    @property
    def needs_text(self) -> bool:
        """Whether a step needs calibration text."""
        return bool(self.scalings) or self.rounding != "rtn" or self.learns


def choose_codes(
    weight: jax.Array,
    statistics: Statistics | None,
    format: WeightFormat,
    rounding: str,
    name: str = "a weight",
) -> PlainCodes:
    """The codes of a weight float32 [K, N] in a packed format.

    statistics: of the weight's inputs; None only for `rtn`.
    rounding: one of ROUNDINGS. name: of the weight, in warnings.
    """
    if rounding == "rtn":
        return fit(weight, format).round(weight)
    assert statistics is not None
    if rounding in ("range", "clip"):
        fit_best = search_ranges if rounding == "range" else learn_ranges
        return fit_best(weight, statistics.hessian, format).round(weight)
    # Not divided by the number of tokens: GPTQ is scale-invariant, and a copy would be large.
    products = statistics.products
    if rounding == "gptq-fresh":
        found = gptq_fresh(weight, products, format)
    else:
        found = gptq(weight, products, search_ranges(weight, statistics.mean_square, format))
    if bool(jnp.isnan(found.damping)):
        warnings.warn(
            f"{name}: the mean of x xᵀ has no Cholesky factor, with whatever damping, so that the "
            "weight is rounded to nearest instead of by GPTQ: give other text",
            stacklevel=2,
        )
    return found.plain
