"""Methods by name: the scaling steps, and the rounding step that chooses codes."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp

from mpjax.kernels import PlainCodes, WeightFormat
from mpjax.kernels.checks import did_you_mean, nearest, require_type
from mpjax.kernels.grid import fit
from mpjax.quantization.clipping import learn_ranges, require_optax
from mpjax.quantization.gptq import gptq
from mpjax.quantization.ranges import search_ranges
from mpjax.quantization.scaling import awq_scales, smooth_scales, threshold_scales
from mpjax.quantization.statistics import Statistics

SCALINGS: dict[str, Any] = {
    "awq": awq_scales,
    "smooth": smooth_scales,
    "os": threshold_scales,
}
ROUNDINGS = ("rtn", "range", "clip", "gptq")
ROTATE = "rotate"  # of the whole model, before the steps of linear maps


def split_rotation(text: str) -> tuple[bool, str]:
    """Whether a method begins with `rotate`, and the steps behind it.

    They are `range` where there are none.
    """
    first, _, rest = text.partition("+")
    return (True, rest or "range") if first.strip().lower() == ROTATE else (False, text)


@dataclasses.dataclass(frozen=True)
class Method:
    """How a linear map is quantised, written as the names of its steps: `awq+gptq`.

    scalings: the steps that fold scales, in their order: `awq`, `smooth`, `os`.
    rounding: the step that chooses codes. `rtn` rounds to nearest. `range` rounds to nearest within
        the share of each group's range that has the least error (`ranges`); `clip` does so with
        shares that gradient descent learns (`clipping`). `gptq` searches ranges as `range` does,
        and rounds row by row (`gptq`).
    """

    scalings: tuple[str, ...]
    rounding: str

    @classmethod
    def parse(cls, text: str) -> Method:
        """Reads steps joined by `+`; the rounding comes last, and is `range` if there is none.

        Raises ValueError for unknown, repeated or misplaced steps.
        """
        require_type("the method", text, str, hint=", such as 'awq+gptq'")
        steps = [name.strip() for name in text.lower().split("+")]
        known = (*SCALINGS, *ROUNDINGS)
        if ROTATE in steps:
            raise ValueError(
                f"the method is {text!r}: {ROTATE} is of the whole model, and comes first in its "
                "method, not in that of a rule"
            )
        for step in steps:
            if step and step not in known:
                hint = did_you_mean(nearest(step, known))
                raise ValueError(
                    f"{text!r}: there is no method {step!r}{hint}: expected one or several of "
                    f"{', '.join(known)}, joined by +"
                )
        roundings = [step for step in steps if step in ROUNDINGS]
        is_last = not roundings or steps[-1] == roundings[0]
        if not all(steps) or max(Counter(steps).values()) > 1 or len(roundings) > 1 or not is_last:
            raise ValueError(
                f"the method is {text!r}: expected scalings first, each once, and one of "
                f"{', '.join(ROUNDINGS)} last, joined by +, such as awq+gptq"
            )
        scalings = tuple(step for step in steps if step in SCALINGS)
        return cls(scalings, roundings[0] if roundings else "range")

    @classmethod
    def of(cls, method: Method | str) -> Method:
        """A method as it is, or as `parse` reads it."""
        return method if isinstance(method, Method) else cls.parse(method)

    def __str__(self) -> str:
        return "+".join((*self.scalings, self.rounding))

    def require_usable(self) -> None:
        """Raises ValueError if a step needs a package that is not installed."""
        if self.rounding == "clip":
            require_optax()

    @property
    def needs_text(self) -> bool:
        """Whether a step needs statistics of a text."""
        return bool(self.scalings) or self.rounding != "rtn"


def choose_codes(
    weight: jax.Array, statistics: Statistics | None, format: WeightFormat, rounding: str
) -> PlainCodes:
    """The codes of a weight float32 [K, N] in a packed format.

    statistics: of the weight's inputs; only `rtn` does without.
    rounding: one of ROUNDINGS.
    """
    if rounding == "rtn":
        return fit(weight, format).round(weight)
    assert statistics is not None
    hessian = statistics.hessian
    if rounding == "range":
        return search_ranges(weight, hessian, format).round(weight)
    if rounding == "clip":
        return learn_ranges(weight, hessian, format).round(weight)
    grid = search_ranges(weight, jnp.diagonal(hessian), format)
    found = gptq(weight, hessian, grid)
    if bool(jnp.isnan(found.damping)):
        warnings.warn(
            "the mean of x xᵀ has no Cholesky factor, with whatever damping, so that a weight is "
            "rounded to nearest instead of by GPTQ: give other text",
            stacklevel=2,
        )
    return found.plain
