from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from mpjax.kernels.leading_axes import over_leading_axes


def test_a_function_of_a_matrix_is_one_of_stacks(rng):
    matrices = rng.standard_normal((2, 3, 4, 5))

    def total(tree):
        assert tree["matrix"].ndim == 2
        assert tree["none"] is None
        return tree["matrix"].sum()

    tree = {"matrix": jnp.asarray(matrices), "none": None}
    found = over_leading_axes(total, 2)(tree)
    np.testing.assert_allclose(found, matrices.sum((2, 3)), rtol=1e-5)
    assert over_leading_axes(total, 0) is total
