"""Whole GGUF files: loaded, against Hugging Face's files of the same numbers, and written again."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mpjax
from mpjax.checkpoint import huggingface
from mpjax.checkpoint.gguf.source import GGUFSource
from mpjax.cli import info
from mpjax.errors import CheckpointError
from mpjax.kernels import QuantizedTensor
from mpjax.models.parameters import find
from tests.mpjax.checkpoint.gguf.write_gguf import (
    MIXED,
    SIZES,
    gguf,
    llama_metadata,
    random_tensors,
    write_llama,
)
from tests.mpjax.checkpoint.write_checkpoint import write_checkpoint

NAMES = {
    **{"token_embd": "embed_tokens", "output_norm": "norm", "blk": "layers"},
    **{"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"},
    **{f"attn_{x}": f"self_attn.{x}_proj" for x in "qkv"},
    **{"attn_output": "self_attn.o_proj"},
    **{f"ffn_{x}": f"mlp.{x}_proj" for x in ("gate", "up", "down")},
}
HEADS = {"attn_q.": SIZES["heads"], "attn_k.": SIZES["kv_heads"]}
TOKENS = jnp.asarray([[2, 70, 5, 33, 8, 100, 7, 9]])


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A file with tensors of many types."""
    return write_llama(tmp_path_factory.mktemp("gguf") / "m.gguf", np.random.default_rng(3))


@pytest.fixture(scope="module")
def lm(mixed):
    return mpjax.load(mixed, dtype="float32")


def hugging_face_name(name: str) -> str:
    return ".".join(["model", *(NAMES.get(part, part) for part in name.split("."))])


def dequantized(path) -> dict[str, np.ndarray]:
    """Hugging Face's tensors of a file, in float32."""
    source = GGUFSource(path)
    checkpoint = source.open()
    policy, found = source.read_policy({}), {}
    for name in checkpoint.tensors:
        module, _, suffix = name.rpartition(".")
        array = checkpoint.read(name)
        if suffix != "weight":
            array, name = (
                policy.reader(module).dequantize({suffix: array}, module).T,
                f"{module}.weight",
            )
        found[name] = np.asarray(array).astype(np.float32)
    return found


def logits(lm) -> np.ndarray:
    with jax.default_matmul_precision("highest"):
        return np.asarray(lm.model(TOKENS))


def test_a_plain_file_is_the_checkpoint_that_it_was_made_of(tmp_path, rng):
    """Row order and names, against tensors that are permuted as llama.cpp's converter does."""
    tensors = random_tensors(dict.fromkeys(("token_embd", *MIXED), "F16"), rng)
    hf, permuted = {}, {}
    for name, (kind, shape, content) in tensors.items():
        array = np.frombuffer(content, np.float16 if kind == "F16" else np.float32).reshape(shape)
        hf[hugging_face_name(name)] = array
        heads = next((n for key, n in HEADS.items() if key in name), None)
        if heads is not None:
            array = array.reshape(heads, 2, -1, shape[1]).swapaxes(1, 2)
        permuted[name] = kind, shape, array.tobytes()
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(llama_metadata(), permuted))
    config = GGUFSource(path).read_config() | {"torch_dtype": "float16"}
    write_checkpoint(tmp_path / "hf", config, hf)
    found, expected = mpjax.load(path), mpjax.load(tmp_path / "hf")
    assert found.config == expected.config
    assert found.precision == "W16A16KV16"
    np.testing.assert_array_equal(logits(found), logits(expected))


def test_every_map_has_its_own_format(lm, mixed):
    """Codes are kept, of Q4_1 and Q5_1 with their minima."""
    assert lm.precision == "W32+W4g32sym+W8g32+WM4+WM8A32KV16"
    expected, layer = dequantized(mixed), "model.layers.1."
    for path, name, exact in (
        ("attention.output", "self_attn.o_proj", True),
        ("mlp.down", "mlp.down_proj", True),
    ):
        kernel = find(lm.model, f"layers.1.{path}").kernel.get_value()
        kernel = kernel.dequantize() if isinstance(kernel, QuantizedTensor) else kernel
        np.testing.assert_array_equal(kernel, expected[f"{layer}{name}.weight"].T, strict=exact)
    for path, names in (("attention.qkv", "qkv"), ("mlp.gate_up", ("gate", "up"))):
        parts = find(lm.model, f"layers.1.{path}").parts
        found = np.concatenate([part.kernel.get_value().dequantize() for part in parts], 1)
        module = "self_attn" if path.startswith("attention") else "mlp"
        wanted = [expected[f"{layer}{module}.{name}_proj.weight"].T for name in names]
        np.testing.assert_array_equal(found, np.concatenate(wanted, 1))
    table = expected["model.embed_tokens.weight"]
    np.testing.assert_array_equal(lm.model.embedding.get_value(), table)


def test_logits_are_those_of_the_dequantised_weights(lm, mixed, tmp_path):
    config = GGUFSource(mixed).read_config() | {"torch_dtype": "float32"}
    write_checkpoint(tmp_path / "hf", config, dequantized(mixed))
    expected = logits(mpjax.load(tmp_path / "hf"))
    exact = mpjax.load(mixed, precision="W16A16KV16", dtype="float32")
    np.testing.assert_allclose(logits(exact), expected, atol=1e-5)
    np.testing.assert_allclose(logits(lm), expected, atol=0.03 * abs(expected).max())


def test_a_precision_rounds_all_maps(mixed, lm):
    four = mpjax.load(mixed, precision="W4g32A16KV8")
    assert four.precision == "W4g32+W4g32symA16KV8"  # Q4_0 keeps its codes
    kept = find(lm.model, "layers.0.attention.output").kernel.get_value()
    found = find(four.model, "layers.0.attention.output").kernel.get_value()
    np.testing.assert_array_equal(found.words, kept.words)
    assert mpjax.load(mixed, precision=lm.precision).precision == lm.precision
    with pytest.raises(CheckpointError, match="has 96 input channels, which groups of 64 don't"):
        mpjax.load(mixed, precision="WNF4A16KV16")


def test_text_and_answers(lm):
    made = mpjax.generate(lm, "hello world", max_new_tokens=4)
    assert len(made.tokens[0]) == 4
    assert lm.tokenizer.encode_chat([{"role": "user", "content": "hello"}])[0] == 1


def test_saved_and_exported(lm, tmp_path):
    mpjax.save(lm, tmp_path / "saved")
    restored = mpjax.load(tmp_path / "saved")
    np.testing.assert_array_equal(logits(restored), logits(lm))
    messages = [{"role": "user", "content": "hello"}]
    assert restored.tokenizer.encode_chat(messages) == lm.tokenizer.encode_chat(messages)
    assert restored.tokenizer.stop_ids == lm.tokenizer.stop_ids
    mpjax.export(lm, tmp_path / "plain", format="plain")
    exported = mpjax.load(tmp_path / "plain")
    assert json.loads((tmp_path / "plain/config.json").read_text())["model_type"] == "llama"
    np.testing.assert_allclose(logits(exported), logits(lm), atol=1e-5)
    assert exported.tokenizer.encode("hello w") == lm.tokenizer.encode("hello w")


def test_its_sampling_is_saved_and_exported(tmp_path, rng):
    metadata = llama_metadata() | {"general.sampling.temp": 0.5, "general.sampling.top_k": 7}
    (tmp_path / "m.gguf").write_bytes(gguf(metadata, random_tensors(MIXED, rng)))
    lm = mpjax.load(tmp_path / "m.gguf")
    assert lm.sampling == mpjax.Sampling(0.5, 7)
    mpjax.save(lm, tmp_path / "saved")
    mpjax.export(lm, tmp_path / "exported", format="plain")
    for name in ("saved", "exported"):
        again = mpjax.load(tmp_path / name)
        assert again.sampling == lm.sampling
        assert again.tokenizer.stop_ids == lm.tokenizer.stop_ids


def test_info_reads_the_header_alone(mixed, lm):
    found = info.inspect(mixed).summary()
    assert found == mpjax.load(mixed).summary()
    assert found["parameters"] == lm.num_parameters


def test_llama_3_factors(tmp_path, rng):
    turns = 8192 * 10000.0 ** -(np.arange(0, 16, 2) / 16) / (2 * np.pi)
    share = np.clip((turns - 1) / 3, 0, 1)
    factors = (1 / (share + (1 - share) / 8)).astype(np.float32)
    tensors = random_tensors({}, rng) | {"rope_freqs.weight": ("F32", (8,), factors.tobytes())}
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(llama_metadata(), tensors))
    opened = huggingface.open_headers(path)
    assert (opened.config.rope_scaling.kind, opened.config.rope_scaling.factor) == ("llama3", 8.0)
    assert "rope_freqs.weight" not in opened.checkpoint.tensors


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda tensors: tensors.pop("blk.1.ffn_up.weight"),
            "up_proj has no tensor|lacks 1 tensor",
        ),
        (
            lambda tensors: tensors.update({"blk.0.new.weight": tensors["output_norm.weight"]}),
            r"holds 1 tensor \(blk.0.new.weight\) that the model has no place for",
        ),
        (
            lambda tensors: tensors.update(
                {"blk.0.attn_q.3.weight": tensors["blk.0.attn_q.weight"]}
            ),
            r"holds 1 tensor \(blk\.0\.attn_q.*\.3\.weight\) that the model has no place for",
        ),
        (
            lambda tensors: tensors.update({"model.norm.weight": tensors["output_norm.weight"]}),
            r"m\.gguf: model\.norm\.weight is the second tensor for model\.norm\.weight of ",
        ),
        (
            lambda tensors: tensors.update({"output_norm.weight": ("F32", (2,), bytes(8))}),
            r"model\.norm\.weight is float32 \[2\]: expected",
        ),
        (
            lambda tensors: tensors.update(
                {"blk.0.attn_q.weight": ("Q8_0", (64, 32), bytes(34 * 64))}
            ),
            "q_proj holds a weight of 32 input and 64 output channels: the model expects 64 and 64",
        ),
        (
            lambda tensors: tensors.update({"blk.0.attn_q.weight": ("Q8_0", (64,), bytes(68))}),
            r"q_proj is uint8 \[2, 34\]: expected the blocks of a matrix",
        ),
        (
            lambda tensors: tensors.update(
                {"blk.0.attn_q.weight": ("Q8_0", (64, 64), b"\0\x7c" * (17 * 128))}
            ),
            "q_proj: 128 of the 128 scales are NaN or infinite",
        ),
    ],
)
def test_tensors_that_do_not_fit(change, said, tmp_path, rng):
    tensors = random_tensors({}, rng)
    change(tensors)
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(llama_metadata(), tensors))
    with pytest.raises(CheckpointError, match=said):
        mpjax.load(path)


def test_codes_of_tables_are_multiplied(tmp_path, monkeypatch, rng):
    """Maps of one input with the same format and different tables are products of their own."""
    sizes = {"hidden": 256, "inner": 256, "head_dim": 64}
    for key, size in sizes.items():
        monkeypatch.setitem(SIZES, key, size)
    kinds = {
        **{"attn_q": "IQ3_S", "attn_k": "IQ4_XS", "attn_v": "IQ4_XS", "attn_output": "IQ2_XXS"},
        **{"ffn_gate": "IQ3_XXS", "ffn_up": "IQ3_XXS", "ffn_down": "MXFP4"},
    }
    path = write_llama(tmp_path / "m.gguf", rng, kinds)
    exact = mpjax.load(path, precision="W32A32KV16", dtype="float32")
    kept = mpjax.load(path, dtype="float32")
    maps = kept.summary()["linear_maps"]
    assert maps["attention.output"] == {"WNF3g32": 2}
    assert maps["mlp.down"] == {"WMXFP4": 2}
    tokens = np.arange(12, dtype=np.int32)[None]
    expected, found = (np.asarray(lm.model(tokens)) for lm in (exact, kept))
    assert abs(expected).max() > 0.1
    np.testing.assert_allclose(found, expected, atol=5e-3 * abs(expected).max())
