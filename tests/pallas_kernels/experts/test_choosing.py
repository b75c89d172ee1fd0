from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import RouterLogits, Routing
from mpjax.kernels.experts.choosing import choose, why_not
from mpjax.kernels.launch import Settings, first_program_id, launch, store
from tests.pallas_kernels.experts.test_routing_triton import CORRECTION, LOGITS


def chosen(logits: RouterLogits) -> tuple[jax.Array, jax.Array]:
    """The experts and weights of all tokens, each by a program of its own."""
    shape = len(logits.logits), logits.routing.per_token

    def kernel(logits, experts_ref, weights_ref):
        place = tuple(divmod(first_program_id(), shape[1]))
        found = choose(logits, *place)
        store(experts_ref.at[place], found.expert)
        store(weights_ref.at[place], found.weight())

    return launch(
        kernel,
        logits,
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.int32, jnp.float32)],
        grid=(shape[0] * shape[1],),
        settings=Settings("choose"),
        interpret=True,
    )


@pytest.mark.parametrize("routing", [Routing(5), Routing(4, renormalize=False, scale=2.5)])
@pytest.mark.parametrize("bias", [None, CORRECTION])
def test_it_is_the_routing(routing, bias):
    """Among the logits are ties, and fewer finite ones than are chosen."""
    logits = RouterLogits(
        jnp.asarray(LOGITS), routing, bias=None if bias is None else jnp.asarray(bias)
    )
    found, (experts, weights) = chosen(logits), logits.route()
    np.testing.assert_array_equal(found[0], experts)
    np.testing.assert_allclose(found[1], weights, rtol=1e-5)


def test_experts_exist_whatever_the_logits_are():
    logits = jnp.full((2, 20), jnp.nan).at[1, :10].set(0.0)
    experts, _ = chosen(RouterLogits(logits, Routing(5)))
    assert ((np.asarray(experts) >= 0) & (np.asarray(experts) < 20)).all()


@pytest.mark.parametrize(
    ("routing", "experts", "corrected", "reason"),
    [
        (Routing(8), 128, False, None),
        (Routing(8), 129, False, "129 experts; a product chooses among up to 128"),
        (Routing(8, "sigmoid"), 64, False, "experts are ranked by corrected or sigmoid scores"),
        (Routing(8), 64, True, "experts are ranked by corrected or sigmoid scores"),
        (Routing(8, groups=4, groups_per_token=2), 64, False, "experts come out of groups"),
    ],
)
def test_routings_that_take_a_kernel_of_their_own(routing, experts, corrected, reason):
    found = why_not(routing, experts, corrected=corrected)
    assert found == reason or (found is not None and reason is not None and reason in found)
