from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from mpjax.models.vocabulary import Vocabulary


def on_one_device(function, *arguments):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))
    whole = PartitionSpec()
    run = jax.shard_map(function, mesh=mesh, in_specs=whole, out_specs=whole, check_vma=False)
    return run(*arguments)


def test_an_undivided_vocabulary_changes_nothing():
    table, logits = jnp.arange(6.0).reshape(3, 2), jnp.ones((2, 3))
    vocabulary = Vocabulary(3)
    np.testing.assert_array_equal(
        vocabulary.embed(lambda tokens: table[tokens], jnp.asarray([2, 0])),
        table[jnp.asarray([2, 0])],
    )
    assert vocabulary.mask(logits) is logits


def test_tokens_of_other_devices_add_zeros():
    """The device has the first two rows: a token beyond them is another's."""
    table, vocabulary = jnp.arange(1.0, 5.0).reshape(2, 2), Vocabulary(2, "model")
    found = on_one_device(
        lambda ids: vocabulary.embed(lambda tokens: table[tokens], ids), jnp.asarray([[1, 3]])
    )
    np.testing.assert_array_equal(found, [[[3, 4], [0, 0]]])


def test_columns_beyond_the_vocabulary_are_impossible():
    found = on_one_device(Vocabulary(3, "model").mask, jnp.ones((2, 5)))
    np.testing.assert_array_equal(found, np.array([[1, 1, 1, -np.inf, -np.inf]] * 2))


def test_several_devices_have_the_vocabulary_of_one():
    """Three, of whose six rows the last is none; `vmap` over a named axis has their collectives."""
    table, vocabulary = jnp.arange(1.0, 11.0).reshape(5, 2), Vocabulary(5, "model")
    shares = jnp.pad(table, ((0, 1), (0, 0)), constant_values=99).reshape(3, 2, 2)
    ids = jnp.arange(5, dtype=jnp.int32)

    def embed(share):
        return vocabulary.embed(lambda tokens: share[tokens], ids)

    found = jax.vmap(embed, axis_name="model")(shares)
    np.testing.assert_array_equal(found, np.tile(table, (3, 1, 1)))
    masked = jax.vmap(vocabulary.mask, axis_name="model")(jnp.zeros((3, 4, 2)))
    np.testing.assert_array_equal(masked[:2], 0)
    np.testing.assert_array_equal(masked[2], np.array([[0, -np.inf]] * 4))
