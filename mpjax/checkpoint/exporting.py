"""Exports a model to a Hugging Face folder, which other libraries and servers load.

The folder holds config.json, safetensors files and the files of the tokenizer. Packed weights stay
what they are, bit for bit, in a layout that others read.
"""

from __future__ import annotations

import dataclasses
import json
import os
import warnings
from pathlib import Path

from mpjax.checkpoint import exported_config, model_arrays, shards
from mpjax.checkpoint.description import is_saved
from mpjax.checkpoint.export_plan import ExportPlan, make_plan
from mpjax.checkpoint.folder import CONFIG_NAME
from mpjax.checkpoint.locate import locate
from mpjax.checkpoint.progress import bytes_bar
from mpjax.checkpoint.saving import (
    TOKENIZER_FILES,
    require_all_held,
    require_tokenizer_files,
)
from mpjax.checkpoint.staging import clean_up, staged
from mpjax.files.disk import naming_a_full_disk, require_room
from mpjax.language_model import LanguageModel
from mpjax.models.sharded import ShardedDecoder

# Files of the tokenizer, those that only other libraries read among them.
COPIED_FILES = (
    *(name for name in TOKENIZER_FILES if name != CONFIG_NAME),
    *("tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json"),
)


def export(
    lm: LanguageModel,
    folder: str | os.PathLike[str],
    *,
    format: str | None = None,
    plain_head: bool = False,
    overwrite: bool = False,
    progress: bool | None = None,
) -> tuple[str, ...]:
    """Writes a model into a Hugging Face folder: all of it, or on failure nothing.

    vLLM, transformers and `mpjax.load` read it, the last bit for bit, apart from what is
    dequantised. docs/precision.md says which server takes which format.

    Returns the names of packed tables, the head or the embedding, that are dequantised to the dtype
    that the model computes in, because the format has no place for them or by `plain_head`; none
    for `plain`.

    format: how the packed weights are written:
        `awq`: 4 bits in groups, AutoAWQ's `gemm` layout.
        `gptq`, `gptq_v2`: 4 and 8 bits, also with channels in another order (act-order) and with
            maps that differ; `gptq` stores zero points minus 1, and so none of 0.
        `pack-quantized`: 4 and 8 bits, maps that differ too (compressed-tensors).
        `int-quantized`: W8A8 (compressed-tensors). `float-quantized`: FP8 with a scale for each
            output channel, or for blocks of 128 × 128 (compressed-tensors). `fp8`: the latter, as
            DeepSeek-V3 and Qwen have it.
        `mxfp4`: the experts of gpt-oss as it is published, all of a layer in one tensor.
        `plain`: none stays packed; every map is dequantised to the dtype that the model computes
            in, and activations are not rounded. Any model can be written so.
        By default what most servers take: compressed-tensors' for symmetric integers, W8A8 and FP8,
            `awq` and `gptq_v2` for integers with zero points or channels in another order, and
            `plain` where no map is packed.
    plain_head: dequantise a packed head, such as the H8 of `mpjax.quantize`, which the format could
        hold: some servers read maps of one format only. Where transformers would not load the
        export, a warning says so before anything is written.
    overwrite: replace an earlier export. It stays whole until the new one is, so that the disk must
        have room for both.
    progress: whether to show a bar on stderr; by default where stderr is a terminal.

    Maps that are not packed stay in the dtype that the model computes in, a tied head stays tied,
    and scales of heads for an FP8 cache are written where the format is compressed-tensors'. The
    rest of config.json is that of `lm.source`.

    Raises ValueError where the folder holds anything else, or another process writes there; where
    the format can't hold the weights, with what helps; and where the model holds adapters, or its
    source has no config.json of it. Raises mpjax.files.disk.DiskSpaceError where the disk has not
    enough room, before anything is written if that can be known.
    """
    folder = Path(os.path.realpath(Path(folder).expanduser()))
    clean_up(folder)  # which may put a folder there that a killed export has moved away
    require_replaceable(folder, overwrite)
    if isinstance(lm.model, ShardedDecoder):
        lm = dataclasses.replace(lm, model=lm.model.whole())
    require_all_held(lm.model, model_arrays.take(lm.model))
    require_tokenizer_files(lm)
    plan = make_plan(lm.model, format, plain_head=plain_head)
    if plan.caution:
        warnings.warn(plan.caution, stacklevel=2)
    _write(lm, plan, folder, overwrite, progress)
    return plan.dequantized


def _write(
    lm: LanguageModel, plan: ExportPlan, folder: Path, overwrite: bool, progress: bool | None
) -> None:
    """Writes all files of an export, which replace those of an earlier one."""
    config = json.dumps(exported_config.make(lm, plan.quantization), indent=2)
    files = shards.divide(plan.specs())
    source = locate(lm.source)
    weights = sum(file.nbytes for file in files)
    texts = len(config) + len(shards.index(files))
    needed = weights + texts + source.file_bytes(COPIED_FILES)
    what = f"exporting {folder}"
    with naming_a_full_disk(needed, what, folder.parent), staged(folder) as new:
        require_room(needed, what, folder.parent)
        source.copy_files(COPIED_FILES, new)
        (new / CONFIG_NAME).write_text(config, encoding="utf-8")
        with (
            bytes_bar("Exporting", folder, progress, weights) as advance,
            shards.writing(new, files) as write,
        ):
            for name, array in plan.tensors():
                write(name, array, advance)
        require_replaceable(folder, overwrite)  # again: writing has taken its time


def require_replaceable(folder: Path, overwrite: bool) -> None:
    """Raises ValueError unless a folder is empty, or an earlier export that is to be replaced."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir() or is_saved(folder) or not exported_config.is_marked(folder):
        raise ValueError(
            f"{folder} exists and is nothing that mpjax has exported: choose another folder"
        )
    if not overwrite:
        raise ValueError(f"{folder} holds an exported model: replace it with overwrite=True")
