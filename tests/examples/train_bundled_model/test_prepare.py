"""The data stages, on a tiny standard library."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from examples.train_bundled_model import corpus, tokenizer
from examples.train_bundled_model.__main__ import main
from examples.train_bundled_model.corpus import Document


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> dict[str, Document]:
    """A library of one bundled document (changed), one validation and one training document."""
    # Modules known to lie on these sides of the split.
    found = {
        "bundled": Document("queue.py", "changed = 1\n"),
        "validation": Document("collections/__init__.py", "long = 1\n"),
        "train": Document("os.py", "import sys\n"),
    }
    monkeypatch.setattr(corpus, "documents", lambda: list(found.values()))
    return found


def test_prepare_writes_tokens_of_each_split(
    library: dict[str, Document], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / "data"
    main(["prepare", "--output", str(output)])
    bpe = tokenizer.load()

    def read(name: str) -> str:
        tokens = np.fromfile(output / f"{name}.bin", dtype="<u2")
        return bpe.decode(tokens.tolist(), skip_special_tokens=False)

    assert read("train") == "<|endoftext|>import sys\n<|endoftext|>"
    assert read("validation") == "<|endoftext|>long = 1\n<|endoftext|>"
    bundled = [document.text for document in corpus.read_held_out()]
    assert read("held_out") == "<|endoftext|>" + "".join(f"{t}<|endoftext|>" for t in bundled)
    summary = json.loads((output / "corpus.json").read_text())
    assert json.loads(capsys.readouterr().out) == summary
    assert summary["train"]["documents"] == 1
    assert summary["train"]["bytes"] == len("import sys\n")
    assert summary["train"]["tokens"] == (output / "train.bin").stat().st_size // 2


def test_bundle_ships_held_out_text_and_learns_from_the_rest(
    library: dict[str, Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: dict[str, list[object]] = {}
    monkeypatch.setattr(corpus, "write_held_out", lambda d: written.update(held_out=list(d)))
    monkeypatch.setattr(tokenizer, "train", lambda texts: list(texts))
    monkeypatch.setattr(tokenizer, "save", lambda texts: written.update(learned=texts))
    main(["bundle"])
    assert written == {
        "held_out": [library["bundled"], library["validation"]],
        "learned": [library["train"].text],
    }
