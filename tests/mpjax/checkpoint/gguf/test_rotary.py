"""The rotary embedding of GGUF files."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import numpy as np
import pytest

from mpjax.checkpoint.gguf import rotary
from mpjax.checkpoint.gguf.architectures import ARCHITECTURES, read_config
from mpjax.checkpoint.gguf.blocks import TYPES
from mpjax.checkpoint.gguf.header import Tensor
from mpjax.checkpoint.gguf.metadata import Metadata
from mpjax.errors import CheckpointError
from mpjax.models import Llama, RopeScaling
from mpjax.models.rotary import attention_factor, frequencies, scaled_frequencies
from tests.mpjax.checkpoint.gguf.write_gguf import llama_metadata


def read(values, factors=None, **others):
    prefixed = {f"llama.rope.{key}": value for key, value in values.items()}
    given = others if factors is None else {rotary.LLAMA3: factors}
    prefixed["general.architecture"] = "llama"
    return rotary.read(Metadata(Path("m.gguf"), prefixed), ARCHITECTURES["llama"], given)


def test_the_factor_of_attention_that_yarn_has_itself():
    """llama.cpp's converter writes it; other values are refused, since llama.cpp ignores them."""
    of_yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0}
    metadata = {f"llama.{key}": value for key, value in of_yarn.items()}
    metadata |= {"general.architecture": "llama", "llama.rope.scaling.original_context_length": 64}
    usual = "llama.rope.scaling.yarn_attn_factor"
    for given, is_taken in ((float(np.float32(1.2079442)), True), (1.5, False)):
        found = Metadata(Path("m.gguf"), metadata | {usual: given})
        scaling = rotary.read(found, ARCHITECTURES["llama"], {})["rope_scaling"]
        assert ("attention_factor" in scaling, usual in found.taken) == (False, is_taken)


def test_scaling():
    assert read({}) == {"rope_theta": 10000.0}
    linear = {"freq_base": 5e5, "scaling.type": "linear", "scaling.factor": 4.0}
    expected = {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 4.0}}
    assert read(linear) == expected
    expected["rope_scaling"]["original_max_position_embeddings"] = 2048
    assert read(linear | {"scaling.original_context_length": 2048}) == expected
    with pytest.raises(CheckpointError, match=r"scaling\.type is 'other': expected none, linear"):
        read({"scaling.type": "other"})
    assert read({"scaling.type": "none", "scaling.factor": 4.0}) == {"rope_theta": 10000.0}


def of_llama_cpp(values, dim=16, context=64):
    """Radians per position [dim / 2] and the factor of queries and keys, as llama.cpp has them."""
    base, kind = values.get("freq_base", 1e4), values.get("scaling.type", "linear")
    grown = values.get("scaling.factor", values.get("scale_linear", 0.0)) or 1.0
    grown = 1.0 if kind == "none" else grown
    context = values.get("scaling.original_context_length", context)
    plain = base ** (-np.arange(0, dim, 2) / dim)
    attention = values.get("scaling.attn_factor", 1.0)
    if kind != "yarn":
        return plain / grown, attention

    def channel(turns):
        return dim * np.log(context / (turns * 2 * np.pi)) / (2 * np.log(base))

    low = max(np.floor(channel(values.get("scaling.yarn_beta_fast", 32.0))), 0)
    high = min(np.ceil(channel(values.get("scaling.yarn_beta_slow", 1.0))), dim - 1)
    kept = 1 - np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    grows = 1 + 0.1 * np.log(grown) if grown > 1 else 1.0
    return plain * (kept + (1 - kept) / grown), attention * grows


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    hypothesis.strategies.fixed_dictionaries(
        {},
        optional={
            "freq_base": hypothesis.strategies.sampled_from([100.0, 5e5]),
            "scaling.type": hypothesis.strategies.sampled_from(["none", "linear", "yarn"]),
            "scaling.factor": hypothesis.strategies.sampled_from([0.0, 1.0, 2.0, 8.0]),
            "scale_linear": hypothesis.strategies.sampled_from([0.0, 4.0]),
            "scaling.original_context_length": hypothesis.strategies.sampled_from([32, 256]),
            "scaling.attn_factor": hypothesis.strategies.sampled_from([1.0, 1.5]),
            "scaling.yarn_ext_factor": hypothesis.strategies.sampled_from([-1.0, 0.0, 1.0]),
            "scaling.yarn_beta_fast": hypothesis.strategies.sampled_from([4.0, 64.0]),
            "scaling.yarn_beta_slow": hypothesis.strategies.sampled_from([0.5, 2.0]),
        },
    )
)
def test_metadata_mean_what_llama_cpp_takes_them_for(values):
    prefixed = {f"llama.rope.{key}": value for key, value in values.items()}
    metadata = (
        llama_metadata() | {"llama.context_length": 64, "llama.rope.freq_base": 1e4} | prefixed
    )
    tensors = {"token_embd.weight": Tensor("token_embd.weight", TYPES[0], (96, 64), 0, 0)}
    kind = values.get("scaling.type", "linear")
    wrong = (
        "yarn_ext_factor" if values.get("scaling.yarn_ext_factor", -1) == (kind != "yarn") else ""
    )
    if kind != "yarn" and values.get("scaling.attn_factor", 1) != 1:
        wrong = wrong or "attn_factor"
    if wrong:
        with pytest.raises(CheckpointError, match=wrong):
            read_config(Metadata(Path("m.gguf"), metadata), tensors, {})
        return
    config = Llama.config_from_hf(read_config(Metadata(Path("m.gguf"), metadata), tensors, {}))
    expected, factor = of_llama_cpp(values)
    np.testing.assert_allclose(frequencies(config), expected, rtol=1e-5)
    assert attention_factor(config, "global") == pytest.approx(factor)


def test_factors_that_are_combined():
    short, long = np.ones(8), np.full(8, 2.0)
    for values, given, said in (
        ({"scaling.factor": 2.0}, {rotary.LLAMA3: short}, r"scaling\.factor 2\.0 \(linear\):"),
        (
            {"scaling.type": "yarn"},
            {rotary.SHORT: short, rotary.LONG: long},
            "expected one kind of",
        ),
        ({}, {rotary.SHORT: short}, "has rope_factors_short.weight of LongRoPE: expected"),
        ({"scaling.type": "longrope"}, {}, "has no factors of LongRoPE: expected"),
        ({}, {rotary.LLAMA3: short, rotary.LONG: long}, "expected one kind of rotary factors"),
    ):
        with pytest.raises(CheckpointError, match=said):
            read(values, **given)


@pytest.mark.parametrize(("factor", "high"), [(8.0, 4.0), (32.0, 4.0), (16.0, 1.0)])
def test_factors_of_llama_3(factor, high):
    plain = scaled_frequencies(128, 5e5, None)
    factors = plain / scaled_frequencies(128, 5e5, RopeScaling("llama3", factor, 1.0, high))
    found = read({"freq_base": 5e5}, np.asarray(factors))["rope_scaling"]
    assert (found["rope_type"], found["factor"]) == ("llama3", factor)
    assert found["high_freq_factor"] == high
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight divides .* by 1\.5 to 1\.5, as"):
        read({"freq_base": 5e5}, np.full(64, 1.5, np.float32))


def test_factors_of_phi():
    factors = {rotary.SHORT: np.array([1.0, 2.0]), rotary.LONG: np.array([3.0, 4.0])}
    values = {"scaling.original_context_length": 64, "scaling.attn_factor": 1.5}
    found = read(values, **factors)
    assert found["original_max_position_embeddings"] == 64
    assert found["rope_scaling"] == {
        "rope_type": "longrope",
        "short_factor": [1.0, 2.0],
        "long_factor": [3.0, 4.0],
        "attention_factor": 1.5,
    }
