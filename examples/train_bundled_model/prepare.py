"""The data stages: the files that ship (`bundle`) and the tokens to train on (`prepare`)."""

from __future__ import annotations

import hashlib
import json
import platform
from pathlib import Path

from examples.train_bundled_model import corpus, tokenizer


def bundle() -> None:
    """Write `held_out.jsonl` and the tokeniser into `mpjax/bundled`, from this Python's library.

    A checkpoint is only good with the tokeniser it was trained with, and perplexities only
    compare on the same held-out text: run this once, before training.
    """
    train, held_out = corpus.split(corpus.documents())
    corpus.write_held_out(corpus.select_bundled(held_out))
    tokenizer.save(tokenizer.train(document.text for document in train))


def prepare(output: Path) -> dict[str, object]:
    """Write the tokens into the folder `output`; return what was written, also as `corpus.json`.

    `train.bin` is the training split of this Python's standard library, `validation.bin` the
    rest of its held-out split, for choices made while training, and `held_out.bin` the bundled
    text. Each is a plain array of little-endian uint16.
    """
    bundled = corpus.read_held_out()
    bundled_paths = {document.path for document in bundled}
    train, held_out = corpus.split(corpus.documents())
    validation = [document for document in held_out if document.path not in bundled_paths]
    bpe = tokenizer.load()

    output.mkdir(parents=True, exist_ok=True)
    summary: dict[str, object] = {"python": platform.python_version()}
    parts = {"train": train, "validation": validation, "held_out": bundled}
    for name, documents in parts.items():
        data = tokenizer.token_stream(bpe, documents).astype("<u2").tobytes()
        (output / f"{name}.bin").write_bytes(data)
        summary[name] = {
            "documents": len(documents),
            "bytes": sum(len(document.text.encode()) for document in documents),
            "tokens": len(data) // 2,
            "sha256": hashlib.sha256(data).hexdigest(),
        }
    (output / "corpus.json").write_text(json.dumps(summary, indent=2) + "\n")
    return summary
