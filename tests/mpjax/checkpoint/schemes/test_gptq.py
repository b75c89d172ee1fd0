from __future__ import annotations

import dataclasses

import jax
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpjax.checkpoint.schemes import gptq
from mpjax.checkpoint.schemes.gptq import GPTQScheme
from mpjax.errors import CheckpointError
from mpjax.kernels import WeightFormat
from tests.mpjax.checkpoint.packers import pack_gptq
from tests.mpjax.checkpoint.schemes.plain import random_plain

CONFIG = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
NAME = "model.layers.0.mlp.down_proj"
ROWS, COLUMNS, GROUP_SIZE = 64, 24, 32


def config(**changes):
    return GPTQScheme.from_config({**CONFIG, **changes})


def random_module(bits=4, group_size=GROUP_SIZE, act_order=False, seed=0, scale_dtype=np.float16):
    """Tensors of random bits: every 32-bit word is a valid vector."""
    rng = np.random.default_rng(seed)
    groups = ROWS // group_size
    g_idx = np.arange(ROWS, dtype=np.int32) // group_size

    def words(*shape):
        return rng.integers(-(2**31), 2**31, shape, dtype=np.int32)

    return {
        "qweight": words(ROWS * bits // 32, COLUMNS),
        "qzeros": words(groups, COLUMNS * bits // 32),
        "scales": rng.uniform(0.01, 0.1, (groups, COLUMNS)).astype(scale_dtype),
        "g_idx": rng.permutation(g_idx) if act_order else g_idx,
    }


def code(tensors, bits, k, n):
    """Element k is bits [k b, k b + b) of the little-endian bit stream of column n."""
    word = int(tensors["qweight"][k * bits // 32, n]) % 2**32
    return (word >> (k * bits % 32)) % 2**bits


def zero(tensors, bits, version, g, n):
    """Element n of row g's bit stream, once each word of a v1 file has got its ones back."""
    word = int(tensors["qzeros"][g, n * bits // 32])
    if version == 1:
        word += {4: 0x11111111, 8: 0x01010101}[bits]
    return ((word % 2**32) >> (n * bits % 32)) % 2**bits


def dequantized(tensors, bits, version):
    weight = np.empty((ROWS, COLUMNS), np.float64)
    for k in range(ROWS):
        g = int(tensors["g_idx"][k])
        for n in range(COLUMNS):
            difference = code(tensors, bits, k, n) - zero(tensors, bits, version, g, n)
            weight[k, n] = difference * float(tensors["scales"][g, n])
    return weight


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("act_order", [False, True])
def test_dequantized_weight_equals_the_format_description(bits, version, act_order):
    tensors = random_module(bits, act_order=act_order, seed=bits + version)
    parsed = config(
        bits=bits, desc_act=act_order, checkpoint_format=["gptq", "gptq_v2"][version - 1]
    )
    linear = parsed.decode(tensors, NAME)
    assert (linear.permutation is not None) == act_order
    assert linear.codes.dtype == np.uint8
    assert linear.zeros.dtype == np.uint16
    assert (linear.shape, linear.format) == ((ROWS, COLUMNS), WeightFormat(f"uint{bits}", 32))
    np.testing.assert_array_equal(linear.dequantize(), dequantized(tensors, bits, version))


@pytest.mark.parametrize("scale_dtype", [ml_dtypes.bfloat16, np.float32])
def test_scales_keep_the_dtype_of_the_file(scale_dtype):
    tensors = random_module(scale_dtype=scale_dtype)
    linear = config().decode(tensors, NAME)
    assert linear.scales.dtype == scale_dtype
    np.testing.assert_array_equal(linear.scales, tensors["scales"])


def test_zero_points_of_v1_by_hand():
    # Written zero points, lowest field first: 0, 3, 0, 15, 1, 8, 0, 0. In one subtraction of
    # 0x11111111 the zeros borrow, and the last borrow leaves the word.
    written = [0, 3, 0, 15, 1, 8, 0, 0]
    word = sum(value << 4 * i for i, value in enumerate(written))
    stored = (word - 0x11111111) % 2**32
    assert [(stored >> 4 * i) % 16 for i in range(8)] == [15, 1, 15, 13, 0, 7, 15, 14]
    tensors = {
        "qweight": np.zeros((1, 8), np.int32),
        "qzeros": np.array([[stored]], np.uint32).view(np.int32),
        "scales": np.ones((1, 8), np.float16),
    }
    linear = config(group_size=-1).decode(tensors, NAME)
    np.testing.assert_array_equal(linear.zeros, [written])


def test_symmetric_zero_points_of_v1():
    tensors = random_module()
    tensors["qzeros"] = np.full_like(tensors["qzeros"], 0x77777777)
    linear = config(sym=True).decode(tensors, NAME)
    np.testing.assert_array_equal(linear.zeros, np.full((2, COLUMNS), 8))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("said", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("stored", [1, 2])
@pytest.mark.parametrize("sym", [True, None])
def test_the_zero_points_of_a_symmetric_weight_say_how_they_are_stored(bits, said, stored, sym):
    tensors = random_module(bits)
    word = {4: "77777777", 8: "7f7f7f7f"} if stored == 1 else {4: "88888888", 8: "80808080"}
    fields = np.frombuffer(bytes.fromhex(word[bits]), np.int32)
    tensors["qzeros"] = np.broadcast_to(fields, tensors["qzeros"].shape)
    parsed = config(bits=bits, checkpoint_format=said, sym=sym)
    decode = jax.jit(lambda arrays: parsed.decode(arrays | {"g_idx": g_idx}, NAME).zeros)
    g_idx = tensors.pop("g_idx")
    middle = np.full((2, COLUMNS), 2 ** (bits - 1))
    np.testing.assert_array_equal(decode(tensors), middle)
    linear = parsed.decode(tensors | {"g_idx": g_idx}, NAME)
    np.testing.assert_array_equal(linear.zeros, middle)
    # Where the file says that they are not symmetric, they are what it says.
    parsed = config(bits=bits, checkpoint_format=said, sym=False)
    beside = {("gptq", 2): 1, ("gptq_v2", 1): -1}.get((said, stored), 0)
    linear = parsed.decode(tensors, NAME)
    np.testing.assert_array_equal(linear.zeros, middle + beside)


@pytest.mark.parametrize("said", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_that_contradict_a_symmetric_config(said, bits):
    tensors = random_module(bits)
    usual = np.full((2, COLUMNS), 2 ** (bits - 1))
    for zeros in (np.where(np.arange(COLUMNS) == 3, 5, usual), usual + 2, 0 * usual):
        codes, scales = np.zeros((ROWS, COLUMNS)), tensors["scales"]
        written = pack_gptq(codes, scales, zeros, None, bits, 1 if said == "gptq" else 2)
        parsed = config(bits=bits, checkpoint_format=said, sym=True)
        message = (
            f"{NAME}.qzeros has zero points from {zeros.min()} to {zeros.max()}, but by "
            rf"config.json \(sym: true\) all are {2 ** (bits - 1)}"
        )
        with pytest.raises(CheckpointError, match=message):
            parsed.decode(written, NAME)
        np.testing.assert_array_equal(
            config(bits=bits, checkpoint_format=said, sym=None).decode(written, NAME).zeros,
            zeros,
        )


def test_a_dynamic_rule_has_the_names_in_files_that_also_read_images():
    parsed = config(dynamic={r"-:model\.language_model\.layers\.1\.": {}})
    assert parsed.for_module("model.layers.1.mlp.up_proj") is None
    assert parsed.for_module("model.layers.0.mlp.up_proj") is parsed


def test_a_dynamic_rule_says_that_a_module_is_not_symmetric():
    parsed = config(sym=True, dynamic={"+:.*down_proj": {"sym": False}})
    tensors = random_module()
    linear = parsed.decode(tensors, NAME)
    np.testing.assert_array_equal(linear.dequantize(), dequantized(tensors, 4, 1))
    with pytest.raises(CheckpointError, match="sym: true"):
        parsed.decode(tensors, NAME.replace("down", "up"))


def test_g_idx_counts_whatever_the_config_calls_the_order():
    tensors = random_module(act_order=True)
    for said in (True, False):
        linear = config(desc_act=said).decode(tensors, NAME)
        np.testing.assert_array_equal(linear.dequantize(), dequantized(tensors, 4, 1))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([4, 8]), st.sampled_from([1, 2]), st.booleans())
def test_decode_inverts_the_packer(seed, bits, version, act_order):
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 2**bits, (64, 16))
    zeros = rng.integers(0, 2**bits, (2, 16))
    zeros[rng.random(zeros.shape) < 0.4] = 0
    scales = rng.uniform(0.5, 1, (2, 16)).astype(np.float16)
    g_idx = np.arange(64) // 32
    if act_order:
        g_idx = rng.permutation(g_idx)
    tensors = pack_gptq(codes, scales, zeros, g_idx, bits, version)
    parsed = config(bits=bits, checkpoint_format=["gptq", "gptq_v2"][version - 1])
    linear = parsed.decode(tensors, NAME)
    order = np.arange(64) if linear.permutation is None else np.asarray(linear.permutation)
    np.testing.assert_array_equal(linear.codes, codes[order])
    np.testing.assert_array_equal(linear.zeros, zeros)
    expected = (codes - zeros[g_idx]) * scales[g_idx].astype(np.float64)
    np.testing.assert_array_equal(linear.dequantize(), expected)


def test_permuted_rows_lie_in_groups_and_keep_their_order():
    g_idx = np.array([1, 0, 1, 0, 2, 2], np.int32)
    np.testing.assert_array_equal(gptq.permutation_of(g_idx, 2, NAME), [1, 3, 0, 2, 4, 5])
    assert gptq.permutation_of(np.arange(6) // 2, 2, NAME) is None


@pytest.mark.parametrize(
    ("g_idx", "message"),
    [
        (
            [0, 0, 0, 1],
            "puts 3 channels in group 0: expected 2 channels in each of the groups 0 to 1",
        ),
        ([0, 0, 2, 2], "puts 2 channels in group 2"),
        ([-1, -1, 0, 0], "puts 2 channels in group -1"),
        ([0, 0, 0, 0], "puts 4 channels in group 0"),
    ],
)
def test_groups_of_wrong_size(g_idx, message):
    with pytest.raises(CheckpointError, match=message):
        gptq.permutation_of(np.array(g_idx, np.int32), 2, NAME)


def test_whole_k_group_needs_no_permutation():
    tensors = random_module(group_size=ROWS)
    linear = config(group_size=-1, desc_act=True).decode(tensors, NAME)
    assert linear.format == WeightFormat("uint4")
    assert linear.permutation is None
    np.testing.assert_array_equal(linear.dequantize(), dequantized(tensors, 4, 1))


def test_g_idx_may_be_absent_only_without_act_order():
    tensors = random_module()
    expected = config().decode(tensors, NAME)
    del tensors["g_idx"]
    for parsed in (config(), config(desc_act=True, static_groups=True)):
        jax.tree.map(np.testing.assert_array_equal, parsed.decode(tensors, NAME), expected)
    with pytest.raises(CheckpointError, match=f"{NAME} has no tensor g_idx"):
        config(desc_act=True).decode(tensors, NAME)


def test_static_groups_may_be_told_in_meta():
    assert config(meta={"static_groups": True}).static_groups


def test_decode_inside_jit_takes_g_idx_from_outside():
    tensors = random_module(act_order=True)
    g_idx = tensors.pop("g_idx")
    decode = jax.jit(lambda arrays: config().decode({**arrays, "g_idx": g_idx}, NAME))
    expected = config().decode({**tensors, "g_idx": g_idx}, NAME)
    jax.tree.map(np.testing.assert_array_equal, decode(tensors), expected)
    with pytest.raises(ValueError, match="g_idx is an argument of a jitted function"):
        jax.jit(lambda arrays: config().decode(arrays, NAME))({**tensors, "g_idx": g_idx})


def test_matches_only_gptq_shapes():
    tensors = random_module()
    assert GPTQScheme.holds(tensors)
    assert GPTQScheme.holds(random_module(bits=8))
    assert not GPTQScheme.holds({"weight": tensors["scales"]})
    assert not GPTQScheme.holds({**tensors, "qweight": np.zeros((ROWS, COLUMNS // 8), np.int32)})


@pytest.mark.parametrize(
    ("suffix", "array", "message"),
    [
        (
            "qzeros",
            np.zeros((3, 3), np.int32),
            r"qzeros is int32 \[3, 3\]: expected int32 \[2, 3\]",
        ),
        ("scales", np.zeros((4, 24), np.float16), r"scales is float16 \[4, 24\].* \[2, 24\]"),
        ("qweight", np.zeros((8, 24), np.int64), r"qweight is int64 \[8, 24\]: expected int32"),
        ("g_idx", np.zeros(63, np.int32), r"g_idx is int32 \[63\]: expected int32 \[64\]"),
        ("g_idx", np.zeros(64, np.float32), r"g_idx is float32 \[64\]: expected int32 \[64\]"),
        ("g_idx", np.zeros(64, np.int32), "g_idx puts 64 channels in group 0"),
        ("qweight", np.zeros((7, 24), np.int32), "56 input channels: expected a multiple of"),
        ("qweight", np.zeros((64, 3), np.int32), "says quant_method 'gptq', but.* packed as AWQ"),
        ("qweight", np.zeros((64, 5), np.int32), "neither AWQ gemm .* nor GPTQ"),
    ],
)
def test_tensor_errors(suffix, array, message):
    with pytest.raises(CheckpointError, match=message):
        config().decode({**random_module(), suffix: array}, NAME)


def test_bits_of_config_and_tensors_must_agree():
    with pytest.raises(CheckpointError, match=r"qzeros is int32 \[2, 6\]: expected int32 \[4, 3\]"):
        config().decode(random_module(bits=8), NAME)


def test_output_channels_must_fill_words():
    tensors = {
        "qweight": np.zeros((8, 12), np.int32),
        "qzeros": np.zeros((4, 2), np.int32),
        "scales": np.zeros((4, 12), np.float16),
    }
    with pytest.raises(CheckpointError, match="12 output channels: expected a multiple of 8"):
        config().decode(tensors, NAME)


def test_shape_that_the_model_expects():
    with pytest.raises(CheckpointError, match=r"64 input and 24 output.*expects 64 and 32"):
        config().decode(random_module(), NAME, (64, 32))


@pytest.mark.parametrize("suffix", ["qweight", "qzeros", "scales"])
def test_missing_tensor(suffix):
    tensors = random_module()
    del tensors[suffix]
    with pytest.raises(CheckpointError, match=f"{NAME} has no tensor {suffix}"):
        config().decode(tensors, NAME)


def test_dynamic_rule_decides_bits_and_zero_points_of_a_module():
    parsed = config(dynamic={"+:.*down_proj": {"bits": 8, "group_size": 64}})
    tensors = random_module(bits=8, group_size=64)
    linear = parsed.decode(tensors, NAME)
    assert linear.format == WeightFormat("uint8", 64)
    np.testing.assert_array_equal(linear.dequantize(), dequantized(tensors, 8, 1))


def test_packed_tensors_of_a_module_that_a_rule_leaves_out():
    with pytest.raises(
        CheckpointError, match=r"dynamic rule of config\.json says that it was left"
    ):
        config(dynamic={"-:.*down_proj": {}}).decode(random_module(), NAME)


DESCRIBED = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": True}


def described(**changes):
    return GPTQScheme.from_config({**DESCRIBED, **changes})


def test_v1_is_the_default_format():
    assert described() == GPTQScheme(4, 128, "gptq", desc_act=True, symmetric=True)
    assert described(checkpoint_format=None).checkpoint_format == "gptq"


def test_what_is_not_said_of_symmetry_stays_open():
    assert described(sym=None).symmetric is None
    assert described(sym=False).symmetric is False


def test_spellings_of_gptqmodel():
    parsed = described(
        method="gptq",
        format="gptq_v2",
        checkpoint_format="gptq_v2",
        pack_dtype="int32",
        bits=8,
        group_size=-1,
    )
    assert parsed == GPTQScheme(8, None, "gptq_v2", desc_act=True, symmetric=True)
    assert described(format="gptq_v2").checkpoint_format == "gptq_v2"


def test_static_groups_may_stand_in_meta():
    assert described(meta={"static_groups": True}).static_groups
    assert described(static_groups=True).static_groups
    assert not described(static_groups=False, meta={"static_groups": True}).static_groups
    assert not described(meta={}).static_groups


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
        described(**changes)


def test_the_first_dynamic_rule_that_matches_counts():
    parsed = described(
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
    parsed = described(dynamic={"-:mlp": {}})
    assert parsed.for_module("model.layers.0.mlp.up_proj") is parsed
    assert parsed.for_module("mlp.up_proj") is None


def test_switches_are_true_or_false():
    """`"false"` is no act-order, and must not be read as one."""
    for key in ("desc_act", "static_groups", "is_marlin_format"):
        with pytest.raises(CheckpointError, match=f"{key} is 'false': expected true or false"):
            GPTQScheme.from_config(DESCRIBED | {key: "false"})
    in_meta = DESCRIBED | {"meta": {"static_groups": True}}
    assert GPTQScheme.from_config(in_meta).static_groups
    assert GPTQScheme.from_config(in_meta | {"static_groups": None}).static_groups
    assert not GPTQScheme.from_config(in_meta | {"static_groups": False}).static_groups


@pytest.mark.parametrize("pattern", ["a(", "a{99999999999}", "(" * 5000 + ")" * 5000])
def test_patterns_that_no_module_can_match(pattern):
    with pytest.raises(
        CheckpointError, match=r"dynamic rule .* is not a regular expression"
    ) as error:
        GPTQScheme.from_config(DESCRIBED | {"dynamic": {pattern: {}}})
    assert len(str(error.value)) < 300


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
def test_what_is_written_is_read(layout):
    modules = {
        "a.1": random_plain("uint4:g32:sym", (64, 8)),
        "a.10": random_plain("uint4:g32:sym", (64, 8)),
        "b": random_plain("uint8", (64, 8), least_zero=1),
        "c": random_plain("uint4:g64", (128, 8), least_zero=1, permuted=True),
    }
    scheme = GPTQScheme.of_layout(layout, modules)
    written = scheme.quantization_config(["lm_head", "a.2"])
    assert (written["bits"], written["sym"], written["desc_act"]) == (4, True, True)
    assert written["dynamic"][r"+:^b$"] == {"bits": 8, "group_size": -1, "sym": False}
    found = GPTQScheme.from_config(written)
    assert found.checkpoint_format == layout
    for name, plain in modules.items():
        again = found.decode(scheme.encode(plain, name), name, plain.shape)
        np.testing.assert_array_equal(again.dequantize(), plain.dequantize())
    for name in ("lm_head", "a.2"):
        assert found.for_module(name) is None
    with pytest.raises(ValueError, match=rf"'{layout}' packs 8 output channels in a word, and a.1"):
        scheme.encode(random_plain("uint4:g32:sym", (64, 12)), "a.1")


def test_a_zero_point_of_0_is_no_v1():
    modules = {"a": random_plain("uint8:g32", (64, 8))}
    modules["a"] = dataclasses.replace(modules["a"], zeros=modules["a"].zeros.at[0, 3].set(0))
    message = (
        "'gptq' holds zero points from 1 to 255, and a has them from 0 to .*: export as 'gptq_v2'"
    )
    with pytest.raises(ValueError, match=message):
        GPTQScheme.of_layout("gptq", modules).encode(modules["a"], "a")
    GPTQScheme.of_layout("gptq_v2", modules).encode(modules["a"], "a")
