from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mpjax.kernels import WeightFormat, quantize
from mpjax.models import Decoder, ExpertsSpec, GptOss, Phi3
from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import DecoderConfig, LayerSpec
from mpjax.models.division import Division, Part
from mpjax.models.qwen_moe import Qwen2MoE
from mpjax.models.window import Window
from tests.models.small import small_config
from tests.sweeps import in_sweep

CONFIG = small_config((None,), qkv_bias=True, qk_norm=True, head_dim=32, num_kv_heads=2)
QKV, OUTPUT, GATE_UP, DOWN = Decoder.linear_places(CONFIG)


def division(count: int, format: str | None = None) -> Division:
    formats = [format and WeightFormat.parse(format)]
    return Division.of(Decoder, CONFIG, count, {place.path: formats for place in (OUTPUT, DOWN)})


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 8])
def test_tables_are_divided_by_token_ids_and_joined(count):
    found, place = division(count), Decoder.array_places(CONFIG)[0]
    table = random(50, 64)
    shares = [found.cut_array(place, table, number) for number in range(count)]
    assert {share.shape for share in shares} == {(-(-50 // count), 64)}
    np.testing.assert_array_equal(found.join_array(place, shares), table)


def test_norms_are_everybodys():
    found = division(2)
    for place in Decoder.array_places(CONFIG)[1:-1]:
        array = random(*place.shape)
        shares = [found.cut_array(place, array, number) for number in range(2)]
        assert all(share is array for share in shares)
        assert found.join_array(place, shares) is array


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize("count", [2, 3, 4, 8])
def test_queries_keys_and_values_are_cut_each_by_itself(joint, count):
    found = division(count)
    sizes = [outputs for _, outputs in QKV.shapes]
    whole = [Part(random(64, size), random(size)) for size in sizes]
    if joint:
        kernel = np.concatenate([part.kernel for part in whole], 1)
        whole = [Part(kernel, np.concatenate([part.bias for part in whole]))]
    shares = [found.cut_linears(QKV, whole, number) for number in range(count)]
    local = found.local
    width = (local.num_heads + 2 * local.num_kv_heads) * 32
    assert all(sum(part.bias.size for part in share) == width for share in shares)
    joined = found.join_linears(QKV, shares, [None] * len(whole))
    for part, expected in zip(joined, whole, strict=True):
        np.testing.assert_array_equal(part.kernel, expected.kernel)
        np.testing.assert_array_equal(part.bias, expected.bias)


@pytest.mark.parametrize("joint", [True, False])
@pytest.mark.parametrize(("count", "numbers"), [(2, (1,)), (4, (0, 1)), (8, (6, 7))])
def test_shares_of_windows_are_those_of_whole_maps(joint, count, numbers):
    found = division(count)
    whole = [Part(random(64, outputs), random(outputs)) for _, outputs in QKV.shapes]
    windows = found.windows(QKV, numbers)
    read = [
        Part(part.kernel[:, begin:end], part.bias[begin:end])
        for part, (_, begin, end, _) in zip(whole, windows, strict=True)
    ]
    if joint:
        read, whole = [joined(read)], [joined(whole)]
    for number in numbers:
        share = found.cut_linears(QKV, read, number, windows)
        expected = found.cut_linears(QKV, whole, number)
        for part, other in zip(share, expected, strict=True):
            np.testing.assert_array_equal(part.kernel, other.kernel)
            np.testing.assert_array_equal(part.bias, other.bias)


def joined(parts: list[Part]) -> Part:
    kernel = np.concatenate([part.kernel for part in parts], -1)
    return Part(kernel, np.concatenate([part.bias for part in parts]))


def test_windows_of_rows_and_of_a_table():
    found, kernel = division(4), random(128, 64)
    [window] = found.windows(DOWN, (2, 3))
    assert window == Window(True, 64, 128)
    [part] = found.cut_linears(DOWN, [Part(kernel[64:])], 2, [window])
    np.testing.assert_array_equal(part.kernel, kernel[64:96])
    embedding, norm, *_ = Decoder.array_places(CONFIG)
    table, rows = random(50, 64), found.rows(embedding, (2, 3))
    assert rows == Window(False, 26, 50)
    share = found.cut_array(embedding, table[26:], 3, rows.begin)
    np.testing.assert_array_equal(share, found.cut_array(embedding, table, 3))
    assert found.rows(norm, (2, 3)) is None


def test_the_first_share_has_the_first_heads_of_queries_keys_and_values():
    kernel = np.broadcast_to(np.arange(256, dtype=np.float32), (64, 256))  # 4, 2 and 2 heads
    [share] = division(2).cut_linears(QKV, [Part(kernel, None)], 0)
    expected = [*range(64), *range(128, 160), *range(192, 224)]
    np.testing.assert_array_equal(share.kernel[0], expected)


def test_rows_are_divided_and_their_bias_is_everybodys():
    found, whole = division(2), [Part(random(128, 64), random(64))]
    assert [found.is_divided_along_inputs(place) for place in (QKV, OUTPUT, GATE_UP, DOWN)] == [
        *(False, True, False, True)
    ]
    shares = [found.cut_linears(DOWN, whole, number) for number in range(2)]
    assert shares[1][0].bias is whole[0].bias
    [joined] = found.join_linears(DOWN, shares, [None])
    np.testing.assert_array_equal(joined.kernel, whole[0].kernel)


def test_scales_of_heads_that_are_not_there_are_ones():
    found = dataclasses.replace(division(3), config=dataclasses.replace(CONFIG, num_kv_heads=4))
    scales = random(1, 2, 4)
    shares = [found.cut_cache_scales(scales, number) for number in range(3)]
    np.testing.assert_array_equal(shares[1], scales[:, :, 2:])
    np.testing.assert_array_equal(shares[2], np.ones((1, 2, 2)))
    np.testing.assert_array_equal(found.join_cache_scales(shares), scales)


def test_intermediate_channels_are_cut_where_the_format_can_be():
    assert division(2).local.intermediate_size == 64
    assert division(2, "uint4:g32").local.intermediate_size == 128


def test_a_format_that_can_not_be_cut_is_refused_before_anything_is_read():
    with pytest.raises(
        ValueError, match=r"^layers\.0\.attention\.output for 4 devices: 128 input channels of a l"
    ):
        division(4, "liquid4:g64/int8")


def test_an_array_without_a_rule_is_refused(monkeypatch):
    """Such as a norm over the channels of all heads, which would need a sum over devices."""

    @dataclasses.dataclass(frozen=True)
    class Spec(GroupedQuerySpec):
        def arrays(self, config):
            return {"query_norm.weight": (config.num_heads,)}

    layers = (LayerSpec(Spec(), CONFIG.layers[0].mlp),)
    config = dataclasses.replace(CONFIG, layers=layers)
    formats = {DOWN.path: [None], OUTPUT.path: [None]}
    with pytest.raises(ValueError, match=r"query_norm\.weight \[4\] can't be divided among 2 dev"):
        Division.of(Decoder, config, 2, formats)


def unpacked(family: type[Decoder], config: DecoderConfig) -> Division:
    """The division of a plain model of a family among two devices."""
    formats = {place.path: [None] for place in family.linear_places(config)}
    return Division.of(family, config, 2, formats)


@pytest.mark.parametrize("path", ["layers.0.attention.qkv", "layers.0.mlp.gate_up"])
def test_maps_that_files_hold_as_one_are_cut_each_by_itself(path):
    """Phi-3 has them so."""
    found = unpacked(Phi3, CONFIG)
    families = Phi3.linear_places(CONFIG), Decoder.linear_places(CONFIG)
    joint, apart = (next(p for p in places if p.path == path) for places in families)
    assert len(joint.shapes) == 1 < len(apart.shapes)
    whole = random(64, joint.shapes[0][1])
    ends = np.cumsum([outputs for _, outputs in apart.shapes])[:-1]
    halves = [np.split(each, 2, 1) for each in np.split(whole, ends, 1)]
    shares = [found.cut_linears(joint, [Part(whole)], number) for number in range(2)]
    [window] = found.windows(joint, (1,))
    assert window.begin > 0
    [part] = found.cut_linears(joint, [Part(whole[:, window.begin :])], 1, [window])
    np.testing.assert_array_equal(part.kernel, shares[1][0].kernel)
    for number, [share] in enumerate(shares):
        expected = np.concatenate([each[number] for each in halves], 1)
        np.testing.assert_array_equal(share.kernel, expected)
    [joined] = found.join_linears(joint, shares, [None])
    np.testing.assert_array_equal(joined.kernel, whole)


def test_experts_maps_that_files_hold_as_one_are_cut_each_by_itself():
    """gpt-oss has them so, with sinks of each query head."""
    mlp = ExpertsSpec(64, num_experts=4, bias=True, joint_files=True)
    layers = (LayerSpec(GroupedQuerySpec(sinks=True), mlp),)
    config = dataclasses.replace(CONFIG, layers=layers)
    found = unpacked(GptOss, config)
    [place] = (p for p in GptOss.linear_places(config) if p.path.endswith("gate_up"))
    whole = Part(random(4, 64, 128), random(4, 128))
    shares = [found.cut_linears(place, [whole], number) for number in range(2)]
    for number, [share] in enumerate(shares):
        begin = 32 * number
        columns = [*range(begin, begin + 32), *range(64 + begin, 96 + begin)]
        np.testing.assert_array_equal(share.kernel, whole.kernel[..., columns])
        np.testing.assert_array_equal(share.bias, whole.bias[..., columns])
    [joined] = found.join_linears(place, shares, [None])
    np.testing.assert_array_equal(joined.kernel, whole.kernel)
    [sinks] = (p for p in GptOss.array_places(config) if p.path.endswith("sinks"))
    pieces = [found.cut_array(sinks, random(4), number) for number in range(2)]
    np.testing.assert_array_equal(pieces[1], random(4)[2:])
    np.testing.assert_array_equal(found.join_array(sinks, pieces), random(4))


@pytest.mark.parametrize("count", [2, *map(in_sweep, (4, 8))])
def test_11008_channels_are_cut_into_whole_blocks(count):
    """Which are 43 blocks of 256 channels: the last devices have zeros behind theirs."""
    config = small_config((None,), intermediate_size=11008)
    kernel = quantize(jnp.asarray(random(11008, 64)), "uint4:g128")
    found = Division.of(Decoder, config, count, {DOWN.path: [kernel.format]})
    [down] = (p for p in Decoder.linear_places(config) if p.path == DOWN.path)
    shares = [found.cut_linears(down, [Part(kernel)], number) for number in range(count)]
    size = -(-43 // count) * 256
    assert {share.kernel.shape for [share] in shares} == {(size, 64)}
    every = np.concatenate([share.kernel.dequantize() for [share] in shares])
    np.testing.assert_array_equal(every[:11008], kernel.dequantize())
    assert not every[11008:].any()
    [joined] = found.join_linears(down, shares, [kernel.format])
    for one, other in zip(jax.tree.leaves(joined.kernel), jax.tree.leaves(kernel), strict=True):
        np.testing.assert_array_equal(one, other)


def test_experts_are_whole_where_they_are_spread():
    """Three devices of five experts: two, two and one."""
    layers = (LayerSpec(GroupedQuerySpec(), ExpertsSpec(64, num_experts=5, bias=True)),)
    config = dataclasses.replace(CONFIG, layers=layers)
    places = Qwen2MoE.linear_places(config)
    formats = {place.path: [None] for place in places}
    found = Division.of(Qwen2MoE, config, 3, formats, "whole")
    [place] = (place for place in places if place.path.endswith("gate_up"))
    assert found.is_spread(place)
    assert not found.is_spread(places[0])
    whole = Part(random(5, 64, 128), random(5, 128))
    shares = [found.cut_linears(place, [whole], number) for number in range(3)]
    for number, [share] in enumerate(shares):
        assert share.kernel.shape == (2, 64, 128)
        mine = slice(2 * number, 2 * number + 2)
        length = len(whole.kernel[mine])
        np.testing.assert_array_equal(share.kernel[:length], whole.kernel[mine])
        np.testing.assert_array_equal(share.bias[:length], whole.bias[mine])
        np.testing.assert_array_equal(share.kernel[length:], 0.0)
    windows = found.windows(place, (1, 2))
    assert windows == [Window(False, 2, 5, is_of_experts=True)] * 2
    some = Part(whole.kernel[2:], whole.bias[2:])
    [again] = found.cut_linears(place, [some], 2, windows)
    np.testing.assert_array_equal(again.kernel, shares[2][0].kernel)
    [joined] = found.join_linears(place, shares, [None])
    np.testing.assert_array_equal(joined.kernel, whole.kernel)
    np.testing.assert_array_equal(joined.bias, whole.bias)


def test_a_model_without_experts_has_none_to_spread():
    with pytest.raises(ValueError, match="experts is 'whole', and the model has no experts: leave"):
        Division.of(Decoder, CONFIG, 2, {}, "whole")
