from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mpjax.models import (
    ConfigError,
    DecoderConfig,
    GroupedQuerySpec,
    LayerSpec,
    RopeScaling,
    config_checks,
    llama_layers,
    presets,
)
from mpjax.models.config_checks import require_sound
from mpjax.models.per_layer import PerLayerSpec
from mpjax.models.streams import StreamsSpec

LAYERS = llama_layers((None, 32), 128)
SOUND = DecoderConfig(100, 64, 4, 2, 16, LAYERS, 512, stop_ids=(0, 99))
SCALING = RopeScaling("llama3", 8.0)


def test_sound_configurations():
    require_sound(SOUND)
    require_sound(dataclasses.replace(SOUND, rope_scaling=SCALING, rope_theta=10000))
    for value in vars(presets).values():
        if isinstance(value, DecoderConfig):
            require_sound(value)


@pytest.mark.parametrize(
    "field", [f.name for f in dataclasses.fields(SOUND) if f.type in ("int", "float", "bool")]
)
@pytest.mark.parametrize("value", [None, "1", -1, 0, [1], float("nan"), float("inf"), 10**400])
def test_each_number_and_switch_is_checked(field, value):
    wrong = dataclasses.replace(SOUND, **{field: value})
    with pytest.raises(ConfigError, match=f"^DecoderConfig: {field} is .*: expected ") as caught:
        require_sound(wrong)
    assert len(str(caught.value)) < 200


def swapped(layer: Any) -> Any:
    return LayerSpec(layer.mlp, layer.attention)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": ()}, "layers is empty"),
        ({"layers": (None,)}, r"layers\[0\] is None: expected a LayerSpec"),
        ({"layers": (LayerSpec(1, 2),)}, r"layers\[0\].attention is 1: expected a MixerSpec"),
        (
            {"layers": (swapped(LAYERS[0]),)},
            r"layers\[0\].attention is GatedMLPSpec\(.*: expected a Mixer",
        ),
        ({"stop_ids": (100,)}, r"stop_ids is \(100,\): expected token ids from 0 to 99"),
        ({"stop_ids": (1.0,)}, "stop_ids is"),
        ({"num_kv_heads": 3}, "num_heads is 4 and num_kv_heads 3: expected a multiple of it"),
        ({"head_dim": 15}, "head_dim is 15: expected a positive, even number"),
        ({"dtype": "float64"}, "dtype is 'float64': expected bfloat16 or float16 or float32"),
        ({"rope_scaling": {"kind": "linear"}}, "rope_scaling is .*: expected a RopeScaling"),
        (
            {"rope_scaling": RopeScaling("ntk", 2.0)},
            "rope_scaling: kind is 'ntk': expected linear",
        ),
        ({"rope_scaling": RopeScaling("linear", -2.0)}, "rope_scaling: factor is -2.0"),
        ({"rope_scaling": RopeScaling("llama3", 2.0, 5.0, 4.0)}, "high_frequency_factor is 4.0"),
        ({"rope_scaling": RopeScaling("llama3", 2.0, original_context=0)}, "original_context is 0"),
        (
            {"rope_scaling": RopeScaling("yarn", 2.0), "rope_theta": 1.0},
            "rope_theta is 1.0: expected another number than 1 with YaRN",
        ),
        (
            {"local_rope_scaling": RopeScaling("yarn", 2.0), "local_rope_theta": 1.0},
            "local_rope_theta is 1.0: expected another number than 1 with YaRN",
        ),
        ({"local_rope_scaling": RopeScaling("ntk", 2.0)}, "local_rope_scaling: kind is 'ntk'"),
        (
            {
                "rope_scaling": RopeScaling("dynamic", 2.0, original_context=32),
                "local_rope_scaling": RopeScaling("dynamic", 2.0, original_context=64),
            },
            "local_rope_scaling: original_context is 64: expected dynamic with 32",
        ),
        (
            {"rope_scaling": RopeScaling("dynamic", 2.0), "rotary_dim": 2},
            "rotary_dim is 2: expected 4 or more with dynamic scaling",
        ),
    ],
)
def test_what_does_not_fit_together(changes, message):
    with pytest.raises(ConfigError, match=message):
        require_sound(dataclasses.replace(SOUND, **changes))


@pytest.mark.parametrize(
    ("half", "field", "value"),
    [
        (half, field.name, value)
        for half in ("attention", "mlp")
        for field in dataclasses.fields(getattr(LAYERS[0], half))
        for value in ["1", -1, 0, [1], 2.5, 2**31]
        # These may have large numbers and fractions.
        if not (field.name in ("scale", "softcap", "growth") and value in (2.5, 2**31))
    ],
)
def test_each_field_of_a_layer_is_checked(half, field, value):
    spec = dataclasses.replace(getattr(LAYERS[1], half), **{field: value})
    layers = (LAYERS[0], dataclasses.replace(LAYERS[1], **{half: spec}))
    message = rf"^DecoderConfig, layers\[1\]\.{half}: {field} is .*: expected "
    with pytest.raises(ConfigError, match=message):
        require_sound(dataclasses.replace(SOUND, layers=layers))


def test_messages_name_the_source_and_its_own_names():
    wrong = dataclasses.replace(SOUND, num_heads=0)
    with pytest.raises(ConfigError, match=r"^a\.json: heads is 0: expected a positive integer$"):
        require_sound(wrong, "a.json", {"num_heads": "heads"})


def test_values_that_are_checked_are_given_back():
    assert config_checks.whole("a", "b", 3) == 3
    assert config_checks.whole("a", "b", 0, minimum=0) == 0
    assert config_checks.positive("a", "b", 0.5) == 0.5
    assert config_checks.switch("a", "b", False) is False
    assert config_checks.choice("a", "b", "x", ("x", "y")) == "x"
    assert config_checks.token_ids("a", "b", [3, 0], 4) == (3, 0)
    assert config_checks.token_ids("a", "b", 3, 4) == (3,)
    for check, value, expected in (
        (config_checks.whole, True, "a positive integer"),
        (config_checks.whole, 2**31, "at most 2147483647"),
        (config_checks.positive, float("nan"), "a positive number"),
        (config_checks.positive, 1e-200, r"a positive number from 1.2e-38 to 3.4e\+38, as float32"),
        (config_checks.positive, 10**39, r"a positive number from 1.2e-38 to 3.4e\+38, as float32"),
        (config_checks.switch, 1, "true or false"),
    ):
        with pytest.raises(ConfigError, match=f"^a: b is {value!r}: expected {expected}$"):
            check("a", "b", value)


NORMED = GroupedQuerySpec(qk_norm=True)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([{"heads": 4}], "heads is 4 and kv_heads None: expected both, or neither"),
        ([{"heads": 5, "kv_heads": 2}], "heads is 5: expected a multiple of the 2 kv_heads"),
        ([{"head_dim": 15}], "head_dim is 15: expected an even number"),
        ([{"head_dim": 8}, {}], r"layers\[1\]: head_dim is 16: expected 8, as in the other layers"),
        (
            [{"keys_as_values": True, "interleaved": True}],
            r"keys_as_values is .*: no such",
        ),
        ([{"value_norm": True, "norm_after": True}], r"value_norm is .*: no such"),
        ([{"reads_back": 1}], r"layers\[0\]: reads_back is 1: expected the distance of a layer"),
        ([{}, {"reads_back": 1, "window": 8}], r"layers\[1\]: reads_back is 1: expected the dist"),
        ([{}, {"reads_back": 1}, {"reads_back": 1}], r"layers\[2\]: reads_back is 1: expect"),
        ([{}, {"reads_back": 1, "growth": 0.5}], "reads_back is set: no such attention"),
    ],
)
def test_layers_that_do_not_fit_together(layers, message):
    """Such as those with heads of their own, and readers of another layer's keys and values."""
    specs = [dataclasses.replace(NORMED, **changes) for changes in layers]
    own = tuple(dataclasses.replace(LAYERS[0], attention=spec) for spec in specs)
    with pytest.raises(ConfigError, match=message):
        require_sound(dataclasses.replace(SOUND, layers=own))


def test_per_layer_embeddings_have_one_size():
    sizes = (PerLayerSpec(8), PerLayerSpec(16))
    layers = tuple(dataclasses.replace(LAYERS[0], per_layer=spec) for spec in sizes)
    with pytest.raises(ConfigError, match=r"per_layer of the layers is .*: expected one spec"):
        require_sound(dataclasses.replace(SOUND, layers=layers))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"norms": "pre"},
            "streams is .*: expected both norms, an attention, an mlp and no",
        ),
        ({"streams": StreamsSpec(2, 8, active=3)}, "active is 3: expected at most the 2 streams"),
    ],
)
def test_layers_of_several_streams(changes, message):
    layer = dataclasses.replace(LAYERS[0], norms="both", streams=StreamsSpec(2, 8))
    require_sound(dataclasses.replace(SOUND, layers=(layer,)))
    with pytest.raises(ConfigError, match=message):
        require_sound(dataclasses.replace(SOUND, layers=(dataclasses.replace(layer, **changes),)))
