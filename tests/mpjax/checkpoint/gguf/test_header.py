"""Headers of GGUF files: sound ones, and those whose counts, lengths and offsets are lies."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from mpjax.checkpoint.gguf.header import is_gguf, read_header
from mpjax.errors import CheckpointError
from tests.mpjax.bad_files.ways import bounds
from tests.mpjax.checkpoint.gguf.write_gguf import TYPES, gguf, random_blocks, text, value

METADATA = {"a": 7, "b": 0.5, "c": "text", "d": True, "e": ["x", "yz"], "f": [1, 2, 3], "g": []}


def sound() -> bytes:
    rng = np.random.default_rng(0)
    shapes = {kind: (3, 2 * size) for kind, (_, size, _) in TYPES.items()}
    blocks = {kind: random_blocks(kind, shape, rng) for kind, shape in shapes.items()}
    return gguf(METADATA, {kind.lower(): (kind, shapes[kind], blocks[kind]) for kind in TYPES})


def test_a_sound_file(tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(data := sound())
    header = read_header(path)
    found = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in header.metadata.items()}
    assert found == METADATA
    for kind, (_, size, nbytes) in TYPES.items():
        tensor = header.tensors[kind.lower()]
        assert (tensor.type.name, tensor.shape) == (kind, (3, 2 * size))
        assert tensor.end - tensor.begin == 6 * nbytes
    last = header.tensors["q6_k"]
    expected = random_blocks("F32", (3, 2), np.random.default_rng(0))
    first = header.tensors["f32"]
    assert data[first.begin : first.end] == expected
    assert last.end <= len(data)


def test_what_is_a_gguf_file(tmp_path):
    (tmp_path / "a.gguf").write_bytes(b"")
    (tmp_path / "blob").write_bytes(sound())
    (tmp_path / "text").write_bytes(b"GGU")
    (tmp_path / "folder.gguf").mkdir()
    found = [is_gguf(tmp_path / name) for name in ("a.gguf", "blob", "text", "folder.gguf", "no")]
    assert found == [True, True, False, False, False]


def lie(count: int, entries: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, count, entries) + rest


def tensor(*, dimensions=(32,), kind=8, offset=0, name="t", given=None) -> bytes:
    described = text(name) + struct.pack("<I", len(dimensions) if given is None else given)
    return described + struct.pack(f"<{len(dimensions)}QIQ", *dimensions, kind, offset)


HUGE = 2**63
LIES = [
    (b"", "is empty: fetch it again"),
    (b"PK\3\4", "is not a GGUF file: it begins with b'PK"),
    (b"version https://git-lfs.github.com/spec/v1\n", "is a git-lfs pointer"),
    (b"GGUF\0\0", "ends inside its version, at byte 4 of 6"),
    (lie(0, 0, version=1), "has the GGUF version 1: expected 2 or 3"),
    (lie(0, 0, version=3 << 24), "has the GGUF version 50331648: expected 2 or 3 in little-endian"),
    (lie(HUGE, 0), "says that it has 9223372036854775808 tensors: expected at most 0"),
    (lie(0, HUGE), "says that it has 9223372036854775808 metadata entries: expected at most 0"),
    (lie(2**16, 2**17, bytes(2**22)), "says that it has 131072 metadata entries: expected at mo"),
    (lie(0, 1, struct.pack("<Q", HUGE) + bytes(9)), "has a name of 9223372036854775808 bytes"),
    (lie(0, 1, text("\0" * 5)), "ends inside the type of"),
    (lie(0, 1, struct.pack("<Q", 2) + b"\xff\xfe" + bytes(9)), "is not a text in UTF-8"),
    (lie(0, 1, text("a") + struct.pack("<II", 13, 0)), "'a' has values of the type 13"),
    (lie(0, 1, text("a") + struct.pack("<IIQ", 9, 9, 0)), "'a' has values of the type 9"),
    (lie(0, 1, text("a") + struct.pack("<IIQ", 9, 8, HUGE)), "9223372036854775808 values of 'a'"),
    (lie(0, 1, text("a") + struct.pack("<IIQ", 9, 12, 9) + bytes(9)), "ends inside 'a'"),
    (lie(0, 1, text("a") + struct.pack("<IQ", 8, HUGE)), "ends inside 'a'"),
    (lie(0, 2, (text("a") + value(1)) * 2), "names 'a' twice"),
    (lie(2, 0, tensor() * 2), "names 't' twice"),
    (lie(1, 0, tensor(given=HUGE >> 32)), "'t' in .* has 2147483648 dimensions: expected at most"),
    (lie(1, 0, tensor(dimensions=(2**40, 2**40))), r"has the shape \[1099511627776,"),
    (lie(1, 0, tensor(dimensions=(0, 2**63))), r"has the shape \[9223372036854775808, 0\]"),
    (lie(1, 0, tensor(kind=15)), r"has the type Q8_K \(15\), which is not read: take a file"),
    (lie(1, 0, tensor(kind=999)), r"has the type with the number \(999\), which is not read"),
    (lie(1, 0, tensor(dimensions=(33,))), "has rows of 33 numbers: expected a multiple of 32"),
    (lie(1, 0, tensor(offset=1) + bytes(99)), "has the offset 1: expected a multiple of 32"),
    (lie(1, 0, tensor() + bytes(40)), "'t' in .* ends at byte 98, and the file has 97"),
    (lie(1, 0, tensor(offset=HUGE)), "'t' in .* ends at byte 9223372036854775906, and the file"),
    (lie(2, 0, tensor() + tensor(name="u") + bytes(99)), "'t' and 'u' in .* overlap by 34 bytes"),
    (
        lie(1, 1, text("general.alignment") + value(0) + tensor()),
        "general.alignment is 0: expected a multiple of 8",
    ),
    (lie(1, 1, text("general.alignment") + value("8") + tensor()), "general.alignment is '8':"),
]


@pytest.mark.parametrize(("data", "said"), LIES, ids=[said[:50] for _, said in LIES])
def test_lies(data, said, tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    with bounds(), pytest.raises(CheckpointError, match=said) as caught:
        read_header(path)
    assert "\n" not in str(caught.value)


def refusal(path: Path) -> str | None:
    try:
        read_header(path)
    except CheckpointError as error:
        return str(error)
    return None


@hypothesis.settings(max_examples=150)
@hypothesis.given(st.data())
def test_changes_at_random(tmp_path_factory, data):
    """A changed file is read or refused in a sentence, in memory of its own size."""
    whole = sound()
    place = data.draw(st.integers(4, 700))  # in the header
    length = data.draw(st.sampled_from([1, 2, 4, 8]))
    patch = data.draw(
        st.binary(min_size=length, max_size=length)
        | st.sampled_from([b"\xff" * length, bytes(length), b"\x7f" * length])
    )
    changed = whole[:place] + patch + whole[place + length :]
    if data.draw(st.integers(0, 4)) == 0:
        changed = changed[: data.draw(st.integers(4, len(changed)))]
    path = tmp_path_factory.getbasetemp() / "changed.gguf"
    path.write_bytes(changed)
    tracemalloc.start()
    with bounds():
        message = refusal(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert message is None or (str(path) in message and "\n" not in message)
    assert peak < 2**20 + 10 * len(changed)
