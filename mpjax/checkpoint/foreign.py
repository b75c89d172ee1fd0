"""Describes a folder without a loadable checkpoint, for error messages."""

from __future__ import annotations

from pathlib import Path

# Pattern of files → what to do about such a folder; the first match counts.
REMEDIES = {
    "*.gguf": "load that file itself: a GGUF file is a whole model",
    "adapter_config.json": "an adapter is not a model: load its base, and give it as an adapter",
    "model_index.json": "a pipeline of images is not a language model",
    "consolidated.*": "take the repository in Hugging Face's format, with config.json",
    "*.incomplete": "the download is incomplete: fetch the checkpoint again",
    "*.part": "the download is incomplete: fetch the checkpoint again",
    "*/config.json": "load the folder that it is in",
    "snapshots/*/config.json": "load the folder that it is in",
    "*.safetensors": "config.json is missing: fetch it into the same folder",
    "*.bin": "PyTorch's files are not read: convert them to safetensors",
    "*.onnx": "ONNX's files are not read: take the checkpoint that they were made of",
    "tokenizer*": "a tokenizer is not a model: fetch config.json and *.safetensors to the folder",
}


def describe(folder: Path) -> str:
    """The end of an error message: which files the folder has, and what to do."""
    for pattern, remedy in REMEDIES.items():
        if found := sorted(folder.glob(pattern)):
            return f", and found {found[0].relative_to(folder)}; {remedy}"
    names = sorted(path.name for path in folder.iterdir())
    return f", and found {', '.join(names[:5]) or 'nothing'}"
