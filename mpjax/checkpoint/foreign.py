"""Tells what a folder holds in the place of a checkpoint, and what helps."""

from __future__ import annotations

from pathlib import Path

# Files, and what to do where there are such; the first pattern that matches counts.
REMEDIES = {
    "*.gguf": "GGUF is not read: take the safetensors checkpoint that it was made from",
    "adapter_config.json": "an adapter is no model: merge it into its base model first",
    "consolidated.*": "take the repository in Hugging Face's format, with config.json",
    "*.incomplete": "this download did not end: fetch the checkpoint again",
    "*.part": "this download did not end: fetch the checkpoint again",
    "*/config.json": "load the folder that it is in",
    "snapshots/*/config.json": "load the folder that it is in",
    "*.safetensors": "config.json is missing: fetch it into the same folder",
    "*.bin": "PyTorch's files are not read: convert them to safetensors",
    "tokenizer*": "a tokenizer is no model: fetch config.json and *.safetensors to the same place",
}


def describe(folder: Path) -> str:
    """What a folder without a checkpoint holds, and what to do about it; the end of a sentence."""
    for pattern, remedy in REMEDIES.items():
        if found := sorted(folder.glob(pattern)):
            return f", and found {found[0].relative_to(folder)}; {remedy}"
    names = sorted(path.name for path in folder.iterdir())
    return f", and found {', '.join(names[:5]) or 'nothing'}"
