"""Arguments of a decoder and its layers: lists may stand for arrays, and wrong ones are named."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from mpjax.models import Decoder, DecoderConfig, Linear, RMSNorm, llama_layers
from mpjax.models.registry import family
from mpjax.models.state import StepContext
from tests.models.small import CONFIG, small_config, small_model
from tests.refusals import require_a_result_or_its_name

SHALLOW = small_config(windows=(None,))
MODEL = small_model(SHALLOW)
TOKENS = jnp.array([[1, 2, 3, 4]])
X = jnp.linspace(-1, 1, 4 * 64).reshape(1, 4, 64)
LINEAR = Linear(jnp.linspace(-1, 1, 64 * 8).reshape(64, 8), jnp.ones(8))
NORM = RMSNorm(64, 1e-5, "float32")
LAYER = MODEL.layers[0]


def decoder(**fields: Any) -> Decoder:
    return nnx.eval_shape(lambda: Decoder(DecoderConfig(**fields), nnx.Rngs(0)))


CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "call": (MODEL, {"tokens": TOKENS}),
    "step": (
        MODEL.step,
        {"tokens": TOKENS, "counts": jnp.array([4]), "cache": MODEL.create_cache(1, 16, "KV8", 16)},
    ),
    "create_cache": (
        MODEL.create_cache,
        {"batch": 1, "max_tokens": 16, "format": "KV8", "page_size": 16},
    ),
    "pack_table": (small_model(SHALLOW).pack_table, {"path": "head", "format": "uint8:gK"}),
    "embed": (MODEL.embed, {"tokens": TOKENS}),
    "decoder": (
        decoder,
        {field.name: getattr(SHALLOW, field.name) for field in dataclasses.fields(SHALLOW)},
    ),
    "linear": (Linear, {"kernel": jnp.ones((4, 2)), "bias": jnp.ones(2)}),
    "linear of a shape": (
        Linear.create,
        {"shape": (4, 2), "bias": True, "dtype": "bf16", "rngs": nnx.Rngs(0)},
    ),
    "linear call": (LINEAR, {"x": X}),
    "linear terms": (LINEAR.terms, {"x": X}),
    "norm": (RMSNorm, {"size": 4, "epsilon": 1e-5, "dtype": "fp16"}),
    "norm call": (NORM, {"x": X}),
    "norm add": (NORM.add, {"terms": X[None], "residual": X, "format": None}),
    "mlp": (LAYER.mlp, {"x": X}),
    "attention": (
        LAYER.attention,
        {"x": X, "context": StepContext({"global": jnp.ones((1, 4, 8))})},
    ),
    "family": (family, {"hf": {"architectures": ["LlamaForCausalLM"]}}),
}
ODD = {
    "None": None,
    "text": "text",
    "number": 2.5,
    "negative": -1,
    "object": object(),
    "list": [1, 2],
    "ragged": [[1], [1, 2]],
    "floats": jnp.ones((1, 4)),
    "complex": np.ones((2, 2), complex),
}
# Fields of a configuration that are not looked at before they are used: files are checked apart.
FIELDS = ("rope_theta", "rope_scaling", "rms_norm_eps", "stop_ids")
SWITCHES = ("tie_word_embeddings", "bias")
each_call = pytest.mark.parametrize("name", CALLS)


@each_call
def test_what_is_wrong_is_named_or_taken(name):
    call, arguments = CALLS[name]
    for argument in arguments:
        if argument in (*FIELDS, *SWITCHES):
            continue
        words = {"hf": ["config.json"]}.get(argument, [])
        for odd in ODD.values():
            require_a_result_or_its_name(call, arguments, argument, odd, *words)


@each_call
def test_lists_are_arrays(name):
    call, arguments = CALLS[name]
    expected = jax.tree.leaves(call(**arguments))
    for argument, value in arguments.items():
        if not isinstance(value, jax.Array):
            continue
        lists = np.asarray(value).tolist()
        for other in (lists, np.asarray(lists)):
            found = jax.tree.leaves(call(**arguments | {argument: other}))
            for one, two in zip(found, expected, strict=True):
                np.testing.assert_array_equal(np.asarray(one), np.asarray(two))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: MODEL(TOKENS[0]),
            r"int32 of shape \(4,\): .* a single sequence is tokens\[None\]",
        ),
        (lambda: MODEL(TOKENS.astype(jnp.float32)), "tokens are float32 of shape .*: expected int"),
        (lambda: MODEL([[1, 50]]), "tokens must be from 0 to 49, the model's vocabulary"),
        (lambda: MODEL([[1, -1]]), "tokens must be from 0 to 49"),
        (lambda: step(counts=[4, 4]), r"counts are int32 of shape \(2,\): .* of shape \(1,\)"),
        (lambda: step(counts=[5]), r"counts are \[5\]: expected 0 to 4"),
        (lambda: step(counts=[0.5]), r"counts are float32 of shape \(1,\): expected integers"),
        (lambda: step(tokens=[1, 2]), "a single sequence is tokens"),
        (lambda: step(cache=MODEL), "cache is .*: expected a DecoderCache, as model.create_cache"),
        (
            lambda: step(cache=small_model().create_cache(1, 16, "KV8")),
            "cache has 2 layers, .* has 1",
        ),
        (lambda: Decoder(SHALLOW, 0), r"rngs is 0: expected a Rngs, such as nnx\.Rngs\(0\)"),
        (lambda: Decoder({}, nnx.Rngs(0)), "config is {}: expected a DecoderConfig"),
        (
            lambda: decoder_with(num_heads=3),
            "DecoderConfig: num_heads is 3 and num_kv_heads 2: exp",
        ),
        (
            lambda: decoder_with(head_dim=15),
            "DecoderConfig: head_dim is 15: expected a positive, even",
        ),
        (
            lambda: decoder_with(layers=llama_layers((0,), 128)),
            r"DecoderConfig, layers\[0\].attention: window is 0: expected a positive integer",
        ),
        (lambda: decoder_with(dtype="bf17"), "DecoderConfig: dtype is 'bf17': expected a dtype"),
    ],
)
def test_messages(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def step(**changes: Any) -> Any:
    call, arguments = CALLS["step"]
    return call(**arguments | changes)


def decoder_with(**changes: Any) -> Decoder:
    return decoder(**CALLS["decoder"][1] | changes)


def test_a_configuration_of_lists_and_short_names_is_that_of_tuples():
    """A configuration must have a hash: programs are compiled for it."""
    layers = [*llama_layers([None, 5], 128)]
    short: Any = dataclasses.replace(CONFIG, layers=layers, stop_ids=[1], dtype="bf16")
    full = small_config((None, 5), stop_ids=(1,), dtype="bfloat16")
    assert hash(short) == hash(full)
    assert short == full


def test_an_empty_batch_is_no_error():
    assert MODEL(jnp.zeros((0, 4), jnp.int32)).shape == (0, 4, CONFIG.vocab_size)
