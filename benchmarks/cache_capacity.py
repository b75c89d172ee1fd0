"""How many sequences of 8192 tokens a cache of 10 GB holds, where layers with windows free pages.

python -m benchmarks.cache_capacity

Computed from the shapes of models, without a device: the pages of an engine with as many slots as
fit, beside those of an engine in which all layers keep the pages of all tokens.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flax import nnx

import mpjax
from mpjax.bench import measure
from mpjax.engine.engine import SEQUENCES
from mpjax.engine.memory import most_pages
from mpjax.engine.sizes import Sizes
from mpjax.engine.state import cache_bytes
from mpjax.kernels import KVFormat
from mpjax.models import Decoder, DecoderConfig, Gemma3
from mpjax.models.presets import PUBLISHED

RESULT = Path(__file__).parent / "results" / "cache-capacity.json"
BYTES, LENGTH, PAGE_SIZE, CHUNK = 10 * 10**9, 8192, 128, 4096
GEMMA_3_27B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "sliding_window": 1024,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 168,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}
MODELS: dict[str, tuple[type[Decoder], DecoderConfig]] = {
    "gpt-oss-20b": PUBLISHED["gpt-oss-20b"],
    "Gemma-3-27B": (Gemma3, Gemma3.config_from_hf(GEMMA_3_27B)),
}


def capacity(name: str, kv: str) -> dict[str, Any]:
    """A result row: how many sequences fit with and without freeing pages before windows."""
    family, config = MODELS[name]
    model = nnx.eval_shape(lambda: family(config, nnx.Rngs(0)))
    lm = mpjax.LanguageModel(model, None, KVFormat.parse(kv), Path(), PAGE_SIZE)
    each, _ = cache_bytes(lm, 1)

    def needed(slots: int) -> int:
        how: dict[str, Any] = {"windows": config.page_groups, "sequences": min(slots, SEQUENCES)}
        sizes = Sizes(slots, (), PAGE_SIZE, chunk=CHUNK, **how)
        pages = (most_pages(sizes, LENGTH, window) for window in sizes.windows)
        return sum(count * size for count, size in zip(pages, each, strict=True))

    slots = 1
    while needed(slots + 1) <= BYTES:
        slots += 1
    before = BYTES // (sum(each) * LENGTH // PAGE_SIZE)
    return {"model": name, "kv": kv, "sequences": slots, "without_windows": before}


def main() -> None:
    """Computes the results and writes them."""
    rows = [capacity(name, kv) for name in MODELS for kv in ("KV16", "KV8", "KV4")]
    found = {**measure.stamp(), "results": rows}
    RESULT.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    print(RESULT)


if __name__ == "__main__":
    main()
