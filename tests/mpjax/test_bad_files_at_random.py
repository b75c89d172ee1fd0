"""Files changed at random: each is read right or refused in a sentence, and nothing else happens.

Faults that these tests found are in the lists of the folder `bad_files`, too.
"""

from __future__ import annotations

import contextlib
import copy
import json
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import safetensors
from hypothesis import strategies as st

import mpjax
from mpjax.checkpoint import CheckpointError, huggingface
from mpjax.checkpoint.safetensors import DTYPES, Checkpoint
from mpjax.checkpoint.schemes import registry
from mpjax.cli import info
from mpjax.kernels.gemm.plans import OPERATION
from mpjax.kernels.plans import TableError, tables
from mpjax.text.tokenizer import Tokenizer
from tests.mpjax.bad_files.ways import (
    INDEX,
    REMOVED,
    WEIGHTS,
    bounds,
    edit,
    entry,
    header,
    sharded,
    steps,
    text,
    without,
    write_sound,
)
from tests.mpjax.checkpoint.write_checkpoint import (
    AWQ,
    CONFIGS,
    GPTQ,
    HQQ,
    LLAMA3_SCALING,
    SQUARE,
    compressed_fp8,
    compressed_integers,
    linear_shapes,
    pack_random,
    random_tensors,
    write_checkpoint,
)

SPECIAL: list[Any] = [
    *(None, True, False, 0, -1, 2, 4, 2**31, 2**64, 10**30, 10**400, 1.0, 2.5, -0.0, 1e308),
    *(float("inf"), float("nan"), "", "2", "false", "\0", "\u2028", "linear", "</s>", "a" * 300),
]
Read = Callable[[Path], Any]


def values() -> st.SearchStrategy[Any]:
    """JSON values: those that programs stumble over, and others."""
    plain = st.sampled_from(SPECIAL) | st.integers() | st.text(max_size=3)
    names = st.sampled_from(["a", "0", "content", "rope_type", "quant_method"])
    return st.recursive(
        plain,
        lambda v: st.lists(v, max_size=3) | st.dictionaries(names, v, max_size=3),
        max_leaves=4,
    )


def paths(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Where the values inside a JSON value are."""
    children = value.items() if isinstance(value, dict) else enumerate(value)
    for key, child in children:
        yield (*path, key)
        if isinstance(child, dict | list):
            yield from paths(child, (*path, key))


def changed(draw: Callable[..., Any], value: Any, extra: tuple[str, ...] = ()) -> Any:
    """A JSON value after one to three changes: a value in it is another, or is gone."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, 3))):
        *parents, last = draw(st.sampled_from([*paths(value), *((key,) for key in extra)]))
        node = value
        for key in parents:
            node = node[key]
        if draw(st.integers(0, 7)) or isinstance(node, list):
            node[last] = draw(values())
        else:
            node.pop(last, None)
        if not value:
            break
    return value


def damaged(draw: Callable[..., Any], data: bytes) -> bytes:
    """Bytes after one of the accidents of disks and networks."""
    place = draw(st.integers(0, max(len(data) - 1, 0)))
    kind = draw(st.sampled_from(["cut", "flip", "zeros", "twice", "insert"]))
    if kind == "cut":
        return data[:place]
    if kind == "flip" and data:
        flipped = data[place] ^ 1 << draw(st.integers(0, 7))
        return data[:place] + bytes([flipped]) + data[place + 1 :]
    if kind == "zeros":
        return data[:place] + bytes(len(data) - place)
    return data[:place] + (data[place:] * 2 if kind == "twice" else draw(st.binary(min_size=1)))


def require_read_or_refused(read: Read, folder: Path) -> Any:
    """The result of a read; None if it is refused, in one short sentence that can be shown."""
    with bounds(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* does not name .* of the shards' tensors")
        try:
            return read(folder)
        except CheckpointError as error:
            message = str(error)
    assert "\n" not in message
    assert str(folder) in message or "model." in message  # the file, or the tensor
    assert len(message.encode()) < 2000
    return None


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    return write_sound(tmp_path_factory.mktemp("sound") / "model")


at_random = hypothesis.settings(suppress_health_check=list(hypothesis.HealthCheck))


@st.composite
def headers(draw: Any) -> tuple[dict[str, Any], bytes]:
    """A sound header with its bytes, of which values are changed more often than not."""
    found: dict[str, Any] = draw(st.sampled_from([{}, {"__metadata__": {"format": "pt"}}]))
    found, position = dict(found), 0
    for name in draw(st.lists(st.text(max_size=3), max_size=3, unique=True)):
        dtype = draw(st.sampled_from([*DTYPES]))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        end = position + int(np.prod(shape, dtype=int)) * DTYPES[dtype].itemsize
        found[name], position = entry(dtype, shape, position, end), end
    if found and draw(st.integers(0, 3)):
        found = changed(draw, found, ("__metadata__",))
    return found, draw(st.binary(min_size=position, max_size=position))


@at_random
@hypothesis.given(headers())
def test_headers_are_read_as_by_the_package_of_the_format(tmp_path_factory, written):
    folder = tmp_path_factory.getbasetemp() / "header"
    folder.mkdir(exist_ok=True)
    header(*written)(folder)
    checkpoint = require_read_or_refused(Checkpoint.open, folder)
    try:
        expected = dict(safetensors.deserialize((folder / WEIGHTS).read_bytes()))
    except Exception:  # the package raises its own; what it refuses may be read
        return
    if checkpoint is None:  # types of less than a byte, and shapes that numpy has not
        assert any(
            tensor["dtype"] not in DTYPES
            or np.prod([max(n, 1) for n in tensor["shape"]]) >= 2**59
            or len(tensor["shape"]) > 64
            for tensor in expected.values()
        )
        return
    assert set(checkpoint.tensors) == set(expected)
    for name, tensor in expected.items():
        array = checkpoint.read(name)
        assert (array.shape, array.tobytes()) == (tuple(tensor["shape"]), bytes(tensor["data"]))
        assert array.dtype == DTYPES[tensor["dtype"]]


def packed(folder: Path, rng: np.random.Generator, written: dict[str, Any]) -> Path:
    hf = CONFIGS["qwen2"] | SQUARE | {"quantization_config": written, "sliding_window": 8}
    tensors = random_tensors(hf, rng, np.float16)
    for name in linear_shapes(hf):
        pack_random(tensors, hf, name, rng)
    return write_checkpoint(folder, hf | {"use_sliding_window": True}, tensors)


@pytest.fixture(scope="module")
def configured(sound, tmp_path_factory):
    """Checkpoints whose config.json have different keys."""
    folder, rng = tmp_path_factory.mktemp("configured"), np.random.default_rng(0)
    rules = {"dynamic": {"-:.*nothing": {}, "+:.*": {"bits": 4}}, "meta": {"static_groups": True}}
    windows = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    hf = CONFIGS["mistral"] | windows | {"rope_parameters": LLAMA3_SCALING}
    fp8 = compressed_fp8("block", "group") | {"kv_cache_scheme": {"num_bits": 8}}
    return [
        sound,
        write_checkpoint(folder / "mistral", hf, random_tensors(hf, rng)),
        write_checkpoint(folder / "fp8", hf | {"quantization_config": fp8}, {}),
        packed(folder / "gptq", rng, GPTQ | rules),
        packed(folder / "awq", rng, AWQ),
    ]


KEYS = (
    *("architectures", "rope_scaling", "rope_parameters", "sliding_window", "layer_types"),
    *("max_window_layers", "quantization_config", "hidden_act", "dtype", "text_config"),
)


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[None]:
    """Puts a file back at the end."""
    before = path.read_bytes()
    try:
        yield
    finally:
        path.write_bytes(before)


@at_random
@hypothesis.given(st.data())
def test_values_of_config_json(configured, data):
    folder = data.draw(st.sampled_from(configured))
    with replaced(path := folder / "config.json"):
        path.write_text(json.dumps(changed(data.draw, json.loads(path.read_text()), KEYS)))
        if require_read_or_refused(info.inspect, folder):
            require_read_or_refused(mpjax.load, folder)


def group(layout: str) -> dict[str, Any]:
    """A group of a mixture."""
    [usual] = compressed_integers(layout)["config_groups"].values()
    return usual | {"format": layout, "targets": [layout, "re:.*"]}


GROUPS = {layout: group(layout) for layout in ("pack-quantized", "int-quantized")}
SETTINGS = [
    *(HQQ, AWQ | {"version": "gemv_fast"}, compressed_integers("int-quantized")),
    HQQ | {"quant_config": {"mlp.down_proj": HQQ["quant_config"]}},
    compressed_integers() | {"format": "mixed-precision", "config_groups": GROUPS},
    {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO", "kv_cache_scheme": {"num_bits": 8}},
    {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"a.*": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4"}},
    },
]


@at_random
@hypothesis.given(st.data())
def test_settings_of_schemes(data):
    """A policy that is read can say its formats, and find the settings of a module."""
    written, message = changed(data.draw, data.draw(st.sampled_from(SETTINGS))), ""
    try:
        policy = registry.read(written)
        assert all(choice.formats for choice in policy.choices)
        policy.reader("model.layers.0.mlp.down_proj").format("mlp.down_proj", 64)
    except CheckpointError as error:
        message = str(error)
    assert len(message.encode()) < 2000
    assert "\n" not in message


@pytest.fixture(scope="module")
def folders(sound, tmp_path_factory):
    """Files beside config.json, and a sound folder in which each is read."""
    ways = {
        INDEX: sharded,
        "special_tokens_map.json": edit("tokenizer_config.json", added_tokens_decoder=REMOVED),
        "chat_template.json": steps(
            without("chat_template.jinja"),
            text("chat_template.json", {"chat_template": [{"name": "default", "template": "a"}]}),
        ),
    }
    others = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    found = dict.fromkeys(others, sound)
    for name, way in ways.items():
        found[name] = shutil.copytree(sound, tmp_path_factory.mktemp("folder") / "model")
        way(found[name])
    return found


def read_all(folder: Path) -> None:
    """Reads what loading reads but for the numbers, and uses it."""
    huggingface.decoder_config(folder, huggingface.read_config(folder))
    Checkpoint.open(folder)
    tokenizer = Tokenizer.from_folder(folder)
    tokenizer.decode(tokenizer.encode("a </s> b"))


@at_random
@hypothesis.given(st.data())
def test_values_of_other_files(folders, data):
    name, folder = data.draw(st.sampled_from([*folders.items()]))
    with replaced(path := folder / name):
        path.write_text(json.dumps(changed(data.draw, json.loads(path.read_text()))))
        require_read_or_refused(read_all, folder)


@at_random
@hypothesis.given(st.data())
def test_bytes_of_any_file(sound, folders, data):
    more = ["config.json", "chat_template.jinja", WEIGHTS]
    name, folder = data.draw(st.sampled_from([*folders.items(), *((name, sound) for name in more)]))
    with replaced(path := folder / name):
        path.write_bytes(damaged(data.draw, path.read_bytes()))
        require_read_or_refused(read_all, folder)


@pytest.fixture(scope="module")
def saved(sound, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved") / "model"
    mpjax.save(mpjax.load(sound, precision="W4g32A16KV8"), folder)
    return folder


@at_random
@hypothesis.given(st.data())
def test_files_of_a_saved_model(saved, data):
    name = data.draw(st.sampled_from(["mpjax.json", "mpjax.json", "weights.safetensors"]))
    with replaced(path := saved / name):
        if name == "mpjax.json" and data.draw(st.booleans()):
            path.write_text(json.dumps(changed(data.draw, json.loads(path.read_text()))))
        else:
            path.write_bytes(damaged(data.draw, path.read_bytes()))
        if require_read_or_refused(info.inspect, saved):
            require_read_or_refused(mpjax.load, saved)


TABLE = {
    "device": "NVIDIA Test 1",
    "stamps": [{"jax": "0.11"}],
    "gemm": {
        "uint4:g128": {
            "4096x6144": {
                "16": {
                    **{"implementation": "triton", "tile_m": 16, "tile_n": 64, "splits": 2},
                    **{"warps": 2, "stages": 3, "microseconds": 7.25},
                },
                "64": {"implementation": "dequantize", "microseconds": 262.0},
            }
        }
    },
}


@at_random
@hypothesis.given(st.data())
def test_tuning_tables(tmp_path_factory, data):
    path = tmp_path_factory.getbasetemp() / "table.json"
    written = json.dumps(changed(data.draw, TABLE)).encode()
    path.write_bytes(written if data.draw(st.booleans()) else damaged(data.draw, written))
    with bounds(), contextlib.suppress(TableError):
        tables.read(OPERATION, path, "NVIDIA Test 1")
