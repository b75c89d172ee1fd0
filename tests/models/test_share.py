from __future__ import annotations

import dataclasses

import pytest

from mpjax.kernels.cutting import Run
from mpjax.models.attention import GroupedQuerySpec
from mpjax.models.config import MLPSpec
from mpjax.models.mlp import GatedMLPSpec
from mpjax.models.share import Cut, HeadShares, Share, divide_config, share_size
from tests.models.small import small_config

pytestmark = pytest.mark.any_version


def test_the_shares_of_an_axis_that_divides():
    assert [Share(i, 2).run(8, 4) for i in range(2)] == [Run(0, 4, 4), Run(4, 8, 4)]


def test_the_last_shares_of_an_axis_end_with_zeros():
    runs = [Share(i, 4).run(11008, 2816) for i in range(4)]
    assert runs[3] == Run(8448, 11008, 2816)
    assert Share(7, 8).run(768, 256) == Run(768, 768, 256)


@pytest.mark.parametrize(
    ("total", "count", "unit", "size"),
    [(14336, 8, 256, 1792), (11008, 2, 256, 5632), (11008, 2, 1, 5504), (768, 8, 256, 256)],
)
def test_shares_are_whole_units(total, count, unit, size):
    assert share_size(total, count, unit) == size


@pytest.mark.parametrize(
    ("heads", "kv_heads", "count", "queries", "keys"),
    [
        (8, 4, 2, ["0-4/4", "4-8/4"], ["0-2/2", "2-4/2"]),
        (6, 3, 2, ["0-4/4", "4-6/4"], ["0-2/2", "2-3/2"]),  # the last share ends with zeros
        (8, 2, 4, ["0-2/2", "2-4/2", "4-6/2", "6-8/2"], ["0-1/1", "0-1/1", "1-2/1", "1-2/1"]),
        (2, 1, 4, ["0-1/1", "1-2/1", "2-2/1", "2-2/1"], ["0-1/1", "0-1/1", "1-1/1", "1-1/1"]),
        (3, 3, 4, ["0-1/1", "1-2/1", "2-3/1", "3-3/1"], ["0-1/1", "1-2/1", "2-3/1", "3-3/1"]),
    ],
)
def test_heads_are_divided_with_the_keys_that_they_read(heads, kv_heads, count, queries, keys):
    shares = HeadShares(heads, kv_heads, count)
    runs = [shares.runs(number) for number in range(count)]
    assert [f"{run.begin}-{run.end}/{run.size}" for run, _ in runs] == queries
    assert [f"{run.begin}-{run.end}/{run.size}" for _, run in runs] == keys
    assert shares.local == (runs[0][0].size, runs[0][1].size)
    assert shares.holders == sum(run.begin == 0 < run.length for _, run in runs)


def test_devices_with_one_kv_head_need_equal_parts_of_its_heads():
    with pytest.raises(
        ValueError, match=r"40 heads for 8 heads of keys can't be divided among 16 devices: 2 dev"
    ):
        _ = HeadShares(40, 8, 16).local


def test_the_configuration_of_a_share():
    config = small_config(num_heads=4, num_kv_heads=2, intermediate_size=96)
    units = [{"mlp.down": 32}, {"mlp.down": 1}]
    local = divide_config(config, 2, units)
    assert (local.num_heads, local.num_kv_heads, local.vocab_size) == (2, 1, 50)
    assert [layer.mlp.intermediate_size for layer in local.layers] == [64, 48]
    assert local.hidden_size == config.hidden_size


def test_the_cuts_of_a_layer():
    config = small_config(head_dim=16)
    spec, mlp, share = GroupedQuerySpec(), GatedMLPSpec(intermediate_size=128), Share(1, 2)
    assert spec.cuts(config, spec, share) == {
        "qkv": Cut(outputs=(Run(32, 64, 32), Run(16, 32, 16), Run(16, 32, 16))),
        "output": Cut(inputs=Run(32, 64, 32)),
    }
    local = mlp.divide(2, {"down": 1})
    inner = Run(64, 128, 64)
    assert mlp.cuts(config, local, share) == {
        "gate_up": Cut(outputs=(inner, inner)),
        "down": Cut(inputs=inner),
    }


def test_a_layer_without_a_rule_is_refused():
    @dataclasses.dataclass(frozen=True)
    class Other(MLPSpec):
        kind = "other"

        def build(self, config, rngs):
            raise NotImplementedError

        def linear_maps(self, config):
            return ()

    with pytest.raises(ValueError, match="other layers can't be divided among devices: load the"):
        Other(8).divide(2, {})
    assert Other(8).cuts(small_config(), Other(8), Share(0, 1)) == {}
