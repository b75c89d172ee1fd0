from __future__ import annotations

import jax
import numpy as np
import pytest

from mpjax.kernels.sums.api import LEAST_VERSION
from mpjax.models import Decoder
from mpjax.models.registry import FAMILIES
from mpjax.models.sharded import ShardedDecoder
from tests.eight_devices import run
from tests.models import sharded_families
from tests.models.sharded_decoders import CASES, divide, require_same_arrays
from tests.models.small import small_config, small_model


@pytest.mark.sweep  # of the default, tests/mpjax/test_loading.py has a case
def test_logits_are_those_of_the_whole_decoder():
    said = f"{len(CASES)} cases, {len(FAMILIES)} families\n"
    assert run("tests.models.sharded_families") == said


@pytest.fixture(scope="module")
def divided() -> ShardedDecoder:
    """Divided among one device, which has all."""
    return divide(small_model(small_config((None,))), 1)


@pytest.mark.skipif(jax.__version_info__ < LEAST_VERSION, reason="kernels take no references yet")
def test_a_step_with_a_cache_sums_by_an_inbox():
    assert run("tests.models.sums_by_inbox") == "sums by inbox\n"


def test_it_is_a_decoder_of_its_family(divided):
    assert isinstance(divided, Decoder)
    assert (type(divided).__name__, divided.family_name) == ("ShardedDecoder", "Decoder")
    assert divided.shards == 1
    assert type(divided) is type(divide(small_model(small_config((None,))), 1))


def test_parts_of_the_share_are_parts_of_the_model(divided):
    assert divided.embedding is divided.share.embedding
    assert divided.head is divided.share.head
    assert divided.cache_scales is None
    with pytest.raises(AttributeError, match="has no attribute 'heads'"):
        _ = divided.heads


def test_whole_sequences_are_read(divided):
    tokens = np.array([[1, 2, 3]])
    expected = small_model(small_config((None,)))(tokens)
    np.testing.assert_allclose(divided(tokens), expected, rtol=1e-4, atol=1e-4)


def test_a_norm_over_all_heads_is_that_of_all_devices():
    model = sharded_families.build("Olmo2ForCausalLM")
    divided = divide(model, 1)
    norms = divided.share.layers[0].attention
    assert (norms.joint_axis, norms.joint_channels) == ("model", (4 * 32, 2 * 32))
    assert model.layers[0].attention.joint_axis is None
    tokens = np.array([[1, 2, 3]])
    np.testing.assert_allclose(divided(tokens), model(tokens), rtol=1e-4, atol=1e-4)


def test_arguments_are_checked_as_by_any_decoder(divided):
    with pytest.raises(ValueError, match="tokens must be from 0 to 49"):
        divided([[50]])
    with pytest.raises(ValueError, match="a sequence of 300 tokens would pass the 256 positions"):
        divided(np.zeros((1, 300), int))
    cache = divided.create_cache(1, 16, "KV16", 16)
    with pytest.raises(ValueError, match=r"counts are \[2\]: expected 0 to 1"):
        divided.step([[1]], [2], cache)


def test_a_step_for_one_device_has_no_collectives(divided):
    def lowered(model):
        cache, counts = model.create_cache(1, 16, "KV16", 16), np.ones(1, np.int32)
        step = jax.jit(lambda model, *given: model.step(*given))
        return step.lower(model, np.ones((1, 1), np.int32), counts, cache).as_text()

    marks = ("sdy.", "all_reduce", "all_gather", "shard_map")
    whole = lowered(small_model(small_config((None,))))
    assert not [mark for mark in marks if mark in whole]
    assert [mark for mark in marks if mark in lowered(divided)] == ["sdy.", "all_reduce"]


def test_the_shapes_of_a_share(divided):
    shapes = jax.tree.leaves(divided.share_shapes())
    assert [leaf.shape for leaf in shapes] == [leaf.shape for leaf in jax.tree.leaves(divided)]


def test_whole_arrays_are_joined_when_they_are_read(divided):
    whole = divided.whole()
    assert type(whole) is Decoder
    array = whole.embedding.get_value()
    assert (array.shape, array.size, array.nbytes, array.ndim) == ((50, 64), 3200, 12800, 2)
    require_same_arrays(small_model(small_config((None,))), whole)


def test_the_limit_of_positions_is_also_the_shares():
    model = divide(small_model(small_config((None,))), 1)
    model.limit_positions(300)
    assert model.config.max_position_embeddings == 300
    assert model.share.config.max_position_embeddings == 300
    assert model(np.zeros((1, 290), int)).shape == (1, 290, 50)  # the share checks it, too
    model.limit_positions(2)
    with pytest.raises(ValueError, match="3 tokens would pass the 2 positions"):
        model([[1, 2, 3]])
