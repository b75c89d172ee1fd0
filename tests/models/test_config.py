from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from mpjax.models import (
    AttentionSpec,
    ConfigError,
    DecoderConfig,
    GatedMLPSpec,
    GroupedQuerySpec,
    LayerSpec,
    MLPSpec,
)

LAYERS = (
    LayerSpec(GroupedQuerySpec(), GatedMLPSpec(128)),
    LayerSpec(GroupedQuerySpec(window=5, qk_norm=True), GatedMLPSpec(256, bias=True)),
)
CONFIG = DecoderConfig(100, 64, 4, 2, 16, LAYERS, 512)


def test_a_config_is_static():
    assert hash(CONFIG) == hash(dataclasses.replace(CONFIG))
    with pytest.raises(dataclasses.FrozenInstanceError):
        CONFIG.hidden_size = 1  # type: ignore[misc]


def test_what_follows_from_the_layers():
    assert CONFIG.num_layers == 2
    assert CONFIG.page_groups == (None, 5)
    assert CONFIG.groups == (0, 1)
    assert CONFIG.intermediate_size == 256


def test_lists_and_numbers_of_numpy_are_made_pythons():
    layer = LayerSpec(GroupedQuerySpec(np.int32(5)), GatedMLPSpec(np.int64(8), np.bool_(True)))
    config = DecoderConfig(np.int64(100), 64, 4, 2, 16, [layer], 512, np.float64(2.5))
    assert config == DecoderConfig(
        100, 64, 4, 2, 16, (LayerSpec(GroupedQuerySpec(5), GatedMLPSpec(8, True)),), 512, 2.5
    )
    assert type(config.vocab_size) is type(layer.mlp.intermediate_size) is int
    assert (type(layer.mlp.bias), type(config.rope_theta)) == (bool, float)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["layers", "stop_ids"])
def test_what_is_no_list_is_refused(name):
    with pytest.raises(ConfigError, match=f"^DecoderConfig: {name} is 3: expected a list$"):
        dataclasses.replace(CONFIG, **{name: 3})


@pytest.mark.parametrize("kind", [AttentionSpec, MLPSpec])
def test_a_kind_says_what_it_builds(kind):
    with pytest.raises(TypeError, match="abstract"):
        kind(8)
