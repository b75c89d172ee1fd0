from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from mpjax.models.gathered import Gathered, abstract, gather


def test_numbers_are_joined_when_they_are_asked_for():
    calls = []

    def join():
        calls.append(1)
        return np.arange(6, dtype=np.float32).reshape(2, 3)

    array = Gathered(jax.ShapeDtypeStruct((2, 3), jnp.float32), join)
    assert (array.shape, array.ndim, array.size, array.nbytes) == ((2, 3), 2, 6, 24)
    tree = {"joined": array, "other": jnp.ones(2)}
    shapes = jax.eval_shape(lambda: abstract(tree))
    assert (shapes["joined"].shape, shapes["joined"].dtype) == ((2, 3), jnp.float32)
    assert not calls
    found = gather(tree)
    assert isinstance(found["joined"], jax.Array)
    np.testing.assert_array_equal(found["joined"], join())
    assert found["other"] is tree["other"]
