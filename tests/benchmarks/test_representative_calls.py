from __future__ import annotations

import jax
import pytest

from benchmarks import representative_calls
from benchmarks.representative_calls import CACHES, WEIGHTS, calls
from mpjax.kernels import KVFormat, WeightFormat, codes, device
from mpjax.kernels.kv_cache.codes import KEY_KINDS, VALUE_KINDS


def test_every_kind_of_codes_is_among_the_weights():
    kinds = {codes.of(WeightFormat.parse(text)) for text in WEIGHTS}
    assert kinds == set(codes.KINDS.values())


def test_every_kind_of_codes_is_among_the_caches_but_for_the_sizes_of_groups():
    formats = [KVFormat.parse(text) for text in CACHES]
    for kinds, found in (
        (KEY_KINDS, {str(format.keys) for format in formats}),
        (VALUE_KINDS, {str(format.values) for format in formats}),
    ):
        assert found == {name for name in kinds if "g" not in name}


def test_names_differ():
    names = [name for name, _ in calls()]
    assert len(set(names)) == len(names) > 300


@pytest.mark.parametrize(
    "kind", ["matmul", "dequantize", "triton", "gradient", "attention", "append", "route", "step"]
)
def test_arguments_are_shapes_with_which_the_function_can_be_traced(kind):
    name, make = next(call for call in calls() if call[0].startswith(kind))
    function, arguments = make()
    leaves = jax.tree.leaves(arguments)
    assert all(isinstance(leaf, representative_calls.Array) for leaf in leaves), name
    with device.described_as():
        assert jax.tree.leaves(jax.eval_shape(function, *arguments))
