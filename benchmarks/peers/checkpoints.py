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
from pathlib import Path

from mpjax.bench import checkpoint

CONFIGS = Path(__file__).parent / "configs"
# Model → the precision of the random weights, and the format of the export.
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
        config = json.loads((CONFIGS / f"{name}.json").read_text())
        print(checkpoint.write(given.folder / name, config, *FORMATS[name]))


if __name__ == "__main__":
    main()
