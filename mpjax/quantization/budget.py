"""A format for each linear map, so that a model of so many bits per weight loses least.

Each format of each map has a size and a measured cost, and the loss of a choice is about the sum of
its costs: the linearity of HIGGS (Malinovskii et al., "Pushing the Limits of Large Language Model
Quantization via the Linearity Theorem", 2024, §3 and §5). Dynamic programming finds the cheapest.
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
    """A format that a linear map may have: the bits that it takes, and the loss that it costs."""

    bits: int
    cost: float


@dataclasses.dataclass(frozen=True)
class BudgetRecipe:
    """A recipe that keeps a budget.

    bits: per weight, as `LanguageModel.bits_per_weight` counts them. nats: the expected rise of the
    loss, as KL divergence per token, if weights are rounded to nearest.
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
    """The recipe of at most so many bits per weight whose expected loss is least.

    lm: a model in 16 bits, with a tokenizer; all of it is on the device. bits: per weight, as
    `LanguageModel.bits_per_weight` counts them.
    documents: the text on which costs are measured.
    choices: the formats that maps may have, as W parts of a precision; those whose groups don't
    divide a map's input channels are left out for it.
    precision: the rest of the precision: KV, H and E. method: as for `Recipe.of`.

    Raises ValueError for a budget below the smallest choices, for formats with 8-bit activations,
    whose rounding the costs don't contain, and for a model that is quantised already.
    """
    require_type("lm", lm, LanguageModel, hint=", as mpjax.load gives it")
    lm.require_one_device("choosing formats for")
    require_documents(documents)
    read_method(method)  # raises an error for an unknown one, before costs are measured
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
    """The formats that W parts of a precision name. Raises ValueError for others."""
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
    """The index of an option for each map: the least sum of costs whose bits fit into a budget.

    It is exact: after each map, a choice that is both larger and dearer than another can't be part
    of the best one, and all others are kept. Raises ValueError if nothing fits.
    """
    least = [min(option.bits for option in own) for own in options]
    later = [*np.cumsum(least[::-1])[::-1].tolist(), 0]  # bits that maps from each on need
    if later[0] > budget:
        raise ValueError(f"the smallest options take {later[0]} bits, above {budget}")
    sizes, costs = np.zeros(1, np.int64), np.zeros(1)
    steps: list[tuple[np.ndarray, np.ndarray]] = []  # of each kept choice: the one before, option
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
    chosen, at = [], len(costs) - 1  # the largest that is kept is the cheapest
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
    """A recipe in which the most common format is for all maps that no rule names."""
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
