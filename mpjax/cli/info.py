"""`mpjax info`: describes a checkpoint from the headers of its files."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mpjax.cli import options, output

if TYPE_CHECKING:
    from mpjax.checkpoint.plan import LinearSource
    from mpjax.kernels import WeightFormat
    from mpjax.language_model import LanguageModel
    from mpjax.models import Linear
    from mpjax.text.tokenizer import Tokenizer

NAME = "info"
CONTEXTS = (2048, 8192)
CACHES = ("KV16", "KV8", "KV4")
MEGABYTE, GIGABYTE = 1e6, 1e9
EPILOG = """\b
Examples:
  mpjax info
  mpjax info Qwen3-8B-AWQ
  mpjax info SmolLM2-135M-Instruct.Q4_1.gguf
  mpjax info --json | python -m json.tool

\b
Only the headers of the files are read, which needs no GPU. (If config.json
says that head and embedding are tied, and the files have both, both are read
and compared.) A hub id is fetched completely first.

\b
The last rows give the weight formats of each kind of linear map, and the
number of layers with them. Maps of one input (query, key and value; gate and
up) are one product if their formats agree; if not, there is a product for
each format, as in `W4 | W4 | W16`. Rows before them give the embedding and,
if it has a table of its own, the head. "cache scales" are the scales that
KV8s needs and KVfp8 can use. "in the files" tells which codes are kept and
which are rounded, "also loads as" the --precision that generate, chat, serve
and convert take, and "on this device" the context that the free memory holds.

\b
The keys of --json: model, answers (tokens, embeddings, or a classifier's
scores), labels (the number of scores, or null), source, precision,
num_layers, hidden_size, num_heads, num_kv_heads, max_position_embeddings,
parameters, packed_bytes, other_bytes, dtype, cache_scales (heads, channels
or null), linear_maps (the number of layers for each kind of map and format),
eight_bit_blocks (of W4Ax: the blocks of activations in 8 bits, and all;
else null), hadamard_block (channels of the blocks mixed before down
projections, or null), tables (format and bytes of the embedding and the
head), sampling (the model's own, with the keys of generation_config.json, or
null), contents (what the files hold and what becomes of it; null of a saved
model), activations (the choice that an FP8 checkpoint needs, or null), cache
(the cache that the checkpoint was made for, where there is none like it, or
null), rounded (what is lost by loading, or null), other_precisions (that can
be asked for, and the bytes of all weights in each), tokenizer (tokens,
chat_templates, stop_tokens; or null), state_bytes (of a sequence, beside its
pages, in layers that keep a state), memory_bytes (by KV format and number of
tokens: weights, and the cache of one sequence), free_bytes (of the device;
null where unknown), and can_run (true).
Of a model that can't run, what was found is shown, and the error says what is
in the way; with --json, can_run is false and in_the_way has that sentence.
"""


def command(
    source: options.Source = None,
    model: options.SourceOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object.")] = False,
) -> None:
    """Show what a checkpoint is, whether it runs, and its memory."""
    import mpjax
    from mpjax.checkpoint import huggingface
    from mpjax.checkpoint.description import is_saved
    from mpjax.checkpoint.locate import locate
    from mpjax.checkpoint.outlook import look
    from mpjax.engine.state import snapshot_bytes
    from mpjax.errors import CheckpointError
    from mpjax.loading import find_folder
    from mpjax.memory import free_bytes

    folder, source = None, options.one_source(source, model)
    try:
        folder = find_folder(mpjax.bundled_model() if source is None else source)
        lm, tokenizer = inspect(folder), locate(folder).read_tokenizer()
        outlook = None if is_saved(folder) else look(huggingface.open_headers(folder))
    except CheckpointError as error:
        _show_what_is_there(folder, str(error), json)
        raise
    facts = {
        "contents": None if outlook is None else outlook.contents,
        "activations": None if outlook is None else outlook.activations,
        "cache": None if outlook is None else outlook.cache,
        "rounded": None if outlook is None else outlook.rounded,
        "other_precisions": {} if outlook is None else outlook.others,
        "tokenizer": _text_facts(tokenizer),
        "state_bytes": snapshot_bytes(lm),
        "memory_bytes": memory_by_context(lm),
        "free_bytes": free_bytes(),
    }
    if json:
        output.print_json({"can_run": True} | lm.summary() | facts)
    else:
        _show(lm.describe() + _rows(facts))


def _text_facts(tokenizer: Tokenizer | None) -> dict[str, Any] | None:
    """Facts about a tokenizer, in JSON types; None without a tokenizer."""
    if tokenizer is None:
        return None
    return {
        "tokens": tokenizer.backend.get_vocab_size(),
        "chat_templates": sorted(tokenizer.chat_templates),
        "stop_tokens": [tokenizer.backend.id_to_token(index) for index in tokenizer.stop_ids],
    }


def _rows(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The facts as pairs of a label and a text."""
    labels = {"contents": "in the files"}
    labels |= {key: key for key in ("activations", "cache", "rounded")}
    rows = [(label, facts[key]) for key, label in labels.items() if facts[key] is not None]
    if others := facts["other_precisions"]:
        texts = (f"{name} ({_size(count)})" for name, count in others.items())
        rows.append(("also loads as", ", ".join(texts)))
    rows.append(("tokenizer", _describe_tokenizer(facts["tokenizer"])))
    if state := facts["state_bytes"]:
        rows.append(("state", f"{_size(state)} of a sequence of any length, beside its cache"))
    memory, free = facts["memory_bytes"], facts["free_bytes"]
    rows += [(f"memory, {kv}", _describe_memory(found)) for kv, found in memory.items()]
    return rows + ([] if free is None else [("on this device", _describe_room(memory, free))])


def _describe_tokenizer(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return "none: there are no tokenizer's files, so that prompts and answers are token ids"
    chat = "with a chat template" if found["chat_templates"] else "no chat template"
    ends = " or ".join(map(str, found["stop_tokens"])) or "no token"
    return f"{found['tokens']:,} tokens, {chat}; texts end at {ends}"


def _describe_room(memory: Mapping[str, Mapping[str, int]], free: int) -> str:
    """A sentence: the longest context that fits into the free memory with each KV format."""
    fitting = {
        kv: max((int(tokens) for tokens, nbytes in found.items() if nbytes <= free), default=0)
        for kv, found in memory.items()
    }
    said = f"{_size(free)} free"
    if not any(fitting.values()):
        return f"{said}, which is too little: take another precision, or more devices (--devices)"
    if all(fitting[kv] == max(map(int, memory[kv])) for kv in memory):
        return f"{said}, enough for the longest context"
    texts = (f"{tokens:,} tokens with {kv}" for kv, tokens in fitting.items() if tokens)
    return f"{said}, enough for {', '.join(texts)}"


def _show(rows: list[tuple[str, str]]) -> None:
    width = max(len(label) for label, _ in rows)
    for label, text in rows:
        typer.echo(f"{label:{width}}  {text}")


def _show_what_is_there(folder: Path | None, reason: str, json: bool) -> None:
    """Prints what is known of a model that can't be run. reason: the error message.

    folder: the checkpoint's folder or GGUF file, or None if there is none.
    """
    from mpjax.checkpoint.description import is_saved
    from mpjax.checkpoint.survey import survey

    rows = [] if folder is None or is_saved(folder) else survey(folder)
    if len(rows) == 1:  # no model, or a damaged one: the error message suffices
        rows = []
    if json:
        output.print_json({"can_run": False, "in_the_way": reason, **dict(rows)})
    elif rows:
        _show([*rows, ("can run", "no, as the error says")])


def memory_by_context(lm: LanguageModel) -> dict[str, dict[str, int]]:
    """KV format → tokens → bytes of the weights and the KV cache of one sequence."""
    import jax

    longest = lm.config.max_position_embeddings
    lengths = sorted({min(tokens, longest) for tokens in (*CONTEXTS, longest)})
    found: dict[str, dict[str, int]] = {}
    for kv in dict.fromkeys((*CACHES, str(lm.kv_format))):
        found[kv] = {}
        for tokens in lengths:
            create = functools.partial(lm.model.create_cache, 1, tokens, kv)
            leaves = jax.tree.leaves(jax.eval_shape(create))
            nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
            found[kv][str(tokens)] = lm.nbytes + nbytes
    return found


def _describe_memory(found: Mapping[str, int]) -> str:
    return ", ".join(
        f"{_size(nbytes)} with {int(tokens):,} tokens" for tokens, nbytes in found.items()
    )


def _size(nbytes: int) -> str:
    """A number of bytes as text, in GB, or in MB below 1 GB."""
    if nbytes < GIGABYTE:
        return f"{nbytes / MEGABYTE:,.1f} MB"
    return f"{nbytes / GIGABYTE:,.2f} GB"


def inspect(folder: Path) -> LanguageModel:
    """The model that `load` would return for a folder, with shapes instead of arrays.

    Its `describe` is exact except where tensor values matter: the bytes of GPTQ's permutations,
    linear maps that permutations keep from being fused, and integer codes that count as symmetric
    because all zero points are the middle. An FP8 checkpoint that needs an explicit precision is
    described with 16-bit activations.

    Raises CheckpointError for a folder that can't be loaded.
    """
    import jax

    from mpjax.checkpoint import restoring
    from mpjax.checkpoint.description import is_saved
    from mpjax.checkpoint.locate import locate

    class Header(jax.ShapeDtypeStruct):
        @property
        def nbytes(self) -> int:
            return self.size * self.dtype.itemsize

    lm = restoring.abstract(folder) if is_saved(folder) else _from_headers(folder)
    model = jax.tree.map(
        lambda leaf: leaf if hasattr(leaf, "__array__") else Header(leaf.shape, leaf.dtype),
        lm.model,
    )
    return dataclasses.replace(lm, model=model, sampling=locate(folder).read_sampling())


def _from_headers(folder: Path) -> LanguageModel:
    """The model of a Hugging Face checkpoint, with shapes instead of arrays."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from mpjax.checkpoint import huggingface
    from mpjax.checkpoint.plan import make_plan
    from mpjax.kernels import KVFormat
    from mpjax.language_model import LanguageModel
    from mpjax.models import CacheScales

    opened = huggingface.open_headers(folder)
    config = opened.config
    plan = make_plan(opened.checkpoint, opened.decoder, config, opened.policy, None)
    model = nnx.eval_shape(lambda: opened.decoder(plan.config, nnx.Rngs(0)))
    for place, sources in plan.linears:
        place.assign(model, _parts(sources, config.dtype, place.bias))
    if plan.cache_scales:
        shape = (config.num_layers, 2, config.num_kv_heads)
        model.cache_scales = CacheScales(jax.ShapeDtypeStruct(shape, jnp.dtype("float32")))
    return LanguageModel(model, None, KVFormat(), folder)


def _with_one_symmetry(sources: tuple[LinearSource, ...]) -> tuple[LinearSource, ...]:
    """Makes all formats asymmetric if any is, as `LinearPlace.join` does."""
    formats = [source.format for source in sources if source.format is not None]
    if all(format.symmetric for format in formats):
        return sources
    return tuple(
        source
        if source.format is None
        else dataclasses.replace(source, format=dataclasses.replace(source.format, symmetric=False))
        for source in sources
    )


def _parts(sources: tuple[LinearSource, ...], dtype: str, bias: bool) -> list[Linear]:
    """The linear maps that loading makes of these sources: one fused map if their formats agree."""
    import jax
    import jax.numpy as jnp

    from mpjax.models import Linear

    sources = _with_one_symmetry(sources)
    formats = {source.format for source in sources}
    shapes = [source.shape for source in sources]
    if len(formats) == 1:
        shapes = [(shapes[0][0], sum(outputs for _, outputs in shapes))]
        sources = sources[:1]
    return [
        Linear(
            _kernel(shape, source.format, dtype),
            jax.ShapeDtypeStruct(shape[1:], jnp.dtype(dtype)) if bias else None,  # type: ignore[arg-type]
        )
        for shape, source in zip(shapes, sources, strict=True)
    ]


def _kernel(shape: tuple[int, int], format: WeightFormat | None, dtype: str) -> Any:
    import jax
    import jax.numpy as jnp

    from mpjax.kernels import quantize

    if format is None:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    weight = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.eval_shape(lambda weight: quantize(weight, format), weight)
