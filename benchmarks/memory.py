"""Memory and time of quantising Qwen3-8B's shapes from a file, layer by layer.

python -m benchmarks.memory                  GPTQ of 4 of 36 layers, on 128 windows of 2048 tokens
python -m benchmarks.memory --method awq+gptq --layers 8
python -m benchmarks.memory --hidden 512 --layers 10 --tokens 32768     narrower, for a CPU

Weights are random. The peaks are those of the whole process, with the libraries that CUDA and JAX
map into it; those of anonymous memory leave out the pages of files, which the system takes back
where it needs room. Every layer takes the same memory and time, except the first, which compiles.
The quantised layers before it stay on the device. The figures of all layers are extrapolated. The
peaks of anonymous memory in each layer show whether the host's memory grows with layers. On a CPU,
the host's memory contains the device's.
With --hidden, results are printed and not written.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import itertools
import json
import resource
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import mpjax
from mpjax.bench import checkpoint, measure, tables
from mpjax.models import llama_layers
from mpjax.models.presets import QWEN3_8B

RESULTS = Path(__file__).parent / "results"
ALL_LAYERS = 36
VOCABULARY = 32_000  # of the narrower model
INTERVAL = 0.02  # seconds between two samples of the process's memory


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes a checkpoint, quantises it, and reports the memory and time."""
    parser = argparse.ArgumentParser(
        description=inspect.cleandoc(__doc__ or ""),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--precision", default="W4A16KV8")
    parser.add_argument("--method", default="gptq")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128 * 2048)
    parser.add_argument("--hidden", type=int, help="channels of a narrower model, in 512s")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.layers < 2:
        parser.error("--layers is less than 2: the first layer compiles, and is not counted")
    if given.hidden is not None and (given.hidden <= 0 or given.hidden % 512):
        parser.error("--hidden is no multiple of 512: heads have 128 channels, and four a KV head")
    if given.write is not None:
        config = shapes(given.layers, given.hidden)
        checkpoint.write(given.write, config, "W16A16KV16", "plain")
        return
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "qwen3-8b"
        # In a separate process, whose memory doesn't count.
        command = [sys.executable, "-m", "benchmarks.memory", "--layers", str(given.layers)]
        command += [] if given.hidden is None else ["--hidden", str(given.hidden)]
        subprocess.run([*command, "--write", str(source)], check=True)
        calibration = mpjax.Calibration(tokens=given.tokens)
        recipe = mpjax.Recipe.of(given.precision, given.method)
        source = source.with_name(f"{source.name}-plain")
        result = run(source, recipe, calibration, ALL_LAYERS)
    result = {"method": given.method, "precision": given.precision} | result
    print(json.dumps(result, indent=1))
    if given.hidden is None:
        print(measure.save(f"memory-{given.precision}-{given.method}", result, RESULTS))


COLUMNS: tables.Columns = {
    "precision": "{precision}",
    "method": "{method}",
    "tokens": "{tokens:,}",
    "seconds a layer": "{seconds_of_layer:.1f}",
    "minutes": tables.scaled("{:.1f}", "seconds_of_all_layers", 1 / 60),
    "device peak": tables.scaled("{:.1f} GB", "device_peak_bytes_of_all_layers", 1e-9),
    "host peak": tables.scaled("{:.1f} GB", "host_peak_bytes", 1e-9),
    "hidden states": tables.scaled("{:.1f} GB", "hidden_states_bytes", 1e-9),
}


def run(
    source: Path, recipe: mpjax.Recipe, calibration: mpjax.Calibration, all_layers: int
) -> dict[str, Any]:
    """Quantises a checkpoint; returns bytes and seconds, and their extrapolation to all layers."""
    work, before = source.with_name("layers"), resident_bytes()
    jax.block_until_ready(jnp.ones((256, 256)) @ jnp.ones((256, 256)))  # starts CUDA and cuBLAS
    started, begin = resident_bytes(), time.time()
    texts = python_texts(calibration.tokens)
    with Watch() as watch:
        lm = mpjax.quantize(
            source, recipe, texts, calibration=calibration, work=work, progress=False
        )
    total = time.time() - begin
    ends = [file.stat().st_mtime for file in sorted(work.glob("layer-*.json"))]
    seconds = np.diff([begin, *ends]).tolist()
    layer = statistics.median(seconds[1:])
    layer_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(lm.model.layers[0]))
    device = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")
    config, missing = lm.config, all_layers - lm.config.num_layers
    states = calibration.tokens * config.hidden_size * np.dtype(config.dtype).itemsize
    return {
        "layers": config.num_layers,
        "all_layers": all_layers,
        "tokens": calibration.tokens,
        "seconds": total,
        "seconds_of_first_layer": seconds[0],
        "seconds_of_layer": layer,
        "seconds_of_all_layers": total + missing * layer,
        "device_peak_bytes": device,
        "packed_layer_bytes": layer_bytes,
        "device_peak_bytes_of_all_layers": device and device + missing * layer_bytes,
        "host_bytes_before": before["all"],
        "host_bytes_of_started_device": started,
        "host_peak_bytes_by_kind": watch.peaks,
        "host_anonymous_peak_bytes_of_layers": watch.peaks_between([begin, *ends]),
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "hidden_states_bytes": states,
    }


def shapes(layers: int, hidden: int | None) -> dict[str, Any]:
    """The config.json of Qwen3-8B with `layers` layers, or of a narrower model.

    hidden: channels of the narrower model's residual stream, a multiple of 512, or None.
    """
    config = dataclasses.replace(QWEN3_8B, layers=QWEN3_8B.layers[:layers])
    if hidden is not None:
        config = dataclasses.replace(
            config,
            vocab_size=VOCABULARY,
            hidden_size=hidden,
            num_heads=hidden // 128,
            num_kv_heads=hidden // 512,
            layers=llama_layers((None,) * layers, 3 * hidden, qk_norm=True),
            stop_ids=(0,),
        )
    return checkpoint.qwen3_config(config)


def python_texts(tokens: int) -> list[str]:
    """Source files of the standard library with at least `tokens` tokens in any tokenizer."""
    texts: list[str] = []
    size = 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if size > 12 * tokens:
            break
        texts.append(path.read_text(encoding="utf-8", errors="ignore"))
        size += len(texts[-1])
    return texts


KINDS = {"VmRSS:": "all", "RssAnon:": "anonymous", "RssFile:": "files", "RssShmem:": "shared"}


def resident_bytes() -> dict[str, int]:
    """Resident bytes of this process: all, anonymous, file-backed and shared."""
    words = map(str.split, Path("/proc/self/status").read_text().splitlines())
    return {KINDS[line[0]]: int(line[1]) * 1024 for line in words if line and line[0] in KINDS}


class Watch:
    """A context during which the process's memory is sampled every INTERVAL seconds.

    peaks: the peak bytes of each kind, not necessarily at the same time. anonymous: samples (time
        in seconds, bytes of anonymous memory).
    """

    def __init__(self) -> None:
        self.peaks = resident_bytes()
        self.anonymous: list[tuple[float, int]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._end.set()
        self._thread.join()
        self._read()

    def peaks_between(self, times: Sequence[float]) -> list[int]:
        """The peak bytes of anonymous memory between successive times; 0 without a sample."""
        return [
            max((size for at, size in self.anonymous if first <= at < last), default=0)
            for first, last in itertools.pairwise(times)
        ]

    def _run(self) -> None:
        while not self._end.wait(INTERVAL):
            self._read()

    def _read(self) -> None:
        found = resident_bytes()
        self.peaks = {kind: max(self.peaks[kind], it) for kind, it in found.items()}
        self.anonymous.append((time.time(), found["anonymous"]))


if __name__ == "__main__":
    main()
