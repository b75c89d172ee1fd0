"""The corpus: what is left out, and a split that no Python version can break."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.train_bundled_model import corpus
from examples.train_bundled_model.corpus import Document


def write(folder: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("site-packages/x.py", b"x = 1\n"),
        ("test/test_x.py", b"x = 1\n"),
        ("encodings/cp437.py", b"x = 1\n"),
        ("_sysconfigdata__linux_x86_64-linux-gnu.py", b"x = 1\n"),
        ("blank.py", b"\n\n"),
        ("latin.py", b"# caf\xe9\n"),
        ("table.py", b"names = {\n    'a': 0x00c1,\n    'b': 0x00c2,\n    'c': 0x00c3,\n}\n"),
        ("z_duplicate.py", b"kept = 1\n"),
    ],
)
def test_left_out(tmp_path: Path, name: str, content: bytes) -> None:
    write(tmp_path, {"kept.py": b"kept = 1\n", name: content})
    assert [document.path for document in corpus.documents(tmp_path)] == ["kept.py"]


@given(st.lists(st.text(min_size=1, max_size=20), unique=True))
def test_split_is_a_partition_by_path_alone(paths: list[str]) -> None:
    train, held_out = corpus.split(Document(path, "one text") for path in paths)
    assert sorted(d.path for d in train + held_out) == sorted(paths)
    assert not {d.path for d in train} & {d.path for d in held_out}
    assert corpus.split(Document(path, "another") for path in paths)[1] == [
        Document(d.path, "another") for d in held_out
    ]


def test_bundled_text_is_held_out_of_this_python_too() -> None:
    bundled = corpus.read_held_out()
    assert sum(len(document.text.encode()) for document in bundled) == 150_180
    assert all(corpus.is_held_out(document.path) for document in bundled)
    train, _ = corpus.split(corpus.documents())
    assert not {d.path for d in train} & {d.path for d in bundled}
    assert not {d.text for d in train} & {d.text for d in bundled}
