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


def test_documents_are_sorted_by_path_whatever_order_they_were_written_in(tmp_path: Path) -> None:
    write(tmp_path, {"b.py": b"b = 1\n", "a/c.py": b"c = 1\r\n", "a.py": "ä = 1\n".encode()})
    assert corpus.documents(tmp_path) == [
        Document("a.py", "ä = 1\n"),
        Document("a/c.py", "c = 1\n"),
        Document("b.py", "b = 1\n"),
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("site-packages/x.py", b"x = 1\n"),
        ("test/test_x.py", b"x = 1\n"),
        ("lib2to3/tests/test_x.py", b"x = 1\n"),
        ("idlelib/idle_test/test_x.py", b"x = 1\n"),
        ("encodings/cp437.py", b"x = 1\n"),
        ("_sysconfigdata__linux_x86_64-linux-gnu.py", b"x = 1\n"),
        ("sitecustomize.py", b"x = 1\n"),
        ("config-3.12-x86_64-linux-gnu/python-config.py", b"x = 1\n"),
        ("blank.py", b"\n\n"),
        ("latin.py", b"# caf\xe9\n"),
        ("table.py", b"names = {\n    'a': 0x00c1,\n    'b': 0x00c2,\n    'c': 0x00c3,\n}\n"),
        ("z_duplicate.py", b"kept = 1\n"),
        ("notes.txt", b"x = 1\n"),
    ],
)
def test_left_out(tmp_path: Path, name: str, content: bytes) -> None:
    write(tmp_path, {"kept.py": b"kept = 1\n", name: content})
    assert [document.path for document in corpus.documents(tmp_path)] == ["kept.py"]


def test_excluded_folders_are_judged_below_the_library_and_not_by_file_name(tmp_path: Path) -> None:
    folder = tmp_path / "test"  # where the library lies is no reason to leave it out
    write(folder, {"test.py": b"x = 1\n"})
    assert [document.path for document in corpus.documents(folder)] == ["test.py"]


def test_docstrings_are_not_tables() -> None:
    lines = ['"""One."""', "'''Two.'''", 'r"""Three."""', "x = 1"]
    assert not corpus.is_table("\n".join(lines))
    assert corpus.is_table("x = (\n'a',\n-1,\n[2,\nb'c')")


def test_an_empty_library_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no Python sources to train on"):
        corpus.documents(tmp_path)


@given(st.lists(st.text(min_size=1, max_size=20), unique=True))
def test_split_is_a_partition_by_path_alone(paths: list[str]) -> None:
    train, held_out = corpus.split(Document(path, "one text") for path in paths)
    assert sorted(d.path for d in train + held_out) == sorted(paths)
    assert not {d.path for d in train} & {d.path for d in held_out}
    assert corpus.split(Document(path, "another") for path in paths)[1] == [
        Document(d.path, "another") for d in held_out
    ]


def test_held_out_share() -> None:
    share = sum(corpus.is_held_out(f"module_{i}.py") for i in range(20_000)) / 20_000
    assert share == pytest.approx(0.035, abs=0.005)


@given(st.from_regex(r"[a-z]{1,3}(/[a-z]{1,3})?", fullmatch=True))
def test_a_module_that_becomes_a_package_stays_on_its_side(module: str) -> None:
    assert corpus.is_held_out(f"{module}.py") == corpus.is_held_out(f"{module}/__init__.py")


def test_long_documents_are_not_bundled() -> None:
    long, short = Document("long.py", "ä" * 20_001), Document("short.py", "ä" * 20_000)
    assert corpus.select_bundled([long, short]) == [short]


@given(st.lists(st.builds(Document, path=st.text(), text=st.text())))
def test_held_out_file_round_trips(
    tmp_path_factory: pytest.TempPathFactory, documents: list[Document]
) -> None:
    file = tmp_path_factory.getbasetemp() / "held_out.jsonl"
    corpus.write_held_out(documents, file)
    assert corpus.read_held_out(file) == documents


def test_bundled_text_is_held_out_of_this_python_too() -> None:
    bundled = corpus.read_held_out()
    assert sum(len(document.text.encode()) for document in bundled) == 150_180
    assert all(corpus.is_held_out(document.path) for document in bundled)
    train, _ = corpus.split(corpus.documents())
    assert not {d.path for d in train} & {d.path for d in bundled}
    assert not {d.text for d in train} & {d.text for d in bundled}
