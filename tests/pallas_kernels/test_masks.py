from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import Masks
from mpjax.kernels.masks import CAUSAL


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"scale": -1.0}, "scale is -1.0: expected a positive number, or None"),
        ({"window": 0}, "window is 0: expected a number of keys, or None"),
        ({"window": -5}, "window is -5: expected a number of keys, or None"),
        ({"softcap": 0.0}, "softcap is 0.0: expected a positive number, or None"),
        ({"scale": np.nan}, "scale is nan: expected a positive number, or None"),
        ({"softcap": np.inf}, "softcap is inf: expected a positive number, or None"),
        ({"window": 3.5}, "window is 3.5: expected a number of keys, or None"),
    ],
)
def test_numbers_must_make_sense(numbers, message):
    with pytest.raises(ValueError, match=f"Masks: {message}"):
        Masks(**numbers)


@pytest.mark.parametrize(("name", "value"), [("scale", 0.5), ("window", 3), ("softcap", 1.0)])
def test_numbers_are_not_traced(name, value):
    message = f"Masks: {name} is traced, .*: pass a Python number, or name it in the static_arg"
    with pytest.raises(ValueError, match=message):
        jax.jit(lambda value: Masks(**{name: value}))(value)
    made = jax.jit(lambda value: Masks(**{name: value}), static_argnums=0)(value)
    assert made == Masks(**{name: value})


def test_numbers_are_pythons_whatever_they_came_as():
    """So that equal masks share a trace."""
    masks = Masks(np.float32(0.5), np.int64(3), np.float16(2))
    assert [type(x) for x in (masks.scale, masks.window, masks.softcap)] == [float, int, float]
    assert jax.tree.structure(masks) == jax.tree.structure(Masks(0.5, 3, 2.0))


def test_sinks_are_the_only_leaf():
    assert jax.tree.leaves(Masks(0.5, 3, 2.0)) == []
    sinks = jnp.ones(4)
    [leaf] = jax.tree.leaves(Masks(sinks=sinks))
    assert leaf is sinks


def test_causality_alone():
    assert CAUSAL.is_causal
    assert Masks(scale=0.3).is_causal
    for masks in (Masks(window=3), Masks(softcap=1.0), Masks(sinks=jnp.ones(2))):
        assert not masks.is_causal


def test_the_scale_is_that_of_the_head_unless_it_is_given():
    assert CAUSAL.scale_for(64) == 1 / 8
    assert Masks(scale=0.3).scale_for(64) == 0.3


def test_sinks_become_an_array_for_each_head():
    assert CAUSAL.read("attend", 4) is CAUSAL
    found = Masks(window=5, sinks=[1.0, 2.0]).read("attend", 2)  # type: ignore[arg-type]
    assert isinstance(found.sinks, jax.Array)
    assert found.window == 5
    with pytest.raises(ValueError, match=r"attend: sinks have shape \(2,\): expected \(4,\)"):
        Masks(sinks=jnp.ones(2)).read("attend", 4)
    with pytest.raises(ValueError, match="attend: sinks is 'many': expected an array"):
        Masks(sinks="many").read("attend", 4)  # type: ignore[arg-type]
