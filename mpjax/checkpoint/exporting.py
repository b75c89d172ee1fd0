"""Exports a model to a Hugging Face folder for other libraries and servers.

The folder holds config.json, safetensors files and the tokenizer's files. Packed weights are
re-packed losslessly in a layout that others read.
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

# Tokenizer files, including those that only other libraries read.
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
    """Writes a model into a Hugging Face folder; writes nothing if it fails.

    vLLM, transformers and `mpjax.load` read it; mpjax restores all but dequantised weights bit for
    bit. docs/precision.md lists which server reads which format. An EAGLE-3 head stays in its own
    folder.

    Returns the names of packed tables (head or embedding) that are dequantised to the model's
    dtype, because the format can't hold them or because of `plain_head`; none for `plain`.

    format: how the packed weights are written:
        `awq`: 4 bits in groups, AutoAWQ's `gemm` layout.
        `gptq`, `gptq_v2`: 4 and 8 bits, also with act-order and different formats per map; `gptq`
            stores zero points minus 1, so it can't store 0.
        `pack-quantized`: 4 and 8 bits, also different per map (compressed-tensors).
        `int-quantized`: W8A8 (compressed-tensors). `float-quantized`: FP8 with a scale for each
            output channel, or for blocks of 128 × 128 (compressed-tensors). `fp8`: blocks of 128 ×
            128 in the layout of DeepSeek-V3 and Qwen.
        `mxfp4`: gpt-oss's experts in its published layout, one tensor per layer.
        `plain`: every map is dequantised to the model's dtype, and activations are not rounded.
            Works for any model.
        By default the format that most servers read: compressed-tensors for symmetric integers,
            W8A8 and FP8, `awq` and `gptq_v2` for integers with zero points or act-order, and
            `plain` if no map is packed.
    plain_head: dequantise a packed head, such as the H8 of `mpjax.quantize`, even if the format
        could hold it: some servers read only one format per checkpoint. Warns, before anything is
        written, if transformers can't load the export.
    overwrite: replace an earlier export. It is kept until the new one is complete, so the disk must
        have room for both.
    progress: whether to show a bar on stderr; by default if stderr is a terminal.

    Unpacked maps stay in the model's dtype, a tied head stays tied, and per-head scales of an FP8
    cache are written if the format is one of compressed-tensors. The rest of config.json is copied
    from `lm.source`.

    Raises ValueError if the folder holds other files or another process writes to it; if the format
    can't hold the weights; and for a model with adapters, or whose source has no matching
    config.json. Raises mpjax.files.disk.DiskSpaceError if the disk has too little room, before
    anything is written if the free space is known.
    """
    folder, lm = Path(os.path.realpath(Path(folder).expanduser())), lm.without_drafter()
    clean_up(folder)  # may restore a folder that a killed export has moved away
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
    """Writes all files of an export, replacing an earlier one."""
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
        require_replaceable(folder, overwrite)  # again: writing took a while


def require_replaceable(folder: Path, overwrite: bool) -> None:
    """Raises ValueError unless a folder is empty, or an earlier export and `overwrite` is set."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not folder.is_dir() or is_saved(folder) or not exported_config.is_marked(folder):
        raise ValueError(
            f"{folder} exists and is nothing that mpjax has exported: choose another folder"
        )
    if not overwrite:
        raise ValueError(f"{folder} holds an exported model: replace it with overwrite=True")
