"""Writes checkpoints with random weights in the shapes of published models.

python -m benchmarks.peers.checkpoints FOLDER

FOLDER/NAME has the published config.json and a small tokenizer, whose texts nobody reads, and
FOLDER/NAME-FORMAT a whole checkpoint in that format, as `mpjax.export` writes it: 6 GB of Qwen3-8B
in AWQ and 14 GB of gpt-oss-20b in MXFP4. The models must fit on the default device.
"""

from __future__ import annotations

import argparse
import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import mpjax
from mpjax.bench.random_model import random_model
from mpjax.models.registry import FAMILIES
from mpjax.precision import Precision

CONFIGS = Path(__file__).parent / "configs"
# The precision in which random weights are made, and the format of the export, of each model.
FORMATS = {"qwen3-8b": ("W4A16KV16", "awq"), "gpt-oss-20b": ("WMXFP4A16KV16", "mxfp4")}


def main() -> None:
    """Writes the checkpoints."""
    parser = argparse.ArgumentParser(
        description=inspect.cleandoc(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--models", nargs="+", choices=FORMATS, default=[*FORMATS])
    given = parser.parse_args()
    for name in given.models:
        print(write(given.folder, name, json.loads((CONFIGS / f"{name}.json").read_text())))


def write(folder: Path, name: str, config: dict[str, Any]) -> Path:
    """Writes a model's folders; returns that of the whole checkpoint. config: its config.json."""
    source = folder / name
    source.mkdir(parents=True)
    (source / "config.json").write_text(json.dumps(config, indent=1))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(mpjax.bundled_model() / file, source / file)
    text, format = FORMATS[name]
    precision, decoder = Precision.parse(text), FAMILIES[config["architectures"][0]]
    model = random_model(decoder, decoder.config_from_hf(config), precision.weights)
    out = folder / f"{name}-{format}"
    mpjax.export(mpjax.LanguageModel(model, None, precision.kv, source), out, format=format)
    return out


if __name__ == "__main__":
    main()
