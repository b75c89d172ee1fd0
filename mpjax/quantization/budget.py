"""Chooses a format for each linear map, minimising the loss for a budget of bits per weight.

Each format of each map has a size and a measured cost, and the model's loss is about the sum of the
costs: the linearity of HIGGS (Malinovskii et al., "Pushing the Limits of Large Language Model
Quantization via the Linearity Theorem", 2024, §3 and §5). Dynamic programming finds the optimum.
"""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from mpjax.arguments import require_documents
from mpjax.kernels import WeightFormat
from mpjax.kernels.checks import require_type, shown
from mpjax.language_model import LanguageModel, stored_bits
from mpjax.models import LinearPlace
from mpjax.precision import Precision
from mpjax.quantization.costs import plain_places, rounding_costs
from mpjax.quantization.methods import read_method
from mpjax.quantization.recipe import DEFAULT_METHOD, Recipe, Rule

CHOICES = ("WNF2", "WNF3", "W4", "W8")
W_PART = re.compile(r"W[A-Z]*\d+(g(\d+|K))?(sym)?", re.IGNORECASE)


class Option(NamedTuple):
    """A candidate format of a linear map: its size in bits, and its cost in nats."""

    bits: int
    cost: float


@dataclasses.dataclass(frozen=True)
class BudgetRecipe:
    """A recipe within a budget.

    bits: per weight, as in `LanguageModel.bits_per_weight`. nats: the expected KL divergence per
    token if weights are rounded to nearest.
    """

    recipe: Recipe
    bits: float
    nats: float


def recipe_for_budget(
    lm: LanguageModel,
    bits: float,
    documents: Iterable[str],
    *,
    choices: Sequence[str] = CHOICES,
    precision: Precision | str = "A16KV16",
    method: str = DEFAULT_METHOD,
) -> BudgetRecipe:
    """The recipe with the least expected loss of those within `bits` bits per weight.

    lm: a 16-bit model on the device, with a tokenizer. bits: per weight, as in
    `LanguageModel.bits_per_weight`.
    documents: calibration text, on which costs are measured.
    choices: the candidate formats, as W parts of a precision; for each map, only those whose groups
    divide its input channels.
    precision: the rest of the precision: KV, H and E. method: as for `Recipe.of`.

    Raises ValueError for a budget below the smallest choices, for formats with 8-bit activations,
    whose rounding the costs don't include, and for a quantised model.
    """
    require_type("lm", lm, LanguageModel, hint=", as mpjax.load gives it")
    lm.require_one_device("choosing formats for")
    lm.require_no_head("choosing formats for")
    require_documents(documents)
    read_method(method)  # raises ValueError for an unknown one, before the slow measurement
    rest = Precision.of(precision)
    if rest.formats:
        raise ValueError(f"precision is {rest}: the budget decides about W, so leave it out")
    formats = read_choices(choices)
    places = plain_places(lm.model)
    weights = sum(channels * outputs for place in places for channels, outputs in place.shapes)
    if not isinstance(bits, int | float) or not 0 < bits <= 16:
        raise ValueError(f"bits is {shown(bits)}: expected bits per weight up to 16, such as 4.5")
    allowed = [_possible(place, formats) for place in places]
    sizes = [
        [_bits(place, format) for format in own] for place, own in zip(places, allowed, strict=True)
    ]
    least = sum(map(min, sizes))
    if least > weights * bits:
        raise ValueError(
            f"bits is {bits:g}, but even the smallest choice for each linear map, of "
            f"{', '.join(choices)}, takes {least / weights:.3f} bits per weight: give a larger "
            "budget, or smaller choices"
        )
    costs = rounding_costs(lm, list(documents), allowed)
    options = [list(map(Option, *own)) for own in zip(sizes, costs, strict=True)]
    chosen = cheapest(options, int(weights * bits))
    found = [own[index] for own, index in zip(allowed, chosen, strict=True)]
    used = [own[index] for own, index in zip(options, chosen, strict=True)]
    return BudgetRecipe(
        _recipe(dict(zip([place.path for place in places], found, strict=True)), rest, method),
        sum(option.bits for option in used) / weights,
        sum(option.cost for option in used),
    )


def read_choices(choices: Sequence[str]) -> list[WeightFormat]:
    """Parses W parts of a precision to formats. Raises ValueError for invalid ones."""
    if isinstance(choices, str) or not isinstance(choices, Sequence):
        raise ValueError(f"choices is {shown(choices)}: expected a list of W parts, ['W4', 'W8']")
    formats = []
    for text in choices:
        if not isinstance(text, str) or not W_PART.fullmatch(text):
            raise ValueError(
                f"choices has {shown(text)}: expected W parts of formats with 16-bit activations, "
                "such as W4 or WNF3"
            )
        found = Precision.parse(f"{text}A16KV16").weights
        assert found is not None
        formats.append(found)
    if not formats:
        raise ValueError("choices is empty: expected W parts, such as W4 and W8")
    return formats


def cheapest(options: Sequence[Sequence[Option]], budget: int) -> list[int]:
    """The index of an option for each map, with the least total cost within a budget of bits.

    Exact: after each map, only Pareto-optimal partial choices (in size and cost) are kept. Raises
    ValueError if nothing fits.
    """
    least = [min(option.bits for option in own) for own in options]
    later = [*np.cumsum(least[::-1])[::-1].tolist(), 0]  # [i]: the least bits of maps i, i + 1, …
    if later[0] > budget:
        raise ValueError(f"the smallest options take {later[0]} bits, above {budget}")
    sizes, costs = np.zeros(1, np.int64), np.zeros(1)
    steps: list[tuple[np.ndarray, np.ndarray]] = []  # for each kept choice: (predecessor, option)
    for own, rest in zip(options, later[1:], strict=True):
        table = np.array(own)
        size = (sizes[:, None] + table[None, :, 0].astype(np.int64)).ravel()
        cost = (costs[:, None] + table[None, :, 1]).ravel()
        order = np.lexsort((cost, size))
        order = order[size[order] + rest <= budget]
        best = np.minimum.accumulate(cost[order])
        kept = order[np.concatenate([[True], cost[order][1:] < best[:-1]])]
        steps.append(np.divmod(kept, len(own)))
        sizes, costs = size[kept], cost[kept]
    chosen, at = [], len(costs) - 1  # the largest kept choice is the cheapest
    for before, option in reversed(steps):
        chosen.append(int(option[at]))
        at = before[at]
    return chosen[::-1]


def _possible(place: LinearPlace, formats: Sequence[WeightFormat]) -> list[WeightFormat]:
    channels = {shape[0] for shape in place.shapes}
    found = [format for format in formats if all(map(format.can_split, channels))]
    if not found:
        raise ValueError(
            f"{place.path} has {min(channels)} input channels, which the groups of no choice "
            "divide: add one such as W4g32 or W8gK"
        )
    return found


def _bits(place: LinearPlace, format: WeightFormat) -> int:
    return sum(stored_bits(shape, format) for shape in place.shapes)


def _recipe(formats: dict[str, WeightFormat], rest: Precision, method: str) -> Recipe:
    """A recipe with a rule for each map, and the most common format as the default."""
    usual, _ = Counter(formats.values()).most_common(1)[0]
    top = dataclasses.replace(rest, weights=usual)
    recipe = Recipe.of(top, method)
    rules = [
        Rule(path, format, recipe.rules[0].method)
        for format in sorted({*formats.values()}, key=str)
        for path, found in formats.items()
        if found == format != usual
    ]
    return dataclasses.replace(recipe, rules=(*rules, *recipe.rules))
