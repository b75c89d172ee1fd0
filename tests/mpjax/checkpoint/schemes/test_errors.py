"""What is refused of a quantization_config and of a module's tensors, one case a line."""

from __future__ import annotations

import copy
import re

import ml_dtypes
import numpy as np
import pytest

from mpjax.checkpoint.schemes import fp8, gptq, registry
from mpjax.errors import CheckpointError
from tests.mpjax.checkpoint.schemes.modules import FORMS, GEMV, MODELOPT, NAME, NF4, STATE, state
from tests.mpjax.checkpoint.write_checkpoint import (
    AWQ,
    CACHE,
    FP8,
    GPTQ,
    HQQ,
    compressed_fp8,
    compressed_integers,
    hqq,
)

E4M3 = ml_dtypes.float8_e4m3fn
PACK, INT = compressed_integers(), compressed_integers("int-quantized")
BLOCKS, NVFP4 = compressed_fp8("block", "group"), FORMS["nvfp4"].config
AUTO = {"quant_method": "auto-round", "bits": 4, "group_size": 32}
MIXED = MODELOPT | {"quant_algo": "MIXED_PRECISION"}


def within(config, path, value):
    """A config with another value below its only group, at a path such as `weights.type`."""
    found = copy.deepcopy(config)
    node = found["config_groups"]["group_0"]
    *outer, last = path.split(".")
    for key in outer:
        node = node[key]
    node[last] = value
    return found


def groups(**others):
    """Groups of a mixture, each in a layout of its own."""
    return PACK | {"format": "mixed-precision", "config_groups": others}


GROUP = PACK["config_groups"]["group_0"]
LONG = "(" * 5000 + ")" * 5000
CONFIGS = [
    ({}, "quant_method None is not supported: load an AWQ, AWQ gemv, GPTQ, NVFP4, "),
    ({"quant_method": ["awq"]}, "GGUF or 16-bit checkpoint of the model (a 16-bit one can be"),
    ({"quant_method": "gguf"}, "'gguf' is that of a single file: load the .gguf file itself"),
    (AWQ | {"bits": 8}, "an AWQ checkpoint: bits is 8: only 4 bits are supported"),
    (AWQ | {"version": "marlin"}, "layout 'marlin' (AWQ version) is not supported"),
    (AWQ | {"group_size": 0}, "group_size is 0: expected a positive number, or -1"),
    (AWQ | {"zero_point": "no"}, "zero_point is 'no': expected true or false"),
    ({"quant_method": "awq", "bits": 4}, "has no group_size"),
    (GEMV | {"format": "gemm"}, "the layouts gemm, gemv (AWQ version and format) differ: exp"),
    (GPTQ | {"bits": 3}, "a GPTQ checkpoint: bits is 3: only 4 and 8 bits are supported"),
    (GPTQ | {"checkpoint_format": "gptq_p"}, "layout 'gptq_p' (checkpoint_format) is not supp"),
    (GPTQ | {"is_marlin_format": True}, "layout 'marlin'"),
    (GPTQ | {"checkpoint_format": "gptq", "format": "gptq_v2"}, "expected them to agree"),
    (GPTQ | {"pack_dtype": "int64"}, "pack_dtype is 'int64': only int32 words are supported"),
    (GPTQ | {"meta": "x"}, "meta is 'x': expected an object"),
    (GPTQ | {"dynamic": ["-:lm_head"]}, "expected a map of patterns"),
    (GPTQ | {"dynamic": {"-:(": {}}}, "dynamic rule '-:(' is not a regular expression"),
    (GPTQ | {"dynamic": {LONG: {}}}, "is not a regular expression"),
    (GPTQ | {"dynamic": {"+:.*": 8}}, "dynamic rule '+:.*' is 8: expected a map of settings"),
    (GPTQ | {"dynamic": {"+:.*": {"bits": 2}}}, "rule '+:.*': bits is 2: only 4 and 8"),
    (GPTQ | {"dynamic": {".*": {"format": "marlin"}}}, "sets format: only bits, group_size and"),
    (AUTO | {"packing_format": "auto_round:exllama"}, "packing_format is 'auto_round:exllama':"),
    (AUTO | {"data_type": "mx_fp"}, "data_type is 'mx_fp': expected 'int'"),
    (AUTO | {"extra_config": [1]}, "extra_config is [1]: expected an object"),
    (HQQ | {"quant_config": None}, "an HQQ checkpoint: quant_config is None: expected an object"),
    (hqq(axis=0), "axis is 0, groups along the output channels, which no format here has"),
    (hqq(nbits=2), "nbits is 2: only 4 and 8 are read"),
    (hqq(view_as_float=True), "view_as_float is True: expected False"),
    (
        HQQ | {"quant_config": HQQ["quant_config"] | {"zero_quant_params": {"nbits": 8}}},
        "checkpoints whose scales or zero points are quantised can't be read",
    ),
    (NF4 | {"load_in_8bit": True}, "load_in_8bit is true, which is not read: load the 16-bit"),
    (NF4 | {"bnb_4bit_quant_type": "int4"}, "bnb_4bit_quant_type is 'int4': expected 'nf4' or"),
    (NF4 | {"bnb_4bit_quant_storage": "bfloat16"}, "quant_storage is 'bfloat16': expected 'uint8'"),
    (FP8 | {"fmt": "e5m2"}, "an FP8 checkpoint: fmt is 'e5m2': expected 'e4m3'"),
    (FP8 | {"scale_fmt": "ue8m0"}, "scale_fmt is 'ue8m0': expected 'float'"),
    (FP8 | {"weight_block_size": [128, 64]}, "is [128, 64]: expected [128, 128]"),
    (BLOCKS | {"format": "dense"}, "format is 'dense': expected 'pack-quantized' or 'int-quant"),
    (BLOCKS | {"kv_cache_scheme": [8]}, "kv_cache_scheme is [8]: expected an object"),
    (BLOCKS | {"kv_cache_scheme": CACHE | {"type": "int"}}, "kv_cache_scheme: type is 'int': exp"),
    (BLOCKS | {"transform_config": {"R1": {}}}, "there is a transform_config"),
    (BLOCKS | {"config_groups": {}}, "config_groups is {}: expected a map of groups"),
    (within(BLOCKS, "input_activations", "dynamic"), "input_activations is 'dynamic': expected an"),
    (within(BLOCKS, "output_activations", {"num_bits": 8}), "output_activations"),
    (within(BLOCKS, "weights.num_bits", 4), "num_bits is 4: expected 8"),
    (within(BLOCKS, "weights.strategy", "group"), "strategy is 'group': expected 'channel'"),
    (PACK | {"ignore": "lm_head"}, "ignore is 'lm_head': expected a list of texts"),
    (within(PACK, "targets", []), "its targets name no module: expected Linear, or names of mod"),
    (within(PACK, "weights.num_bits", 3), "num_bits is 3: expected 4 or 8"),
    (within(PACK, "weights.type", "float"), "type is 'float': expected 'int'"),
    (within(PACK, "weights.strategy", "tensor"), "strategy is 'tensor': expected 'group'"),
    (within(PACK, "weights.group_size", 0), "group_size is 0: expected a positive number"),
    (within(PACK, "weights.actorder", "x"), "actorder is 'x': expected null"),
    (within(INT, "weights.num_bits", 4), "weights: num_bits is 4: expected 8"),
    (within(NVFP4, "weights.group_size", 32), "group_size is 32: expected 16"),
    *(
        (MODELOPT | {"quant_algo": name}, f"quant_algo is {name!r}: expected FP8,")
        for name in ("MXFP8", "W4A8_AWQ", None)
    ),
    (MIXED, "quantized_layers is None: expected the algorithm of each module"),
    (MIXED | {"quantized_layers": {"a": 1}}, "quantized_layers, 'a' is 1: expected an object"),
    (
        MIXED | {"quantized_layers": {"a": {"quant_algo": "W4A8_AWQ"}}},
        "quantized_layers, 'a': quant_algo is 'W4A8_AWQ'",
    ),
    (groups(a={"targets": ["Linear"]}), "group 'a' has no format of its own, as mixed-precision"),
]


@pytest.mark.parametrize(("config", "message"), CONFIGS, ids=[said[:40] for _, said in CONFIGS])
def test_configs(config, message):
    with pytest.raises(CheckpointError, match=re.escape(message)) as error:
        registry.read(config)
    assert len(str(error.value)) < 400


I32, F16, F32, U8 = np.int32, np.float16, np.float32, np.uint8
# The form of a module [K, N] = [64, 24], tensors that differ, and the message. None: removed.
TENSORS = [
    ("awq", {"qzeros": np.zeros((3, 3), I32)}, "qzeros is int32 [3, 3]: expected int32 [2, 3]"),
    ("awq", {"scales": np.zeros((8, 24), F16)}, "expected float16 or bfloat16 or float32 [2, 24]"),
    ("awq", {"qweight": np.zeros((8, 24), I32)}, "says quant_method 'awq', but the tensors are"),
    ("awq", {"qweight": None}, "has no tensor qweight"),
    ("gptq", {"scales": np.zeros((4, 24), F16)}, "scales is float16 [4, 24]: expected"),
    ("gptq", {"g_idx": np.zeros(64, F32)}, "g_idx is float32 [64]: expected int32 [64]"),
    ("gptq", {"g_idx": np.zeros(64, I32)}, "g_idx puts 64 channels in group 0: expected 32 chan"),
    ("gptq", {"qweight": np.zeros((64, 3), I32)}, "the tensors are packed as AWQ (qweight int32"),
    ("gptq-act-order", {"g_idx": None}, "has no tensor g_idx"),
    (
        "gptq",
        {"qweight": np.zeros((8, 12), I32), "scales": np.zeros((2, 12), F16)},
        "12 output channels: expected a multiple of 8",
    ),
    ("gemv", {"scales": np.zeros((24, 8), F16)}, "scales is float16 [24, 8]: expected float16 or"),
    ("gemv", {"qweight": np.zeros((24, 16), I32)}, "holds a weight of 128 input and 24 output"),
    ("gemv-fast", {"qweight": np.zeros((6, 96), np.int16)}, "96 input and 24 output channels: the"),
    ("pack", {"weight_packed": np.zeros((24, 8), U8)}, "weight_packed is uint8 [24, 8]: expected"),
    ("pack", {"weight_scale": np.zeros((24, 2), np.int8)}, "by num_bits 4 and group_size 32 in"),
    ("pack", {"weight_shape": np.array([24, 63])}, "weight_shape is [24, 63]: expected [24, 64],"),
    ("pack", {"weight_zero_point": np.zeros((3, 2), I32)}, "weight_zero_point, which by"),
    ("pack", {"weight_g_idx": np.zeros(64, I32)}, "weight_g_idx, which by actorder in config.json"),
    ("pack-zeros", {"weight_zero_point": None}, "weight_zero_point: expected int32 [3, 2]"),
    ("pack-act-order", {"weight_g_idx": None}, "no tensor weight_g_idx: expected int32 [64]"),
    ("pack-act-order", {"weight_g_idx": np.zeros(64, I32)}, "weight_g_idx puts 64 channels in"),
    ("int", {"weight": np.zeros((24, 64), U8)}, "weight is uint8 [24, 64]: expected int8 [24, 64]"),
    ("fp8", {"weight_scale_inv": np.zeros((3, 2), F32)}, "[3, 2]: expected float16 or bfloat16"),
    ("fp8", {"weight": np.zeros((24, 64), F16)}, "expected float8_e4m3fn [24, 64]"),
    ("fp8", {"weight": np.zeros(24, E4M3)}, "no tensor weight that is a matrix"),
    ("fp8", {"weight": np.full((24, 64), np.nan, E4M3)}, "weight has weights that are NaN"),
    (
        "fp8-one-scale",
        {"weight_scale": np.zeros((24, 1), F32)},
        "float32 [1], by quantization_config",
    ),
    ("fp8-static", {"input_scale": None}, "has no tensor input_scale: expected"),
    *(
        ("fp8-static", {"input_scale": np.full(1, value, F32)}, "expected a positive, finite scale")
        for value in (0, -1, np.inf, np.nan)
    ),
    ("modelopt-fp8", {"weight_scale": np.zeros(2, F32)}, "weight_scale is float32 [2]: expected"),
    ("nvfp4-modelopt", {"weight_scale": np.zeros((24, 2), E4M3)}, "is float8_e4m3fn [24, 2]:"),
    ("nvfp4-modelopt", {"weight_scale_2": np.array(np.nan, F32)}, "96 of the 96 scales are NaN or"),
    ("nvfp4-modelopt", {"weight": np.zeros((24, 4), U8)}, "a weight of 8 input and 24 output"),
    ("nf4", {STATE: np.frombuffer(b"{", U8)}, f"the quant_state of {NAME} is not valid JSON"),
    ("nf4", {STATE: state((24, 128))}, "has a state for 128 input and 24 output channels: the"),
    ("nf4", {STATE: state((24, 64), blocksize=128)}, "blocksize is 128: expected 64"),
    ("nf4", {"weight.absmax": np.zeros(3, F32)}, "weight.absmax is float32 [3]: expected"),
    ("nf4", {"weight.absmax": np.full(24, np.nan, F32)}, "24 of the 24 scales are NaN"),
    ("nf4-nested", {STATE: state((24, 64), nested_blocksize=0)}, "nested_blocksize is 0 and"),
    ("hqq", {"W_q": np.zeros((3, 32), U8)}, "W_q is uint8 [3, 32]: expected uint8 [24, 32]"),
    ("hqq", {"scale": np.zeros(48, F16)}, "scale is float16 [48]"),
    ("mxfp4", {"scales": None}, "has no tensor scales"),
    ("mxfp4", {"blocks": np.zeros((24, 3, 16), U8)}, "blocks is uint8 [24, 3, 16]: expected"),
]


@pytest.mark.parametrize(("form", "changes", "message"), TENSORS)
def test_tensors(form, changes, message, rng):
    tensors, _ = FORMS[form].module(rng, (64, 24))
    given = {key: array for key, array in (tensors | changes).items() if array is not None}
    reader = registry.read(FORMS[form].config).reader(NAME)
    given = {suffix: given[suffix] for suffix in reader.suffixes if suffix in given}
    with pytest.raises(CheckpointError, match=re.escape(message)) as error:
        reader.decode(given, NAME, (64, 24))
    assert NAME in str(error.value)


@pytest.mark.parametrize(
    ("form", "channels", "message"),
    [
        ("gemv-fast", 96, "96 input channels: expected a multiple of 64, which the layout"),
        ("hqq", 48, "48 input channels in groups of 32: expected groups of a multiple of 32 that"),
        ("nf4", 96, "96 input channels: expected a multiple of 64, the block of the checkpoint"),
    ],
)
def test_channels(form, channels, message, rng):
    tensors, _ = FORMS[form].module(rng, (192, 16))
    reader = registry.read(FORMS[form].config).reader(NAME)
    specs = {key: tensors[key] for key in reader.suffixes if key in tensors}
    if form == "gemv-fast":
        specs |= {"qweight": tensors["qweight"][:, :channels]}
    if form == "hqq":
        specs = {"W_q": np.zeros((12, 32), U8)} | dict.fromkeys(
            ("scale", "zero"), np.zeros((24, 1), F16)
        )
    if form == "nf4":
        specs |= {"weight": np.zeros((768, 1), U8), "weight.absmax": np.zeros(24, F32)}
    with pytest.raises(CheckpointError, match=message):
        reader.check(specs, NAME, (channels, 16))


def test_formats_that_no_weight_format_has():
    for config, channels, message in (
        (hqq(group_size=48), 128, "128 input channels in groups of 48: expected groups of"),
        (GEMV | {"group_size": -1, "version": "gemv_fast"}, 256, "groups of 256 .* load a 'gemm'"),
        (AWQ | {"group_size": 16}, 64, "groups of 16 input channels: supported are groups of 32"),
    ):
        with pytest.raises(CheckpointError, match=message):
            registry.read(config).reader(NAME).format(NAME, channels)
    reader = registry.read(FORMS["mxfp4"].config).reader("module")
    specs = {"blocks": np.zeros((5, 3, 16), U8), "scales": np.zeros((5, 3), U8)}
    with pytest.raises(CheckpointError, match="module has 90 input channels by"):
        reader.check(specs, "module", (90, 5))


def test_zero_points_that_contradict_the_config(rng):
    for form, key in (("awq", "zero_point"), ("gemv", "zero_point"), ("gptq", "sym")):
        says = {"zero_point": False} if key == "zero_point" else {"sym": True}
        tensors, _ = FORMS[form].module(rng, (64, 24))
        reader = registry.read(FORMS[form].config | says).reader(NAME)
        with pytest.raises(CheckpointError, match=rf"\({key}: .*\) all are 8: config.json is of"):
            reader.decode(tensors, NAME)
    del (tensors := FORMS["awq"].module(rng, (64, 24))[0])["qzeros"]
    with pytest.raises(CheckpointError, match="zero_point: false: AWQ's gemm layout always stores"):
        registry.read(AWQ | {"zero_point": False}).reader(NAME).decode(tensors, NAME)


def test_modules_of_which_config_json_does_not_speak(rng):
    methods = "'fp8' or 'compressed-tensors' or 'modelopt'"
    with pytest.raises(CheckpointError, match=rf"^up is an FP8 module .* quant_method {methods}:"):
        fp8.SCHEME.refuse_module("up", {"weight": np.zeros(1)}, None)
    for form, message in (
        ("gemv", r'packed as AWQ gemv .*, with "version": "gemv"'),
        ("gemv-fast", r"is an AWQ gemv module .* with another format"),
    ):
        tensors, _ = FORMS[form].module(rng, (64, 24))
        with pytest.raises(CheckpointError, match=message):
            registry.of_module(tensors).refuse_module(NAME, tensors, "awq")


@pytest.mark.parametrize(
    ("g_idx", "message"),
    [
        ([0, 0, 0, 1], "3 channels in group 0: expected 2 channels in each of the groups 0 to 1"),
        ([0, 0, 2, 2], "puts 2 channels in group 2"),
        ([-1, -1, 0, 0], "puts 2 channels in group -1"),
    ],
)
def test_groups_of_wrong_size(g_idx, message):
    with pytest.raises(CheckpointError, match=message):
        gptq.permutation_of(np.array(g_idx, np.int32), 2, NAME)
