from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy as safetensors_numpy
from typer.testing import CliRunner

import mpjax
from mpjax.checkpoint import array_file, description, safetensors
from mpjax.cli import info
from mpjax.cli.application import app
from mpjax.models import CacheScales
from tests.mpjax.checkpoint.gguf.write_gguf import write_llama
from tests.mpjax.checkpoint.packers import pack_awq, pack_gptq
from tests.mpjax.checkpoint.write_checkpoint import (
    CONFIGS,
    linear_shapes,
    random_tensors,
    replace_module,
    round_to_nearest,
    write_checkpoint,
)

PLAIN = ("model.layers.1.self_attn.o_proj", "model.layers.0.self_attn.v_proj")
METHODS = {
    "awq": (pack_awq, {"zero_point": True, "version": "gemm"}),
    "gptq": (pack_gptq, {"desc_act": False, "sym": False}),
}


def write(folder, name, method):
    """A checkpoint of which some modules are packed and some are not."""
    hf = CONFIGS[name]
    tensors = random_tensors(hf, np.random.default_rng(0), np.float16)
    if method is not None:
        pack, config = METHODS[method]
        hf = hf | {"quantization_config": {"quant_method": method, "bits": 4, "group_size": 32}}
        hf["quantization_config"] |= config
        for module in linear_shapes(hf):
            if module not in PLAIN:
                parts = round_to_nearest(tensors[f"{module}.weight"].T, 32, 4)
                replace_module(tensors, module, pack(*parts))
    return write_checkpoint(folder, hf, tensors)


@pytest.mark.parametrize(
    ("name", "method"), [("llama-tied", None), ("qwen2", None), ("qwen3", "awq"), ("llama", "gptq")]
)
def test_it_says_what_the_loaded_model_says(tmp_path, monkeypatch, name, method):
    folder = write(tmp_path / "model", name, method)
    lm = mpjax.load(folder)
    expected, summary = lm.describe(), lm.summary()
    saved = tmp_path / "saved"
    if method is not None:
        shape = (lm.config.num_layers, 2, lm.config.num_kv_heads)
        lm.model.cache_scales = CacheScales(jnp.ones(shape))
    mpjax.save(lm, saved)
    saved_rows = mpjax.load(saved).describe()
    if method is not None:
        text = "\n".join(line for _, line in expected)
        assert "W4g32 | W4g32 | W16 in 1 layer" in text
        assert "layers" not in text.replace("2 layers", "")

    monkeypatch.setattr(safetensors.Checkpoint, "read", lambda *args: pytest.fail("read a tensor"))
    monkeypatch.setattr(array_file, "read", lambda *args: pytest.fail("read an array"))
    assert info.inspect(folder).describe() == expected
    assert info.inspect(saved).describe() == saved_rows

    result = CliRunner().invoke(app, ["info", str(folder)])
    assert (result.exit_code, result.stderr) == (0, "")
    width = max(len(label) for label, _ in expected) + 2
    rows = [(line[:width].strip(), line[width:]) for line in result.stdout.splitlines()]
    assert rows[: len(expected)] == expected
    loads = ["also loads as"] if method is None else []
    assert [label for label, _ in rows[len(expected) :]] == [
        *("in the files", *loads, "tokenizer"),
        *(f"memory, {kv}" for kv in ("KV16", "KV8", "KV4")),
        "on this device",
    ]

    result = CliRunner().invoke(app, ["info", str(folder), "--json"])
    assert (result.exit_code, result.stderr) == (0, "")
    found = json.loads(result.stdout)
    memory = found.pop("memory_bytes")
    assert found.pop("free_bytes") > 0
    contents, others = found.pop("contents"), found.pop("other_precisions")
    kept = f"{str(method).upper()}, codes kept as W4g32"
    assert contents == (f"numbers in {summary['dtype']}" if method is None else kept)
    assert len(others) == 2 * len(loads)
    nothing = {
        "can_run": True,
        "activations": None,
        "cache": None,
        "rounded": None,
        "tokenizer": None,
        "state_bytes": 0,
    }
    assert found == summary | nothing
    cache = lm.model.create_cache(1, 256, "KV8")
    assert memory["KV8"] == {"256": summary["packed_bytes"] + summary["other_bytes"] + cache.nbytes}


def test_the_model_is_an_argument_or_an_option(tmp_path, rng):
    file = str(write_llama(tmp_path / "m.gguf", rng))
    found = [
        CliRunner().invoke(app, ["info", *arguments]) for arguments in ([file], ["--model", file])
    ]
    assert found[0].exit_code == 0
    rows = [result.stdout.splitlines()[:-1] for result in found]  # without the free memory
    assert rows[0] == rows[1] != []
    twice = CliRunner().invoke(app, ["info", file, "--model", file])
    assert twice.exit_code == 2
    assert "m.gguf is a model too: give one of them" in " ".join(twice.stderr.split())


def test_help_explains_the_rows_and_the_keys():
    result = CliRunner().invoke(app, ["info", "--json"])
    text = CliRunner().invoke(app, ["info", "--help"]).stdout
    keys = text.split("keys of --json: ")[1]
    assert all(f"{key}" in keys for key in json.loads(result.stdout))
    text = " ".join(CliRunner().invoke(app, ["info", "--help"]).stdout.split())
    assert "if their formats agree" in text
    assert "`W4 | W4 | W16`" in text
    assert '"cache scales" are the scales that KV8s needs' in text


def test_an_older_format_is_one_sentence(tmp_path):
    content = {"format": description.FORMAT, "version": 3, "decoder": "Llama"}
    (tmp_path / "mpjax.json").write_text(json.dumps(content))
    (tmp_path / "weights").mkdir()  # where that version had its arrays
    for command in ("info", "generate"):
        arguments = [str(tmp_path)] if command == "info" else ["x", "--model", str(tmp_path)]
        result = CliRunner().invoke(app, [command, *arguments])
        assert (result.exit_code, result.stdout) == (1, "")
        known = f"this mpjax reads versions 4 to {description.VERSION}; install the"
        assert f"has the format version 3: {known}" in result.stderr
        assert result.stderr.count("\n") == 1


def run(*arguments):
    return CliRunner().invoke(app, ["info", *map(str, arguments)])


def test_what_can_not_run_is_described(tmp_path):
    """What is there is on stdout, what is in the way on stderr."""
    hf = CONFIGS["llama"] | {"architectures": ["MambaForCausalLM"]}
    tensors = random_tensors(CONFIGS["llama"], np.random.default_rng(0))
    folder = write_checkpoint(tmp_path / "model", hf, tensors)
    result = run(folder)
    assert result.exit_code == 1
    assert "architecture  MambaForCausalLM" in result.stdout
    assert "tensors       21 in float32" in result.stdout
    assert "unsupported architecture: 'MambaForCausalLM'" in result.stderr
    found = json.loads(run(folder, "--json").stdout)
    assert found["can_run"] is False
    assert "unsupported architecture" in found["in_the_way"]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"architectures": ["SiglipVisionModel"]},
            "it has no vocab_size, so that it is no language",
        ),
        ({"architectures": ["LlamaForCausalLM"], "hidden_size": 64}, "has no 'num_hidden_layers'"),
        (None, "config.json is missing: fetch it into the same folder"),
    ],
)
def test_folders_without_a_language_model_are_described(config, message, tmp_path):
    safetensors_numpy.save_file({"a.weight": np.zeros((8, 8), "f4")}, tmp_path / "a.safetensors")
    if config is not None:
        (tmp_path / "config.json").write_text(json.dumps(config))
    result = run(tmp_path)
    assert (result.exit_code, "1 in float32" in result.stdout) == (1, True)
    assert message in result.stderr


def test_a_gguf_file_and_what_is_rounded(tmp_path, rng):
    path = write_llama(tmp_path / "m.gguf", rng)
    assert json.loads(run(path, "--json").stdout)["rounded"] is None
    path.write_bytes(path.read_bytes()[:-500])
    result = run(path)
    assert (result.exit_code, "is truncated" in result.stderr) == (1, True)
    assert result.stdout == ""  # the header says more than the file holds


def test_json_of_what_is_no_model(tiny, tmp_path):
    """An object in each case, whose sentence is that of stderr."""
    hf = CONFIGS["llama"]
    broken = write_checkpoint(tmp_path / "broken", hf, random_tensors(hf, np.random.default_rng(0)))
    (broken / "config.json").write_text("{")
    empty, text, gguf = tmp_path / "empty", tmp_path / "a.txt", tmp_path / "b.gguf"
    empty.mkdir()
    text.write_text("a text")
    gguf.write_bytes(b"")
    mpjax.save(tiny, tmp_path / "saved")
    (tmp_path / "saved" / "mpjax.json").write_text("{")
    for path in (broken, empty, text, gguf, tmp_path / "missing", tmp_path / "saved"):
        result = run(path, "--json")
        assert result.exit_code == 1
        found = json.loads(result.stdout)
        assert found["can_run"] is False
        assert result.stderr == f"mpjax: {found['in_the_way']}\n"


def test_tokenizer_and_room(monkeypatch):
    """Of the bundled model, on devices of little memory and of less."""
    found = json.loads(CliRunner().invoke(app, ["info", "--json"]).stdout)
    assert found["tokenizer"] == {
        **{"tokens": 2048, "chat_templates": [], "stop_tokens": ["<|endoftext|>"]}
    }
    said = {}
    sizes = [nbytes for lengths in found["memory_bytes"].values() for nbytes in lengths.values()]
    for free in (min(sizes) - 1, min(sizes), max(sizes)):
        monkeypatch.setattr("mpjax.memory.free_bytes", lambda free=free: free)
        said[free] = CliRunner().invoke(app, ["info"]).stdout.splitlines()[-1]
    none, some, all_of_them = said.values()
    assert none.endswith("too little: take another precision, or more devices (--devices)")
    assert some.endswith("free, enough for 1,024 tokens with KV4")
    assert all_of_them.endswith("free, enough for the longest context")
