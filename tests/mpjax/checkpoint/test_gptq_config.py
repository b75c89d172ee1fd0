from __future__ import annotations

import pytest

from mpjax.checkpoint.gptq_config import GPTQConfig
from mpjax.errors import CheckpointError

CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True}


def config(**changes):
    return GPTQConfig.from_config({**CONFIG, **changes})


def test_v1_is_the_default_format():
    assert config() == GPTQConfig(4, 128, "gptq", desc_act=True, symmetric=True)
    assert config(checkpoint_format=None).checkpoint_format == "gptq"


def test_what_is_not_said_of_symmetry_stays_open():
    assert config(sym=None).symmetric is None
    assert config(sym=False).symmetric is False


def test_spellings_of_gptqmodel():
    parsed = config(
        method="gptq",
        format="gptq_v2",
        checkpoint_format="gptq_v2",
        pack_dtype="int32",
        bits=8,
        group_size=-1,
    )
    assert parsed == GPTQConfig(8, None, "gptq_v2", desc_act=True, symmetric=True)
    assert config(format="gptq_v2").checkpoint_format == "gptq_v2"


def test_static_groups_may_stand_in_meta():
    assert config(meta={"static_groups": True}).static_groups
    assert config(static_groups=True).static_groups
    assert not config(static_groups=False, meta={"static_groups": True}).static_groups
    assert not config(meta={}).static_groups


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "awq"}, "quant_method is 'awq': expected 'gptq'"),
        ({"quant_method": "marlin"}, "quant_method is 'marlin': expected 'gptq'"),
        ({"bits": 2}, "bits is 2: only 4 and 8 bits are supported"),
        ({"bits": 3}, "bits is 3: only 4 and 8 bits are supported"),
        ({"bits": None}, "bits is None: expected an integer"),
        ({"group_size": True}, "group_size is True: expected an integer"),
        ({"checkpoint_format": "gptq_p"}, "layout 'gptq_p'.*only gptq and gptq_v2 are"),
        ({"checkpoint_format": "marlin"}, "layout 'marlin'"),
        ({"format": "bitblas"}, "layout 'bitblas'"),
        ({"is_marlin_format": True}, "layout 'marlin'"),
        ({"checkpoint_format": "gptq", "format": "gptq_v2"}, "expected them to agree"),
        ({"pack_dtype": "int64"}, "pack_dtype is 'int64': only int32 words are supported"),
        ({"group_size": -2}, "group_size is -2: expected a positive number, or -1"),
        ({"meta": "x"}, "meta is 'x': expected an object"),
        ({"dynamic": ["-:lm_head"]}, "dynamic is .*: expected a map of patterns"),
        ({"dynamic": {"-:(": {}}}, r"dynamic rule '-:\(' is not a regular expression"),
        ({"dynamic": {"+:.*": 8}}, "dynamic rule .* is 8: expected a map of settings"),
        ({"dynamic": {"+:.*": {"bits": 2}}}, "dynamic rule .*: bits is 2: only 4 and 8"),
        ({"dynamic": {".*": {"group_size": 0}}}, "dynamic rule .*: group_size is 0"),
        ({"dynamic": {".*": {"format": "marlin"}}}, "sets format: only bits, group_size and sym"),
        ({"sym": "true"}, "sym is 'true': expected true or false"),
        ({"dynamic": {".*": {"sym": 1}}}, "dynamic rule .*: sym is 1: expected true or false"),
    ],
)
def test_config_errors(changes, message):
    with pytest.raises(CheckpointError, match=message):
        config(**changes)


def test_the_first_dynamic_rule_that_matches_counts():
    parsed = config(
        dynamic={
            r"-:model\.layers\.0\..*": {},
            r"+:.*\.down_proj": {"bits": 8, "damp_percent": 0.1},
            r".*\.mlp\..*": {"group_size": 32},
            r"model\.layers\.2\..*": {"bits": 8, "group_size": -1, "sym": False},
        }
    )
    assert parsed.for_module("model.layers.0.mlp.down_proj") is None
    down = parsed.for_module("model.layers.1.mlp.down_proj")
    assert (down.bits, down.group_size, down.desc_act) == (8, 128, True)
    up = parsed.for_module("model.layers.2.mlp.up_proj")
    assert (up.bits, up.group_size, up.symmetric) == (4, 32, True)
    query = parsed.for_module("model.layers.2.self_attn.q_proj")
    assert (query.bits, query.group_size, query.symmetric) == (8, None, False)
    assert parsed.for_module("model.layers.3.self_attn.q_proj") is parsed


def test_patterns_match_from_the_start_of_the_path():
    parsed = config(dynamic={"-:mlp": {}})
    assert parsed.for_module("model.layers.0.mlp.up_proj") is parsed
    assert parsed.for_module("mlp.up_proj") is None


def test_switches_are_true_or_false():
    """`"false"` is no act-order, and must not be read as one."""
    for key in ("desc_act", "static_groups", "is_marlin_format"):
        with pytest.raises(CheckpointError, match=f"{key} is 'false': expected true or false"):
            GPTQConfig.from_config(CONFIG | {key: "false"})
    in_meta = CONFIG | {"meta": {"static_groups": True}}
    assert GPTQConfig.from_config(in_meta).static_groups
    assert GPTQConfig.from_config(in_meta | {"static_groups": None}).static_groups
    assert not GPTQConfig.from_config(in_meta | {"static_groups": False}).static_groups


@pytest.mark.parametrize("pattern", ["a(", "a{99999999999}", "(" * 5000 + ")" * 5000])
def test_patterns_that_no_module_can_match(pattern):
    with pytest.raises(
        CheckpointError, match=r"dynamic rule .* is not a regular expression"
    ) as error:
        GPTQConfig.from_config(CONFIG | {"dynamic": {pattern: {}}})
    assert len(str(error.value)) < 300
