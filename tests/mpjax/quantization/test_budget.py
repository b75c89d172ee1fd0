from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from flax import nnx

import mpjax
from mpjax.quantization.budget import Option, cheapest, read_choices, recipe_for_budget

pytestmark = pytest.mark.any_version

CHOICES = ("WNF3", "W4", "W8")  # of 3.5, 4.25 and 8.25 bits
TEXTS = ["the quick brown fox jumps over the lazy dog, and then it sleeps " * 6]


def sums(options, chosen):
    found = [own[index] for own, index in zip(options, chosen, strict=True)]
    return sum(option.bits for option in found), sum(option.cost for option in found)


@pytest.mark.parametrize("maps", [1, 2, 5])
def test_the_choice_is_that_of_brute_force(maps, rng):
    for _ in range(40):
        options = [
            [
                Option(int(rng.integers(1, 12)), float(rng.integers(0, 9) * rng.choice([0.5, 3])))
                for _ in range(rng.integers(1, 4))
            ]
            for _ in range(maps)
        ]
        every = list(itertools.product(*(range(len(own)) for own in options)))
        sizes = [sums(options, chosen)[0] for chosen in every]
        budget = int(rng.integers(min(sizes), max(sizes) + 2))
        possible = [chosen for chosen, size in zip(every, sizes, strict=True) if size <= budget]
        best = min(sums(options, chosen)[1] for chosen in possible)
        size, cost = sums(options, cheapest(options, budget))
        assert size <= budget
        assert cost == pytest.approx(best)


def test_a_recipe_keeps_its_budget_and_the_model(tiny):
    before = [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(tiny.model))]
    options = {"choices": CHOICES, "precision": "A32KV8H16", "method": "rtn"}
    found = recipe_for_budget(tiny, 4, TEXTS, **options)
    after = jax.tree.leaves(nnx.state(tiny.model))
    assert all(map(np.array_equal, before, after))
    assert 3.6 < found.bits <= 4
    assert found.nats > 0
    lm = mpjax.quantize(tiny, found.recipe)
    assert lm.bits_per_weight == pytest.approx(found.bits)
    assert len({*found.recipe.rules}) > 1
    assert recipe_for_budget(tiny, 8, TEXTS, **options).nats < found.nats


def test_choices_are_w_parts():
    assert [str(format) for format in read_choices(["W4", "WNF3g128"])] == [
        "uint4:g128",
        "table3:g128",
    ]
    for wrong in ("W4A8", 3, "nonsense", "W4+W8"):
        with pytest.raises(ValueError, match=f"choices has {wrong!r}".replace("+", r"\+")):
            read_choices([wrong])
    with pytest.raises(ValueError, match="W5A16 is not implemented"):
        read_choices(["W5"])


@pytest.mark.parametrize(
    ("bits", "options", "message"),
    [
        (
            2,
            {"choices": CHOICES},
            "smallest choice .*, of WNF3, W4, W8, takes 3.500 bits per weight",
        ),
        ("four", {}, "bits is 'four': expected bits per weight"),
        (4.5, {"precision": "W4A16KV8"}, "the budget decides about W, so leave it out"),
        (4.5, {"method": ""}, "the method is ''"),
        (4.5, {"choices": []}, "choices is empty"),
        (4.5, {"choices": "W4"}, "choices is 'W4': expected a list"),
        (4.5, {"choices": ["W4g256"]}, "W4g256"),
        (
            4.5,
            {"choices": ["WNF3g256"]},
            "128 input channels, which the groups of no choice divide",
        ),
    ],
)
def test_what_can_not_be_chosen(tiny, monkeypatch, bits, options, message):
    monkeypatch.setattr("mpjax.quantization.budget.rounding_costs", None)  # not reached
    with pytest.raises(ValueError, match=message):
        recipe_for_budget(tiny, bits, TEXTS, **options)
