"""Safetensors files and their index, one case a line."""

from __future__ import annotations

import json

import numpy as np

from tests.mpjax.bad_files.ways import (
    DEEP,
    FIRST,
    INDEX,
    POINTER,
    SECOND,
    WEIGHTS,
    Case,
    as_folder,
    config,
    cut,
    entry,
    header,
    index,
    link,
    pipe,
    sharded,
    steps,
    tensors,
    text,
    without,
)

DOWN = "model.layers.0.mlp.down_proj.weight"
TABLES = ("model.embed_tokens.weight", "lm_head.weight")
FLOATS = entry("F32", [2], 0, 8)
LENGTH_8 = (8).to_bytes(8, "little")

HEADERS: list[Case] = [
    ("empty", text(WEIGHTS, b""), "has 0 bytes: a safetensors file begins with 8 bytes of header"),
    ("7 bytes", text(WEIGHTS, b"\0" * 7), "has 7 bytes: a safetensors file begins with"),
    ("git-lfs", text(WEIGHTS, POINTER), "is a git-lfs pointer, not the file itself: run `git lfs"),
    ("web page", text(WEIGHTS, b"<!DOCTYPE html>"), "is a web page, not the file itself"),
    ("zip", text(WEIGHTS, b"PK\3\4" * 9), "is not a safetensors file: its first 8 bytes give a"),
    ("zeros", text(WEIGHTS, bytes(1000)), "the header of"),
    ("short", text(WEIGHTS, LENGTH_8 + b"{}"), "ends inside its header: expected at least 16"),
    ("no JSON", text(WEIGHTS, LENGTH_8 + b'{"a": 1,'), "is not valid JSON"),
    ("no UTF-8", text(WEIGHTS, LENGTH_8 + b"\xff" * 8), "is not a text in UTF-8: byte 0 is 0xff"),
    ("list", text(WEIGHTS, LENGTH_8 + b"[      ]"), "is a JSON list: expected an object"),
    ("deep", header(b'{"a":' + DEEP.encode() + b"}"), "is nested deeper than 64 levels"),
    ("deep metadata", header({"__metadata__": json.loads("[" * 99 + "]" * 99)}), "nested deeper"),
    ("half a pair", header(rb'{"\udc00": {}}'), r"has '\udc00' in a string"),
    ("metadata", header({"__metadata__": {"format": 1}}), "__metadata__ in the header of"),
    ("metadata list", header({"__metadata__": []}), "expected a map of strings"),
    ("twice", header(b'{"a": {}, "a": {}}'), "names 'a' twice"),
    ("number", header({"a": 3}), "is described by 3: expected dtype, shape and data_offsets"),
    ("keys", header({"a": {"dtype": "F32", "shape": [2]}}), "expected dtype, shape and data_off"),
    ("dtype", header({"a": entry("F4", [2], 0, 1)}, b"1"), "has the dtype 'F4': expected one of"),
    ("negative", header({"a": entry("F32", [-2], 0, 8)}, bytes(8)), "has the shape [-2]"),
    ("rank", header({"a": entry("U8", [1] * 65, 0, 1)}, b"1"), "at most 64 non-negative integers"),
    ("empty", header({"a": entry("U8", [0, 2**64], 0, 0)}), "has the shape [0, 18446744073709551"),
    ("before", header({"a": entry("F32", [2], -8, 0)}, bytes(8)), "has the data_offsets [-8, 0]"),
    ("bytes", header({"a": entry("F32", [3], 0, 8)}, bytes(8)), "spans 8 bytes: F32 of shape [3]"),
    (
        "overlap",
        header({"a": FLOATS, "b": entry("U8", [4], 6, 10)}, bytes(10)),
        "overlap by 2 bytes",
    ),
    (
        "hole",
        header({"a": FLOATS, "b": entry("U8", [4], 9, 13)}, bytes(13)),
        "has a hole of 1 bytes between 'a' and tensor 'b'",
    ),
    (
        "hole at the start",
        header({"a": entry("U8", [4], 4, 8)}, bytes(8)),
        "has a hole of 4 bytes between the header and tensor 'a'",
    ),
    ("tail", header({"a": FLOATS}, bytes(11)), "has 3 bytes after its last tensor"),
    ("truncated", cut(WEIGHTS, 1), "is truncated: expected"),
]

WEIGHT_FILES: list[Case] = [
    ("missing", without(WEIGHTS), "has no *.safetensors file, and found tokenizer.json; a"),
    (
        "no index",
        steps(sharded, without(INDEX)),
        "has 2 safetensors files (model-00001-of-00002.safetensors, model-00002-of-00002.safe",
    ),
    ("no shard", steps(sharded, without(SECOND)), f"of which 1 are missing: {SECOND}; fetch them"),
    ("shard: pipe", steps(sharded, pipe(SECOND)), f"{SECOND} is a named pipe"),
    ("shard: folder", steps(sharded, as_folder(FIRST)), f"{FIRST} is a folder: expected a regular"),
    ("shard: link", steps(sharded, link(FIRST, "gone")), f"{FIRST} is a link to gone, which"),
    ("shard: truncated", steps(sharded, cut(SECOND, 4)), f"{SECOND} is truncated: expected"),
    ("index: no map", steps(sharded, text(INDEX, {})), f"{INDEX} has no weight_map: expected a"),
    ("index: elsewhere", index({"a": f"../{FIRST}"}), f"puts tensor 'a' in '../{FIRST}': expected"),
    ("index: empty name", index({"a": ""}), "puts tensor 'a' in '': expected the name of a file"),
    ("index: itself", index({"a": INDEX}), f"{INDEX} is not a safetensors file: its first 8 bytes"),
    (
        "index: many missing shards",
        index({f"a{number}": f"{number}.safetensors" for number in range(1_000)}),
        "of which 1000 are missing: 0.safetensors, 1.safetensors, 10.safetensors, 100.safetensors,"
        " 101.safetensors, ...; fetch them",
    ),
    (
        "index: a tensor that is nowhere",
        index(lambda written: written.update(absent=FIRST)),
        f"says that tensor 'absent' is in {FIRST}, which lacks it",
    ),
    (
        "index: a tensor of another shard",
        index(lambda written: written.update({name: SECOND for name in written})),
        f"is in {SECOND}, which lacks it",
    ),
    ("tensor: missing", tensors(lambda t: t.pop(DOWN)), f"lacks 1 tensor ({DOWN})"),
    (
        "tensor: more",
        tensors(lambda t: t.update({"a\nb": np.ones(1)})),
        r"holds 1 tensor ('a\nb') that the model has no place for",
    ),
    ("tensor: shape", tensors(lambda t: t.update({DOWN: t[DOWN].T.copy()})), "of shape [64, 128]"),
    ("tensor: none", tensors(lambda t: t.clear()), "config.json says that there are 2 layers, and"),
    (
        "tensor: scalars for a tied head",
        steps(
            config(tie_word_embeddings=True),
            tensors(lambda t: t.update(dict.fromkeys(TABLES, np.ones((), np.float32)))),
        ),
        "model.embed_tokens.weight is float32 []: expected",
    ),
    (
        "tensor: NaN",
        tensors(lambda t: t["model.norm.weight"].fill(np.nan)),
        "model.norm.weight: 64 of the 64 values are NaN or infinite",
    ),
]
