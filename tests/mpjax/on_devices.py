"""Checkpoints on several devices against one: loaded, called, saved, restored.

It needs a process of its own with several devices:
`XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.mpjax.on_devices FOLDER few`
"""

from __future__ import annotations

import functools
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from mpjax.checkpoint import convert
from mpjax.evaluation.comparison import _differ
from mpjax.generation.decoding import decode, prefill
from mpjax.kernels import KVFormat, quantize
from mpjax.models import Decoder, Packed
from mpjax.models.sharded import ShardedDecoder
from mpjax.sampling.settings import RowSettings, Sampling
from tests.models.sharded_decoders import divide, require_same_arrays
from tests.models.sharded_families import build, keys
from tests.models.small import small_config, small_model
from tests.mpjax.checkpoint.write_checkpoint import (
    AWQ,
    CONFIGS,
    FP8,
    GPTQ,
    linear_shapes,
    pack_module_fp8,
    pack_random,
    random_tensors,
    write_checkpoint,
)

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_disable_most_optimizations", True)

SIZES = {"num_hidden_layers": 1, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
SAMPLING = {
    "temperature": np.array([0.0, 0.8]),
    "top_k": 40,
    "top_p": 0.9,
    "repetition_penalty": 1.2,
}
ACT_ORDER = GPTQ | {"desc_act": True}
# The number of devices, the family, quantization_config, and the precision to load. The first case
# of each list also generates. Of the others only weights are compared, since sharded_decoders.py
# compares logits.
FEW = ((4, "qwen2", ACT_ORDER, None),)  # biases, and channels in another order
MANY = (
    (4, "qwen3", None, "W4g32A16KV8H8E8"),
    (8, "llama-tied", None, "W4g32A16KV4"),
    (2, "mistral", None, "W4A8KV8"),
    (2, "llama", None, "W16A16KV8"),
)


def write(folder: Path, family: str, written: dict[str, Any] | None) -> Path:
    rng = np.random.default_rng(5)
    hf = CONFIGS[family] | SIZES | ({} if written is None else {"quantization_config": written})
    tensors = random_tensors(hf, rng)
    for name, tensor in tensors.items():
        # Small maps: a random model whose maps are large says the same token forever.
        tensors[name] = np.ones_like(tensor) if "norm" in name else tensor * np.float32(0.25)
    for name, (channels, _) in linear_shapes(hf).items() if written else ():
        if written is FP8 or written.get("format") == "float-quantized":
            pack_module_fp8(tensors, written, name)
        elif written is ACT_ORDER:
            pack_random(tensors, hf, name, rng, rng.permutation(np.arange(channels) // 32))
        elif written is AWQ:
            pack_random(tensors, hf, name, rng)
        else:
            return write_integers(folder, hf, tensors)
    return write_checkpoint(folder, hf, tensors)


def write_integers(folder: Path, hf: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """Writes compressed-tensors' packed integers, by `mpjax.export` of the plain checkpoint."""
    plain = {name: value for name, value in hf.items() if name != "quantization_config"}
    source = write_checkpoint(folder / "plain", plain, tensors)
    lm = mpjax.load(source, precision="W4g32A16KV16", progress=False)
    mpjax.export(lm, folder / "exported", progress=False)
    return folder / "exported"


def write_experts(folder: Path) -> Path:
    """Writes a mixture of four experts, in compressed-tensors' packed integers."""
    model = build("MixtralForCausalLM")
    for place in model.linear_places(model.config):
        for linear in place.parts(model):
            linear.kernel = Packed(quantize(linear.kernel.get_value(), "uint4:g32"))
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(keys("MixtralForCausalLM")))
    lm = mpjax.LanguageModel(model, None, KVFormat("16"), folder)
    mpjax.export(lm, folder / "experts", progress=False)
    return folder / "experts"


def run(lm: mpjax.LanguageModel) -> mpjax.GeneratedTokens:
    """A greedy row, and one that is drawn."""
    tokens = jnp.asarray(np.random.default_rng(1).integers(3, 51, (2, 6)), jnp.int32)
    options: dict[str, Any] = {"max_new_tokens": 12, "kv_format": lm.kv_format}
    lengths = jnp.asarray([6, 4], jnp.int32)
    return mpjax.generate_tokens(lm.model, tokens, lengths, sampling=SAMPLING, **options)


def check(folder: Path, count: int, precision: str | None) -> tuple[mpjax.LanguageModel, ...]:
    given = {"precision": precision, "dtype": "float32", "progress": False}
    whole, lm = mpjax.load(folder, **given), mpjax.load(folder, devices=count, **given)
    assert (lm.devices, lm.precision, lm.num_parameters) == (
        *(count, whole.precision, whole.num_parameters),
    )
    require_same_arrays(whole.model, lm.model.whole())  # type: ignore[attr-defined]
    return whole, lm


def require_restored_alike(
    folder: Path, whole: mpjax.LanguageModel, lm: mpjax.LanguageModel
) -> None:
    """Saved from several devices, restored on another number, saved again, restored on one."""
    count = lm.devices * 2 if lm.devices < 4 else lm.devices // 2
    mpjax.save(lm, folder, progress=False)
    restored = mpjax.load(folder, devices=jax.devices()[:count], progress=False)
    require_same_arrays(whole.model, restored.model.whole())  # type: ignore[attr-defined]
    mpjax.save(restored, folder, overwrite=True, progress=False)
    again = mpjax.load(folder, progress=False)  # checked by its checksums
    require_same_arrays(whole.model, again.model)


def call(whole: mpjax.LanguageModel, lm: mpjax.LanguageModel) -> None:
    expected, found = run(whole), run(lm)
    np.testing.assert_array_equal(found.tokens, expected.tokens)
    assert len(set(np.asarray(found.tokens).ravel().tolist())) > 4
    np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-4)


def require_experts_of_either_division(folder: Path) -> None:
    """Loaded with whole experts, and restored with divided ones on more devices."""
    source = write_experts(folder)
    given = {"dtype": "float32", "progress": False}
    convert.PIECE_BYTES = 0  # experts come one by one
    whole, divided = (mpjax.load(source, devices=n, **given) for n in (1, 4))
    require_same_arrays(whole.model, divided.model.whole())  # type: ignore[attr-defined]
    lm = mpjax.load(source, devices=2, experts="whole", **given)
    assert lm.model.share.layers[0].mlp.experts.down.kernel.get_value().shape == (4, 96, 64)  # type: ignore[attr-defined]
    require_same_arrays(whole.model, lm.model.whole())  # type: ignore[attr-defined]
    call(whole, lm)
    mpjax.save(lm, folder / "saved", progress=False)
    for count, experts in ((4, "divided"), (3, "whole")):
        restored = mpjax.load(folder / "saved", devices=count, experts=experts, progress=False)
        require_same_arrays(whole.model, restored.model.whole())  # type: ignore[attr-defined]


def require_quantised_and_exported_alike(folder: Path) -> None:
    """Layers that are quantised one by one for two devices, and what an export makes of them."""
    recipe, files = mpjax.Recipe.of("W4g32A16KV8", "rtn"), []
    source = write(folder / "plain", "qwen2", None)  # which has biases
    whole, *others = (mpjax.quantize(source, recipe, devices=n, progress=False) for n in (1, 2, 3))
    for number, lm in enumerate((whole, *others)):
        mpjax.export(lm, folder / f"{number}", progress=False)
        files.append((folder / f"{number}" / "model.safetensors").read_bytes())
        if number:
            require_same_arrays(whole.model, lm.model.whole())  # type: ignore[attr-defined]
    assert files[0] == files[1] == files[2]


def require_no_device_gets_all_logits(lm: mpjax.LanguageModel) -> None:
    """Collectives of a decoding step with every kind of sampling have few numbers for each row."""
    sampling = SAMPLING | {"temperature": 0.8, "min_p": 0.01, "stop_ids": (0,)}
    settings = RowSettings.of([Sampling.of(sampling)], 3, max_new_tokens=8)
    cache, tokens = lm.model.create_cache(3, 16, "KV16", 16), jnp.ones((3, 4), jnp.int32)
    counts, until = jnp.full(3, 4, jnp.int32), jnp.int32(8)
    read = functools.partial(prefill, columns=8)
    loop = jax.eval_shape(read, lm.model, tokens, counts, cache, settings)
    text = jax.jit(decode).lower(lm.model, loop, until).compile().as_text()
    shapes = re.findall(r"= \(?\w+\[([\d,]*)\]\S* all-(?:gather|reduce|to-all)", text)
    assert len(shapes) >= 10  # as many as one layer, the logits and a draw have
    of_rows = {math.prod(int(n) for n in shape.split(",") if n) // 3 for shape in shapes}
    assert lm.config.vocab_size not in of_rows, shapes


def require_that_each_device_is_heard(model: ShardedDecoder) -> None:
    """What is not well on one device is not well."""
    axis = str(model.share.axis)

    def run(share: Decoder, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        index = jax.lax.axis_index(axis)
        heads = jnp.full((1, 2, share.config.num_kv_heads, 1), index)
        return heads, index != number

    for number in (0, 1, model.shards - 1, model.shards):
        heads, is_well = model.map_heads(run, jnp.int32(number))
        assert bool(is_well) == (number == model.shards)
        assert np.asarray(heads)[0, 0, :, 0].tolist() == sorted(np.asarray(heads)[0, 1, :, 0])


def require_comparisons_of_the_vocabulary() -> None:
    """Divergences of a divided model, whose logits have a column more, also from a whole one."""
    whole = small_model(small_config((None,), vocab_size=51))
    divided = divide(whole, 2)
    tokens = np.random.default_rng(1).integers(0, 51, (2, 6)).astype(np.int32)
    for models in ((divided, divided), (divided, whole), (whole, divided)):
        caches = tuple(model.create_cache(2, 16, "KV16", 16) for model in models)
        (*_, divergences, agrees), _ = _differ(models, tokens, np.full(2, 5, np.int32), caches)
        assert np.all(np.asarray(divergences) < 1e-5)
        assert np.all(np.asarray(agrees))


if __name__ == "__main__":
    for number, case in enumerate(cases := {"few": FEW, "many": MANY}[sys.argv[2]]):
        pair = check(write(Path(sys.argv[1]) / str(number), *case[1:3]), case[0], case[3])
        if number == 0:
            call(*pair)
            require_restored_alike(Path(sys.argv[1]) / "saved", *pair)
    require_no_device_gets_all_logits(pair[1])
    require_that_each_device_is_heard(pair[1].model)
    if cases is MANY:
        require_experts_of_either_division(Path(sys.argv[1]) / "mixture")
        require_comparisons_of_the_vocabulary()
        require_quantised_and_exported_alike(Path(sys.argv[1]) / "quantised")
    print(f"{len(cases)} cases")
