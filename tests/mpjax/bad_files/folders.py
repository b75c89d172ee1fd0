"""Folders that hold something else than a checkpoint, one case a line."""

from __future__ import annotations

from tests.mpjax.bad_files.ways import WEIGHTS, Case, only, without

FOLDERS: list[Case] = [
    (said, way, said)
    for way, said in [
        (only(), "expected a Hugging Face checkpoint, or one that mpjax saved, and found nothing"),
        (only("model.gguf"), "and found model.gguf; load that file itself: a GGUF file is a whole"),
        (only("tokenizer.model"), "and found tokenizer.model; a tokenizer is not a model: fetch c"),
        (only("tokenizer.json"), "and found tokenizer.json; a tokenizer is not a model: fetch con"),
        (only(WEIGHTS), "and found model.safetensors; config.json is missing: fetch it into the"),
        (only("pytorch_model.bin"), "and found pytorch_model.bin; PyTorch's files are not read:"),
        (only("consolidated.00.pth", "params.json"), "and found consolidated.00.pth; take the"),
        (only("adapter_config.json", "a.safetensors"), "and found adapter_config.json; an adapter"),
        (only("a.safetensors.incomplete"), "and found a.safetensors.incomplete; the download is"),
        (only("snapshots/1a2b/config.json"), "and found snapshots/1a2b/config.json; load the"),
        (only("Qwen3-8B/config.json"), "and found Qwen3-8B/config.json; load the folder that it"),
        (without("config.json"), "has neither config.json nor mpjax.json: expected a Hugging Face"),
    ]
]
