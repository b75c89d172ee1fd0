from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import HeadNorms, Rotation

ANGLES = np.linspace(0, 1, 6, dtype=np.float32).reshape(1, 3, 2)


def rotation(**changes):
    fields = {"cosines": np.cos(ANGLES), "sines": np.sin(ANGLES), "heads": (4, 2)}
    return Rotation(**fields | changes)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 4}, "heads is 4: expected a pair, query heads and KV heads"),
        ({"heads": (4, 2, 2)}, r"heads is \(4, 2, 2\): expected a pair"),
        ({"heads": (4.0, 2)}, r"query heads is 4\.0: expected 1 or more, a whole number"),
        ({"heads": (4, 0)}, r"KV heads is 0: expected 1 or more, a whole number"),
        ({"transform_queries": "no"}, "transform_queries is 'no': expected a bool"),
    ],
)
def test_what_is_static_must_make_sense(change, message):
    with pytest.raises(ValueError, match=f"Rotation: {message}"):
        rotation(**change)


def test_heads_and_the_transform_are_static():
    one, other = rotation(heads=[np.int64(4), 2]), rotation(transform_queries=np.bool(False))
    assert jax.tree.structure(one) == jax.tree.structure(other)
    assert len(jax.tree.leaves(one)) == 2
    norms = HeadNorms(np.ones(4), np.ones(4), 1e-6)
    assert len(jax.tree.leaves(rotation(norms=norms))) == 4
    assert jax.tree.structure(one) != jax.tree.structure(rotation(transform_queries=True))


def test_lists_are_read_as_arrays():
    norms = HeadNorms([1.0] * 4, [2.0] * 4, 0)  # type: ignore[arg-type]
    found = rotation(cosines=ANGLES.tolist(), norms=norms).read("turn")
    assert isinstance(found.cosines, jax.Array)
    assert found.norms is not None
    assert found.norms.key.shape == (4,)
    assert isinstance(found.norms.epsilon, float)
    assert rotation().read("turn").norms is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"cosines": "all"}, "cosines is 'all': expected an array of real numbers"),
        ({"sines": np.ones(3, np.int32)}, "sines has the dtype int32: expected floating point"),
        ({"norms": (1, 2)}, r"norms is \(1, 2\): expected a HeadNorms, or None"),
        ({"norms": HeadNorms([1.0], [1.0], -1)}, "norms: epsilon is -1: expected a finite number"),
    ],
)
def test_what_is_wrong_is_named(change, message):
    with pytest.raises(ValueError, match=f"turn: {message}"):
        rotation(**change).read("turn")


def test_map_angles_keeps_all_else():
    found = rotation(transform_queries=True).map_angles(lambda x: jnp.asarray(x)[0])
    assert found.cosines.shape == found.sines.shape == (3, 2)
    assert (found.heads, found.transform_queries) == ((4, 2), True)
    np.testing.assert_array_equal(found.sines, np.sin(ANGLES[0]))
