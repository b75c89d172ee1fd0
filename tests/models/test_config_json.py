from __future__ import annotations

import re

import pytest

from mpjax.models import ConfigError, DecoderConfig, Llama, RopeScaling, llama_layers
from mpjax.models.config_json import (
    common_fields,
    flag,
    integer,
    layer_count,
    layer_windows,
    number,
    require,
    sliding_window,
)
from mpjax.models.rotary import yarn_attention_factor

HF = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "torch_dtype": "float16",
    "eos_token_id": [7, 8],
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


def without(key: str) -> dict:
    return {name: value for name, value in HF.items() if name != key}


LAYERS = llama_layers((None, None, None), 128)


def test_all_fields_are_read():
    assert Llama.config_from_hf(HF) == DecoderConfig(
        vocab_size=1000,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        layers=LAYERS,
        max_position_embeddings=4096,
        rope_theta=5e5,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        dtype="float16",
        stop_ids=(7, 8),
    )


def test_what_a_config_does_not_say_is_a_plain_llamas():
    plain = {"rope_theta": 1e4, "torch_dtype": "bfloat16", "tie_word_embeddings": False}
    read = Llama.config_from_hf(HF | plain | {"eos_token_id": None})
    needed = ("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "layers")
    needed += ("max_position_embeddings",)
    assert DecoderConfig(**{name: getattr(read, name) for name in needed}) == read


@pytest.mark.parametrize(
    "key",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_attention_heads",
        "num_hidden_layers",
    ],
)
def test_a_missing_key_is_named(key):
    with pytest.raises(ConfigError, match=f"config.json has no '{key}'"):
        Llama.config_from_hf(without(key))


@pytest.mark.parametrize(
    ("change", "field", "expected"),
    [
        ({"num_key_value_heads": None}, "num_kv_heads", 4),
        ({"head_dim": 128}, "head_dim", 128),
        ({"head_dim": None}, "head_dim", 16),
        ({"torch_dtype": None}, "dtype", "bfloat16"),
        ({"torch_dtype": "torch.bfloat16"}, "dtype", "bfloat16"),
        ({"dtype": "float32"}, "dtype", "float32"),
        ({"eos_token_id": 5}, "stop_ids", (5,)),
        ({"eos_token_id": None}, "stop_ids", ()),
        ({"eos_token_id": 0}, "stop_ids", (0,)),
    ],
)
def test_other_spellings(change, field, expected):
    assert common_fields(HF | change)[field] == expected


@pytest.mark.parametrize(
    ("key", "field", "expected"),
    [
        ("num_key_value_heads", "num_kv_heads", 4),
        ("rms_norm_eps", "rms_norm_eps", 1e-6),
        ("rope_theta", "rope_theta", 1e4),
        ("tie_word_embeddings", "tie_word_embeddings", False),
        ("max_position_embeddings", "max_position_embeddings", 2048),
        ("hidden_act", "dtype", "float16"),
    ],
)
def test_defaults_are_those_of_the_file_format(key, field, expected):
    assert getattr(Llama.config_from_hf(without(key)), field) == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
        ({"torch_dtype": "float64"}, "dtype 'float64' is not supported"),
        ({"rope_scaling": {"type": "ntk", "factor": 2.0}}, "rotary scaling 'ntk' is not supp"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "no 'factor'"),
        ({"rope_scaling": {"type": "linear"}}, "no 'factor'"),
        ({"rope_scaling": {"factor": 4.0}}, "rope_scaling has a factor and no rope_type"),
        ({"rope_parameters": {"factor": 4.0}}, "rope_parameters has a factor and no rope_type"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "no 'low_freq_factor'"),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": 1e6, "rope_type": "default"}}},
            "rope_parameters holds an object for each kind of layer",
        ),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear': expected an object"),
        ({"rope_parameters": [1]}, r"rope_parameters is \[1\]: expected an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25"),
        (
            {
                "rope_parameters": {"partial_rotary_factor": 0.25},
                "rope_scaling": {"type": "linear", "factor": 4.0, "partial_rotary_factor": 1.0},
            },
            "partial_rotary_factor is 0.25",
        ),
    ],
)
def test_what_is_not_supported_is_named(change, message):
    with pytest.raises(ConfigError, match=message):
        common_fields(HF | change)


LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize(
    ("keys", "theta", "scaling"),
    [
        ({"rope_theta": 1e6}, 1e6, None),
        ({"rope_theta": 1e6, "rope_scaling": None}, 1e6, None),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, 1e6, None),
        (
            {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2}},
            1e6,
            RopeScaling("linear", 2.0),
        ),
        (
            {"rope_theta": 5e5, "rope_scaling": LLAMA3 | {"rope_type": "llama3"}},
            5e5,
            RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
        ),
        (
            {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 5e5}},
            5e5,
            RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
        ),
        # Scaling that somebody added to a newer file counts, beside that file's theta.
        *(
            (
                {"rope_scaling": {key: "linear", "factor": 4.0}, "rope_parameters": newer},
                1e6,
                RopeScaling("linear", 4.0),
            )
            for key in ("type", "rope_type")
            for newer in (
                {"rope_theta": 1e6},
                {"rope_theta": 1e6, "rope_type": "default"},
                {"rope_theta": 1e6, "rope_type": "llama3"} | LLAMA3,
            )
        ),
        (
            {
                "rope_theta": 2e5,
                "rope_scaling": LLAMA3 | {"rope_type": "llama3"},
                "rope_parameters": {"rope_theta": 1e6, "rope_type": "default", "factor": 2.0},
            },
            2e5,
            RopeScaling("llama3", 8.0, 1.0, 4.0, 8192),
        ),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 4.0, "rope_theta": 3e5},
                "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"},
            },
            3e5,
            RopeScaling("linear", 4.0),
        ),
        (
            {"rope_scaling": {}, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
            1e4,
            RopeScaling("linear", 4.0),
        ),
    ],
)
def test_old_and_new_rotary_keys(keys, theta, scaling):
    fields = common_fields(without("rope_theta") | keys)
    assert (fields["rope_theta"], fields["rope_scaling"]) == (theta, scaling)


@pytest.mark.parametrize("key", ["type", "rope_type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_scaling_that_is_not_implemented_is_refused_wherever_it_stands(place, key):
    both = {
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }
    both[place] = both[place] | {key: "ntk"}
    with pytest.raises(ConfigError, match="rotary scaling 'ntk' is not supported"):
        common_fields(HF | both)


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        (None, 64),
        ({"type": "linear", "factor": 4.0}, 256),
        ({"type": "linear", "factor": 1.5}, 96),
        ({"type": "linear", "factor": 0.5}, 64),
        # A length that was multiplied already stays, as does the final one of llama3.
        ({"type": "linear", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
        ({"type": "linear", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        (LLAMA3 | {"rope_type": "llama3", "original_max_position_embeddings": 32}, 64),
    ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_the_context_grows_with_linear_scaling(key, scaling, positions):
    hf = HF | {"max_position_embeddings": 64, key: scaling}
    assert common_fields(hf)["max_position_embeddings"] == positions


def test_a_context_without_a_length_is_that_of_the_file_format():
    hf = without("max_position_embeddings") | {"rope_scaling": {"type": "linear", "factor": 2}}
    assert Llama.config_from_hf(hf).max_position_embeddings == 4096


@pytest.mark.parametrize("value", [-64, "64", 64.0, 2**31])
def test_a_context_that_is_no_length(value):
    scaling = {"rope_scaling": {"type": "linear", "factor": 2.0}}
    message = f"max_position_embeddings is {value!r}: expected a"
    with pytest.raises(ConfigError, match=re.escape(message)):
        common_fields(HF | scaling | {"max_position_embeddings": value})


@pytest.mark.parametrize("factor", [2**20, 1e38])
def test_a_context_that_is_scaled_beyond_int32(factor):
    with pytest.raises(
        ConfigError, match=r"rotary scaling makes .* times 4096 positions: expected"
    ):
        common_fields(HF | {"rope_scaling": {"type": "linear", "factor": factor}})


NO_NUMBERS = [0, -2.0, True, "8", float("inf"), float("nan"), [1]]


@pytest.mark.parametrize("value", NO_NUMBERS)
@pytest.mark.parametrize("key", LLAMA3)
def test_rotary_numbers_are_positive_and_finite(key, value):
    scaling = LLAMA3 | {"rope_type": "llama3", key: value}
    message = re.escape(f"config.json, rotary scaling: {key} is {value!r}: expected a positive")
    with pytest.raises(ConfigError, match=message):
        common_fields(HF | {"rope_scaling": scaling})
    if key == "factor":
        with pytest.raises(ConfigError, match=message):
            common_fields(HF | {"rope_scaling": {"type": "linear", key: value}})


@pytest.mark.parametrize("low", [5.0, 6.0])
def test_the_high_frequency_is_not_below_the_low_one(low):
    scaling = LLAMA3 | {"rope_type": "llama3", "low_freq_factor": low}
    message = "^config.json, rotary scaling: high_freq_factor is 4.0: expected at least "
    with pytest.raises(ConfigError, match=f"{message}low_freq_factor, {low}$"):
        Llama.config_from_hf(HF | {"rope_scaling": scaling})


@pytest.mark.parametrize("value", NO_NUMBERS)
@pytest.mark.parametrize("key", ["rope_theta", "rms_norm_eps"])
def test_other_numbers_are_positive_and_finite(key, value):
    message = re.escape(f"config.json: {key} is {value!r}: expected a positive number")
    with pytest.raises(ConfigError, match=message):
        common_fields(HF | {key: value})


@pytest.mark.parametrize("value", ["false", "", 0, 1, []])
@pytest.mark.parametrize(
    "key", ["tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"]
)
def test_switches_are_true_or_false(key, value):
    message = re.escape(f"config.json: {key} is {value!r}: expected true or false")
    for read in (common_fields, lambda hf: flag(hf, key)):
        with pytest.raises(ConfigError, match=message):
            read(HF | {key: value})
    without = Llama.config_from_hf(HF | {key: None})
    assert type(without.tie_word_embeddings) is bool
    assert without.layers == LAYERS
    assert without.tie_word_embeddings == (key != "tie_word_embeddings")


def test_windows_of_all_layers():
    assert layer_windows(HF, None) == (None, None, None)
    assert layer_windows(HF, 16) == (16, 16, 16)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert layer_windows(HF | {"layer_types": kinds}, 16) == (16, None, 16)


@pytest.mark.parametrize(
    "kinds", [["full_attention"], ["full_attention", "chunked", "chunked"], 3, [[1]] * 3, {"a": 1}]
)
def test_unknown_layer_types_are_refused(kinds):
    with pytest.raises(ConfigError, match="layer_types must list 3 of"):
        layer_windows(HF | {"layer_types": kinds}, 16)


def test_require():
    assert require({"a": 0}, "a") == 0
    with pytest.raises(ConfigError, match="no 'a'"):
        require({"a": None}, "a")


def test_integers():
    assert integer({"a": 3}, "a") == 3
    assert integer({"a": None}, "a", 5) == integer({}, "a", 5) == 5
    assert integer({"a": 0}, "a", minimum=0) == 0
    with pytest.raises(ConfigError, match=r"^config\.json has no 'a'"):
        integer({}, "a")
    for value in (0, -1, True, 1.0, "1", [1], {}):
        with pytest.raises(
            ConfigError,
            match=re.escape(f"config.json: a is {value!r}: expected a positive integer"),
        ):
            integer({"a": value}, "a", 5)
    with pytest.raises(ConfigError, match=r"a is -1: expected an integer from 0 on$"):
        integer({"a": -1}, "a", minimum=0)


def test_nothing_is_made_for_each_of_very_many_layers():
    assert layer_count({"num_hidden_layers": 10_000}) == 10_000
    hf = HF | {"num_hidden_layers": 10**8}
    for read in (Llama.config_from_hf, layer_count, lambda hf: layer_windows(hf, None)):
        with pytest.raises(ConfigError, match="num_hidden_layers is 100000000: expected at most 1"):
            read(hf)


def test_sliding_windows():
    assert sliding_window({"sliding_window": 3}) == 3
    assert sliding_window({"sliding_window": None}) is None
    assert sliding_window({}) is None
    with pytest.raises(
        ConfigError, match=r"sliding_window is 3\.0: expected a positive integer, or n"
    ):
        sliding_window({"sliding_window": 3.0})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"num_attention_heads": 6, "num_key_value_heads": 4},
            "num_attention_heads is 6 and num_key",
        ),
        ({"head_dim": 15}, r"head_dim is 15: expected a positive, even number"),
        (
            {"hidden_size": 60},
            r"head_dim \(hidden_size / num_attention_heads\) is 15: expected a pos",
        ),
        ({"num_attention_heads": 128}, r"head_dim \(hidden_size / num_attention_heads\) is 0"),
        ({"eos_token_id": 1000}, "eos_token_id is 1000: expected token ids from 0 to 999"),
        ({"eos_token_id": [7, True]}, r"eos_token_id is \[7, True\]: expected token ids"),
    ],
)
def test_values_that_contradict_others(change, message):
    with pytest.raises(ConfigError, match=f"^config.json: {message}"):
        Llama.config_from_hf(HF | change)


def test_yarn():
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}
    found = common_fields(HF | {"rope_parameters": rope, "max_position_embeddings": 4096})
    assert found["rope_scaling"] == RopeScaling(
        "yarn", 4.0, original_context=4096, attention_factor=yarn_attention_factor(4.0)
    )
    rope |= {"original_max_position_embeddings": 1024, "beta_fast": 16, "beta_slow": 2}
    rope |= {"truncate": False, "attention_factor": 1.5}
    assert common_fields(HF | {"rope_parameters": rope})["rope_scaling"] == RopeScaling(
        *("yarn", 4.0),
        original_context=1024,
        attention_factor=1.5,
        fast_turns=16.0,
        slow_turns=2.0,
        whole_channels=False,
    )
    rope = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5}
    scaling = common_fields(HF | {"rope_parameters": rope})["rope_scaling"]
    assert scaling.attention_factor == yarn_attention_factor(4.0) / yarn_attention_factor(4.0, 0.5)


def test_numbers_have_a_default():
    assert number(HF, "swiglu_limit", 7) == 7.0
    assert number(HF | {"swiglu_limit": 3}, "swiglu_limit", 7) == 3.0
    with pytest.raises(ConfigError, match="swiglu_limit is -1: expected a positive number"):
        number(HF | {"swiglu_limit": -1}, "swiglu_limit", 7)
