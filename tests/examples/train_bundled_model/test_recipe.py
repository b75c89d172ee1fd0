"""Recipes and their variations."""

from __future__ import annotations

import dataclasses

import pytest

from examples.train_bundled_model.recipe import Recipe, TrainingError, sweep


def test_a_sweep_starts_with_the_base_and_has_no_recipe_twice():
    base = Recipe(learning_rate=0.01, seed=3)
    recipes = sweep(base)
    assert recipes[0] == base
    assert len(set(recipes)) == len(recipes) == 5


def test_a_sweep_keeps_what_the_compiled_step_depends_on():
    base = Recipe(steps=300, batch=4, context=32, interval=50, compute_dtype="float32")
    for recipe in sweep(base):
        for name in ("batch", "context", "interval", "compute_dtype"):
            assert getattr(recipe, name) == getattr(base, name)
        assert recipe.steps % recipe.interval == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("steps", 0),
        ("batch", 0),
        ("context", -1),
        ("interval", 0),
        ("learning_rate", -1e-3),
        ("weight_decay", -1.0),
        ("warmup", -1),
        ("noise", 1.5),
        ("compute_dtype", "float16"),
    ],
)
def test_values_out_of_range_are_named(name, value):
    with pytest.raises(TrainingError, match=name):
        dataclasses.replace(Recipe(), **{name: value})
