from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import Gate
from mpjax.kernels.experts.arguments import read_call
from mpjax.kernels.experts.epilogue import Epilogue


def test_tokens_get_one_axis():
    weight, experts = jnp.ones((4, 8, 6)), np.zeros((2, 3, 2), np.int64)
    epilogue = Epilogue(np.ones((4, 6), np.float32), Gate(), np.ones((2, 3, 2), np.float32))
    call = read_call("f", np.ones((2, 3, 8), np.float32), weight, experts, epilogue)
    assert (call.x.shape, call.experts.shape, call.tokens) == ((6, 8), (6, 2), (2, 3))
    assert (call.experts.dtype, call.epilogue.routing_weights.shape) == (jnp.int32, (6, 2))
    own = read_call("f", np.ones((2, 3, 2, 8), np.float32), weight, experts, Epilogue())
    assert own.x.shape == (6, 2, 8)


def test_errors_name_the_operation():
    with pytest.raises(ValueError, match=r"f: routing_weights has shape \(3,\): expected \(3, 2\)"):
        read_call(
            *("f", jnp.ones((3, 8)), jnp.ones((4, 8, 6)), jnp.zeros((3, 2), int)),
            Epilogue(routing_weights=jnp.ones(3)),
        )
