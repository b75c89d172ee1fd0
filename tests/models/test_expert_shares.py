from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import quantize
from mpjax.models import ExpertsSpec
from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import LayerSpec
from mpjax.models.division import Division, Part
from mpjax.models.expert_shares import ExpertShares
from mpjax.models.qwen_moe import Qwen2MoE
from tests.models.small import small_config

LAYERS = (LayerSpec(GroupedQuerySpec(), ExpertsSpec(64, num_experts=5, bias=True)),)
CONFIG = dataclasses.replace(small_config((None,)), layers=LAYERS)
PLACES = Qwen2MoE.linear_places(CONFIG)
*_, GATE_UP, DOWN = (place for place in PLACES if place.path.endswith(("gate_up", "down")))


def division(experts: str) -> Division:
    formats = {place.path: [None] for place in PLACES}
    return Division.of(Qwen2MoE, CONFIG, 3, formats, experts)


def all_experts(rng, place) -> Part:
    inputs, outputs = place.part_shapes(1)[0][1:]
    return Part(rng.standard_normal((5, inputs, outputs)), rng.standard_normal((5, outputs)))


def some(part: Part, begin: int, end: int) -> Part:
    return jax.tree.map(lambda array: array[begin:end], part)


@pytest.mark.parametrize("experts", ["divided", "whole"])
@pytest.mark.parametrize("place", [GATE_UP, DOWN])
def test_pieces_make_the_shares_of_all_experts(experts, place, rng):
    """Three devices, of which the second has experts of two pieces if they are whole."""
    rules = division(experts)
    whole = jax.tree.map(np.float32, all_experts(rng, place))
    shares = ExpertShares(rules, place, dict.fromkeys(range(3), jax.devices()[0]))
    for begin, end in ((0, 3), (3, 5)):
        shares.put(some(whole, begin, end))
    for number in range(3):
        [expected] = rules.cut_linears(place, [whole], number)
        jax.tree.map(np.testing.assert_array_equal, shares.part(number, shares.format), expected)


@pytest.mark.parametrize("experts", ["divided", "whole"])
def test_a_process_puts_its_windows(experts, rng):
    rules = division(experts)
    whole = jax.tree.map(np.float32, all_experts(rng, GATE_UP))
    windows = rules.windows(GATE_UP, (1, 2))
    first = windows[0]
    here, pieces = whole, ((0, 2), (2, 5))
    if first.is_of_experts:
        here, pieces = some(whole, first.begin, first.end), ((0, 1), (1, 3))
    else:
        halves = [np.s_[..., 64 * i + w.begin : 64 * i + w.end] for i, w in enumerate(windows)]
        here = jax.tree.map(lambda x: np.concatenate([x[half] for half in halves], -1), whole)
    shares = ExpertShares(rules, GATE_UP, dict.fromkeys((1, 2), jax.devices()[0]), windows)
    for begin, end in pieces:
        shares.put(some(here, begin, end))
    for number in (1, 2):
        [expected] = rules.cut_linears(GATE_UP, [whole], number)
        jax.tree.map(np.testing.assert_array_equal, shares.part(number, None), expected)


def test_zero_points_of_one_piece_make_all_have_them(rng):
    kernel = jnp.asarray(rng.standard_normal((2, 64, 128)), jnp.float32)
    shares = ExpertShares(division("whole"), GATE_UP, {0: jax.devices()[0]})
    for format in ("uint4:g32:sym", "uint4:g32"):
        shares.put(Part(quantize(kernel[:1], format)))
    assert str(shares.format) == str(shares.part(0, shares.format).kernel.format) == "uint4:g32"
    other = Part(quantize(kernel[:1], "uint8:g32"))
    with pytest.raises(ValueError, match=r"experts\.2\.gate_proj is uint8:g32 .* expected one"):
        shares.put(other)
