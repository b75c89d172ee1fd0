"""Methods by name: the scaling steps, and the rounding step that chooses codes."""

from __future__ import annotations

import dataclasses
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
# Steps of the whole model, before those of linear maps.
ROTATE, HADAMARD = OF_MODEL = ("rotate", "hadamard")


def split_steps(text: str) -> tuple[tuple[str, ...], str]:
    """The steps of the whole model that a method begins with, in order, and those behind them.

    These are `range` where there are none.
    """
    found: tuple[str, ...] = ()
    for name in OF_MODEL:
        step, _, rest = text.partition("+")
        if step.strip().lower() == name:
            found, text = (*found, name), rest or "range"
    return found, text


@dataclasses.dataclass(frozen=True)
class Method:
    """How a linear map is quantised, written as the names of its steps: `awq+gptq`.

    scalings: the steps that fold scales, in their order: `awq`, `smooth`, `os`.
    rounding: the step that chooses codes. `rtn` rounds to nearest. `range` rounds to nearest within
        the share of each group's range that has the least error (`ranges`); `clip` does so with
        shares that gradient descent learns (`clipping`). `gptq` searches ranges as `range` does,
        and rounds row by row (`gptq`); `gptq-fresh` searches those of a group when it is reached.
    learns: whether `learn` follows: scales are learned against the outputs of the 16-bit layer.
    """

    scalings: tuple[str, ...]
    rounding: str
    learns: bool = False

    @classmethod
    def parse(cls, text: str) -> Method:
        """Reads steps joined by `+`: scalings, a rounding, `learn`.

        The rounding is `range` if there is none.

        Raises ValueError for unknown, repeated or misplaced steps.
        """
        require_type("the method", text, str, hint=", such as 'awq+gptq'")
        steps = [name.strip() for name in text.lower().split("+")]
        _require_known(text, steps)
        learns = steps[-1] == LEARN
        steps = steps[:-1] if learns else steps
        roundings = [step for step in steps if step in ROUNDINGS]
        scalings = tuple(step for step in steps if step in SCALINGS)
        is_ordered = steps == [*scalings, *roundings[:1]] and len(set(steps)) == len(steps)
        if not is_ordered:
            raise ValueError(
                f"the method is {text!r}: expected scalings first, each once, one of "
                f"{', '.join(ROUNDINGS)} behind them, and learn last, joined by +, such as awq+gptq"
            )
        return cls(scalings, roundings[0] if roundings else "range", learns)

    @classmethod
    def of(cls, method: Method | str) -> Method:
        """A method as it is, or as `parse` reads it."""
        return method if isinstance(method, Method) else cls.parse(method)

    def __str__(self) -> str:
        return "+".join((*self.scalings, self.rounding, *[LEARN] * self.learns))

    def require_usable(self, format: WeightFormat) -> None:
        """Raises ValueError if a step can't serve a format, or its package is not installed."""
        if self.rounding == "clip" or self.learns:
            require_optax(LEARN if self.learns else self.rounding)
        reason = why_not(format) if self.learns else None
        if self.rounding == "gptq-fresh":
            reason = reason or why_not_fresh(format)
        if reason:
            raise ValueError(f"the method {self} can't serve weights of {format}: {reason}")

    @property
    def needs_text(self) -> bool:
        """Whether a step needs statistics of a text."""
        return bool(self.scalings) or self.rounding != "rtn" or self.learns


def _require_known(text: str, steps: list[str]) -> None:
    """Raises ValueError for a step that there is not, or that is not one of a linear map."""
    everything = (*OF_MODEL, *SCALINGS, *ROUNDINGS, LEARN)
    for step in steps:
        if step in OF_MODEL:
            raise ValueError(
                f"the method has {text!r}: {step} is a step of the whole model. Expected "
                f"{' and '.join(OF_MODEL)} first, in this order, each once, and neither in the "
                "method of a rule"
            )
        if step and step not in everything:
            hint = did_you_mean(nearest(step, everything))
            raise ValueError(
                f"{text!r}: there is no method {step!r}{hint}: expected one or several of "
                f"{', '.join(everything)}, joined by +"
            )


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
    if rounding in ("range", "clip"):
        fit_best = search_ranges if rounding == "range" else learn_ranges
        return fit_best(weight, statistics.hessian, format).round(weight)
    # Not divided by the tokens: GPTQ takes any factor, and the copy would be large for a wide map.
    products = statistics.products
    if rounding == "gptq-fresh":
        found = gptq_fresh(weight, products, format)
    else:
        found = gptq(weight, products, search_ranges(weight, statistics.mean_square, format))
    if bool(jnp.isnan(found.damping)):
        warnings.warn(
            "the mean of x xᵀ has no Cholesky factor, with whatever damping, so that a weight is "
            "rounded to nearest instead of by GPTQ: give other text",
            stacklevel=2,
        )
    return found.plain
