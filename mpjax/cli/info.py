"""`mpjax info`: what a checkpoint holds, from its headers alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mpjax.cli import options

if TYPE_CHECKING:
    from models import Linear
    from mpjax.checkpoint.plan import LinearSource
    from mpjax.language_model import LanguageModel
    from pallas_kernels import WeightFormat

NAME = "info"
EPILOG = """\b
Examples:
  mpjax info
  mpjax info Qwen3-8B-AWQ

Of a folder only headers are read, so it answers at once and needs no GPU. A hub id is fetched
whole first.
"""


def command(source: options.Source = None) -> None:
    """Show the size, shape and precision of a checkpoint."""
    import mpjax
    from mpjax.loading import find_folder

    rows = inspect(find_folder(mpjax.bundled_model() if source is None else source)).describe()
    width = max(len(label) for label, _ in rows)
    for label, text in rows:
        typer.echo(f"{label:{width}}  {text}")


def inspect(folder: Path) -> LanguageModel:
    """The model that loading a folder would give, with shapes in the place of arrays.

    Good for `describe`, which is exact but for what the tensors' values decide: the bytes of
    GPTQ's permutations, maps that can't be fused because of them, and whether zero points are all
    the middle, so that integers count as symmetric. Raises CheckpointError for a folder that can't
    be loaded.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from models import CacheScales
    from mpjax.checkpoint import huggingface, orbax
    from mpjax.checkpoint.layout import assign_linear
    from mpjax.checkpoint.plan import make_plan
    from mpjax.checkpoint.safetensors import Checkpoint
    from mpjax.language_model import LanguageModel
    from pallas_kernels import KVFormat

    class Header(jax.ShapeDtypeStruct):
        @property
        def nbytes(self) -> int:
            return self.size * self.dtype.itemsize

    kv_format = KVFormat()
    if (folder / orbax.DESCRIPTION_NAME).is_file():
        description = orbax.read_description(folder)
        model = orbax.abstract_model(description)
        shapes = {
            path: jax.ShapeDtypeStruct(tuple(array["shape"]), jnp.dtype(array["dtype"]))
            for path, array in description["arrays"].items()
        }
        orbax.assign_arrays(model, shapes, description)
        kv_format = KVFormat.parse(description["kv_format"])
    else:
        hf = huggingface.read_config(folder)
        decoder, config = huggingface.decoder_config(folder, hf)
        packing = huggingface.read_packing(folder, hf)
        plan = make_plan(Checkpoint.open(folder), config, packing, None)
        model = nnx.eval_shape(lambda: decoder(config, nnx.Rngs(0)))
        for place, sources in plan.linears:
            assign_linear(model, place, _parts(sources, config.dtype, place.bias))
        if plan.cache_scales:
            shape = (config.num_layers, 2, config.num_kv_heads)
            model.cache_scales = CacheScales(jax.ShapeDtypeStruct(shape, jnp.dtype("float32")))
    model = jax.tree.map(lambda shape: Header(shape.shape, shape.dtype), model)
    return LanguageModel(model, None, kv_format, folder)


def _parts(sources: tuple[LinearSource, ...], dtype: str, bias: bool) -> list[Linear]:
    """The linear maps of a place as loading makes them: one where the formats agree."""
    import jax
    import jax.numpy as jnp

    from models import Linear

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

    from pallas_kernels import quantize

    if format is None:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    weight = jax.ShapeDtypeStruct(shape, jnp.float32)
    return jax.eval_shape(lambda weight: quantize(weight, format), weight)
