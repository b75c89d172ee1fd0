from __future__ import annotations

import dataclasses

import pytest

from mpjax.models import ConfigError, DecoderConfig, RopeScaling, presets
from mpjax.models.config_checks import require_sound

SOUND = DecoderConfig(100, 64, 128, 4, 2, 16, (None, 32), 512, stop_ids=(0, 99))
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
    with pytest.raises(ConfigError, match=f"^{field} is .*: expected ") as caught:
        require_sound(wrong)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"windows": ()}, "windows is empty"),
        ({"windows": (None, -1)}, "a window of windows is -1"),
        ({"windows": (None, True)}, "a window of windows is True"),
        ({"stop_ids": (100,)}, r"stop_ids is \[100\]: expected token ids from 0 to 99"),
        ({"stop_ids": (1.0,)}, "stop_ids is"),
        ({"num_kv_heads": 3}, "4 heads of 16 channels for 3 KV heads"),
        ({"head_dim": 15}, "an even number of channels"),
        ({"dtype": "float64"}, "dtype is 'float64'"),
        ({"dtype": ["float32"]}, "dtype is"),
        ({"rope_scaling": {"kind": "linear"}}, "rope_scaling is .*: expected a RopeScaling"),
        ({"rope_scaling": RopeScaling("yarn", 2.0)}, "kind of rope_scaling is 'yarn'"),
        ({"rope_scaling": RopeScaling("linear", -2.0)}, "factor is -2.0"),
        ({"rope_scaling": RopeScaling("llama3", 2.0, 4.0, 4.0)}, "high_frequency_factor is 4.0"),
        ({"rope_scaling": RopeScaling("llama3", 2.0, original_context=0)}, "original_context is 0"),
    ],
)
def test_what_does_not_fit_together(changes, message):
    with pytest.raises(ConfigError, match=message):
        require_sound(dataclasses.replace(SOUND, **changes))
