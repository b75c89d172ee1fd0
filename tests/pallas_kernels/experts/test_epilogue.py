from __future__ import annotations

import jax
import jax.numpy as jnp

from mpjax.kernels import Gate
from mpjax.kernels.experts.epilogue import Epilogue


def test_its_arrays_are_traced_and_its_gate_is_static():
    epilogue = Epilogue(jnp.ones((2, 4)), Gate(7.0), None)
    leaves, structure = jax.tree.flatten(epilogue)
    assert len(leaves) == 1
    assert structure.unflatten(leaves).gate == Gate(7.0)
    assert structure != jax.tree.structure(Epilogue(jnp.ones((2, 4)), Gate(), None))
