"""Measures what constraints and penalties cost: python -m benchmarks.control FOLDER [NAME ...].

A model with random weights in Qwen3-8B's shapes (W4A16KV8), and a byte-level tokenizer of as many
tokens, generate for 1, 64 or 128 requests at once: in an Engine, and in the loop of
`generate_tokens`. Each case is saved to control.json in the folder as soon as it ends, with its
rate over that of free requests. NAME is a number of requests, a kind (masks, table, penalties,
mixed, loop), or both, such as 64-masks, which includes 64-masks_half; free requests are measured
before. A case takes up to 20 s on an H100, most of which is compiling.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

import mpjax
from mpjax.bench import measure
from mpjax.bench.random_model import random_model
from mpjax.constraints.matcher import Matcher
from mpjax.models import DecoderConfig, Qwen3
from mpjax.models.presets import QWEN3_8B
from mpjax.precision import Precision
from mpjax.text.spelling import BYTE_OF
from mpjax.text.tokenizer import Tokenizer

PROMPT, NEW, ROUNDS = 32, 256, 3
END = "<|end|>"
ITEM = {"type": "string", "pattern": "^[a-z ]{1,40}$"}
# A schema with a pattern has no table. Its texts are longer than the new tokens.
ON_HOST = mpjax.JsonSchema({"type": "array", "items": ITEM, "minItems": 1000})
ON_DEVICE = mpjax.Regex('("[a-z ]{1,40}", ?)*')
PENALTIES = {
    "repetition_penalty": 1.1,
    "presence_penalty": 0.3,
    "frequency_penalty": 0.2,
    "logit_bias": {number: 1.0 for number in range(0, 3000, 10)},
}
GREEDY = {"stop_ids": ()}
PROPERTIES = {
    f"property_{number}": {"type": "string", "maxLength": 8 + number, "description": "x" * 16}
    for number in range(24)
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": [*PROPERTIES]}  # 2 kB of JSON

# The arguments of requests with an even index, and of those with an odd one.
Options = tuple[Mapping[str, Any], Mapping[str, Any]]


def kinds(lm: mpjax.LanguageModel) -> dict[str, Options]:
    """Kind of requests → options. Free requests are greedy or sampled without constraints."""
    free = {"sampling": GREEDY}
    masks = {"constraint": ON_HOST}
    ends = {"stop_ids": lm.usual_stop_ids, "min_new_tokens": NEW}  # no end before NEW tokens
    table = {"processors": (mpjax.Automaton.of(lm, ON_DEVICE),), "sampling": ends}
    penalties = {"sampling": {**GREEDY, **PENALTIES}}
    return {
        "free": (free, free),
        "drawn": ({"sampling": GREEDY | {"temperature": 1.0}},) * 2,
        "masks": (masks, masks),
        "masks_half": (masks, free),
        "table": (table, table),
        "table_half": (table, free),
        "penalties": (penalties, penalties),
        "mixed": (masks, penalties),
    }


def tokenizer(size: int) -> Tokenizer:
    """A byte-level tokenizer with `size` tokens, from random merges of mostly common letters."""
    rng, known = np.random.default_rng(0), {token: (token, "") for token in BYTE_OF}
    letters = {byte: token for token, byte in BYTE_OF.items()}
    common = [letters[byte] for byte in b'  eeettaaooiinnsshhrrdlucmfwygpbvk,".:{}[]_0123456789']
    longest, most = [*known] + common * 5, size // 6
    while len(known) < size - 1:
        pairs = zip(rng.choice(longest, most), rng.choice(common, most), strict=True)
        new = {first + last: (str(first), str(last)) for first, last in pairs}
        known |= {token: pair for token, pair in new.items() if token not in known}
        longest = [*new]
    known = dict([*known.items()][: size - 1])
    vocabulary = {token: number for number, token in enumerate(known)}
    merges = [*known.values()][len(BYTE_OF) :]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([END])
    return Tokenizer(backend, special_tokens={"eos_token": END})


def random_lm(config: DecoderConfig) -> mpjax.LanguageModel:
    """A model with random weights and a tokenizer."""
    precision = Precision.parse("W4A16KV8")
    model = random_model(Qwen3, config, precision.weights)
    return mpjax.LanguageModel(model, tokenizer(config.vocab_size), precision.kv, Path())


def prompts(lm: mpjax.LanguageModel, requests: int, number: int) -> list[list[int]]:
    """Random prompts, different for each `number`."""
    rng = np.random.default_rng(number)
    return rng.integers(0, lm.config.vocab_size - 1, (requests, PROMPT)).tolist()


def in_engine(engine: mpjax.Engine, requests: int, options: Options, new: int) -> dict[str, Any]:
    """Tokens/s of simultaneous requests; the first round, which compiles, is not counted."""
    rates, begin = [], time.perf_counter()
    for number in range(1 + ROUNDS):
        start = time.perf_counter()
        handles = [
            engine.submit(prompt, max_new_tokens=new, seed=row, **options[row % 2])
            for row, prompt in enumerate(prompts(engine.lm, requests, number))
        ]
        while engine.has_work:
            engine.step()
        found = sum(len(handle.result().tokens) for handle in handles)
        if found != requests * new:
            raise RuntimeError(f"{found} tokens were generated, and {requests * new} asked for")
        rates.append(found / (time.perf_counter() - start))
    return _row(rates[1:], begin)


def in_loop(
    lm: mpjax.LanguageModel, requests: int, options: Mapping[str, Any], new: int
) -> dict[str, Any]:
    """Tokens/s of a whole generation, prefill included, in one program."""
    settings: dict[str, Any] = {**options, "sampling": {**GREEDY, **options.get("sampling", {})}}
    processors = settings.pop("processors", ())

    @jax.jit
    def run(model: Any, tokens: jax.Array, processors: Any) -> Any:
        lengths = jnp.full(len(tokens), PROMPT)
        how = settings | {"kv_format": lm.kv_format, "processors": processors}
        return mpjax.generate_tokens(model, tokens, lengths, max_new_tokens=new, **how)

    rates, begin = [], time.perf_counter()
    for number in range(1 + ROUNDS):
        tokens = jnp.asarray(prompts(lm, requests, number))
        start = time.perf_counter()
        found = int(run(lm.for_device, tokens, processors).lengths.sum())
        rates.append(found / (time.perf_counter() - start))
    return _row(rates[1:], begin)


def _row(rates: list[float], begin: float) -> dict[str, Any]:
    seconds = time.perf_counter() - begin
    return {"tokens_per_second": statistics.median(rates), "rates": rates, "all_seconds": seconds}


def first_mask(lm: mpjax.LanguageModel) -> dict[str, Any]:
    """The host's seconds from a 2 kB schema to its first mask."""
    ends, seconds = lm.usual_stop_ids, []
    Matcher(lm, ON_HOST, ends)  # builds the vocabulary, which is cached
    for number in range(9):
        properties = {f"{name}_{number}": one for name, one in PROPERTIES.items()}
        schema = SCHEMA | {"properties": properties, "required": [*properties]}
        start = time.perf_counter()
        Matcher(lm, mpjax.JsonSchema(schema), ends).masks([])
        seconds.append(time.perf_counter() - start)
    size = len(json.dumps(SCHEMA))
    return {"bytes": size, "seconds": statistics.median(seconds), "most_seconds": max(seconds)}


def cases(
    lm: mpjax.LanguageModel, groups: Mapping[int, list[str]], new: int = NEW
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the name and result row of each case. groups: number of requests → kinds."""
    options = kinds(lm)
    for requests, wanted in groups.items():
        table = options["table"][0]["processors"]
        if any(kind in options for kind in wanted):
            most = PROMPT + new
            with mpjax.Engine(lm, slots=requests, max_tokens=most, processors=table) as engine:
                for kind in wanted:
                    if kind in options:
                        row = in_engine(engine, requests, options[kind], new)
                        yield f"{requests}-{kind}", row
        for kind in wanted:
            if kind.startswith("loop"):
                own = options[kind.removeprefix("loop_").replace("loop", "free")][0]
                yield f"{requests}-{kind}", in_loop(lm, requests, own, new)
    yield "first_mask", first_mask(lm)


ENGINE = ["free", "drawn", "masks", "masks_half", "table", "table_half", "penalties", "mixed"]
GROUPS = {
    1: ["free", "drawn", "masks", "table", "penalties", "loop", "loop_table", "loop_penalties"],
    64: [*ENGINE, "loop", "loop_table", "loop_penalties"],
    128: ["free", "drawn", "penalties"],
}


def free_of(kind: str) -> str:
    """The unconstrained kind with which a kind is compared."""
    return "loop" if "loop" in kind else "free"


def chosen(names: list[str]) -> dict[int, list[str]]:
    """Number of requests → the kinds that `names` select; all without names. Raises ValueError."""
    found: dict[int, list[str]] = {}
    for name in names or [str(group) for group in GROUPS]:
        group, _, kind = name.partition("-")
        groups = [int(group)] if group.isdigit() else [*GROUPS]
        kind = kind if group.isdigit() else group
        for one in groups:
            every = GROUPS.get(one, [])
            own = [it for it in every if not kind or it == kind or it.startswith(f"{kind}_")]
            found.setdefault(one, []).extend(own)
    if not any(found.values()):
        raise ValueError(f"names are {names}: expected some of {[*GROUPS]} or of {ENGINE}")
    return {
        group: list(dict.fromkeys([*map(free_of, own), *own]))
        for group, own in found.items()
        if own
    }


def main(given: list[str]) -> int:
    """Measures the named cases, or all."""
    if not given:
        print((__doc__ or "").partition("\n")[0], file=sys.stderr)
        return 2
    folder, groups = Path(given[0]), chosen(given[1:])
    lm = random_lm(dataclasses.replace(QWEN3_8B, max_position_embeddings=4096))
    path = folder / "control.json"
    rows = json.loads(path.read_text("utf-8"))["results"] if path.is_file() else {}
    for name, row in cases(lm, groups):
        rows[name] = row
        group, _, kind = name.partition("-")
        free = rows.get(f"{group}-{free_of(kind)}")
        if kind and free:
            row["ratio"] = row["tokens_per_second"] / free["tokens_per_second"]
        if kind and f"{group}-drawn" in rows and "loop" not in kind:
            row["over_drawn"] = (
                row["tokens_per_second"] / rows[f"{group}-drawn"]["tokens_per_second"]
            )
        print(name, json.dumps(row), flush=True)
        measure.save("control", {"results": rows}, folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
