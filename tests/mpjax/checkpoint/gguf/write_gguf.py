"""Small GGUF files for tests, written from the format's description and not with our reader."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

U32, I32, F32, BOOL, TEXT, ARRAY = 4, 5, 6, 7, 8, 9
# Number of a type of tensors, numbers in a block and bytes of one, by the type's name.
TYPES = {
    **{"F32": (0, 1, 4), "F16": (1, 1, 2), "BF16": (30, 1, 2)},
    **{"Q4_0": (2, 32, 18), "Q4_1": (3, 32, 20), "Q5_0": (6, 32, 22), "Q5_1": (7, 32, 24)},
    **{"Q8_0": (8, 32, 34), "Q4_K": (12, 256, 144), "Q5_K": (13, 256, 176), "Q6_K": (14, 256, 210)},
    **{"Q2_K": (10, 256, 84), "Q3_K": (11, 256, 110)},
    **{"IQ4_NL": (20, 32, 18), "IQ4_XS": (23, 256, 136), "MXFP4": (39, 32, 17)},
    **{"IQ1_S": (19, 256, 50), "IQ1_M": (29, 256, 56), "IQ2_XXS": (16, 256, 66)},
    **{"IQ2_XS": (17, 256, 74), "IQ2_S": (22, 256, 82), "IQ3_XXS": (18, 256, 98)},
    **{"IQ3_S": (21, 256, 110), "TQ1_0": (34, 256, 54), "TQ2_0": (35, 256, 66)},
}
# A byte-level vocabulary of all bytes, as GPT-2 spells them, and some more tokens.
BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
SPELLED = {byte: chr(byte) for byte in BYTES}
SPELLED |= {b: chr(256 + i) for i, b in enumerate(b for b in range(256) if b not in BYTES)}
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w"]
TOKENS = ["<|end|>", "<|user|>", *SPELLED.values(), "he", "ll", "hell", "hello", "Ġw"]
KINDS = [3, 3] + [1] * (len(TOKENS) - 2)
TEMPLATE = "{% for m in messages %}<|user|>{{ m.content }}{% endfor %}"


def text(value: str) -> bytes:
    data = value.encode()
    return struct.pack("<Q", len(data)) + data


def value(given: Any) -> bytes:
    """A value with its type in front."""
    if isinstance(given, bool):
        return struct.pack("<I?", BOOL, given)
    if isinstance(given, int):
        return struct.pack("<II", U32, given)
    if isinstance(given, float):
        return struct.pack("<If", F32, given)
    if isinstance(given, str):
        return struct.pack("<I", TEXT) + text(given)
    if given and isinstance(given[0], str):
        return struct.pack("<IIQ", ARRAY, TEXT, len(given)) + b"".join(map(text, given))
    kind, form = (F32, "f") if given and isinstance(given[0], float) else (I32, "i")
    return struct.pack("<IIQ", ARRAY, kind, len(given)) + struct.pack(
        f"<{len(given)}{form}", *given
    )


def gguf(
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]],
    alignment: int = 32,
) -> bytes:
    """A file. tensors: the type, the shape [rows, columns] and the bytes of each."""
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata))
    header += b"".join(text(key) + value(given) for key, given in metadata.items())
    data = b""
    for name, (kind, shape, content) in tensors.items():
        header += (
            text(name)
            + struct.pack("<I", len(shape))
            + struct.pack(f"<{len(shape)}QIQ", *shape[::-1], TYPES[kind][0], len(data))
        )
        data += content + bytes(-len(content) % alignment)
    return header + bytes(-len(header) % alignment) + data


def vocabulary() -> dict[str, Any]:
    """The metadata of a byte-level tokenizer."""
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": KINDS,
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.eos_token_id": 0,
        "tokenizer.chat_template": TEMPLATE,
    }


SIZES = {"hidden": 64, "inner": 96, "heads": 4, "kv_heads": 2, "head_dim": 16, "layers": 2}


def llama_metadata(architecture: str = "llama") -> dict[str, Any]:
    """The metadata of a tiny model."""
    keys = {
        "block_count": SIZES["layers"],
        "context_length": 128,
        "embedding_length": SIZES["hidden"],
        "feed_forward_length": SIZES["inner"],
        "attention.head_count": SIZES["heads"],
        "attention.head_count_kv": SIZES["kv_heads"],
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 10000.0,
    }
    found: dict[str, Any] = {"general.architecture": architecture}
    return found | {f"{architecture}.{key}": given for key, given in keys.items()} | vocabulary()


def shapes() -> dict[str, tuple[int, ...]]:
    """The shapes of a tiny model's tensors, whose head is tied."""
    hidden, inner = SIZES["hidden"], SIZES["inner"]
    queries, keys = (SIZES[name] * SIZES["head_dim"] for name in ("heads", "kv_heads"))
    layer = {
        "attn_norm": (hidden,),
        **{"attn_q": (queries, hidden), "attn_k": (keys, hidden), "attn_v": (keys, hidden)},
        **{"attn_output": (hidden, queries), "ffn_norm": (hidden,)},
        **{"ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)},
    }
    found: dict[str, tuple[int, ...]] = {"token_embd.weight": (len(TOKENS), hidden)}
    for index in range(SIZES["layers"]):
        found |= {f"blk.{index}.{name}.weight": shape for name, shape in layer.items()}
    return found | {"output_norm.weight": (hidden,)}


# Where the float16 numbers of a block are, if not in its first two bytes.
SCALES = {
    **{"Q6_K": [208], "Q4_1": [0, 2], "Q5_1": [0, 2], "Q4_K": [0, 2], "Q5_K": [0, 2]},
    **{"Q2_K": [80, 82], "Q3_K": [108], "TQ1_0": [52], "TQ2_0": [64], "IQ1_M": [], "MXFP4": []},
}


def random_blocks(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> bytes:
    """Random blocks of a type, whose float16 scales are small and finite."""
    _, size, nbytes = TYPES[kind]
    count = int(np.prod(shape)) // size
    blocks = rng.integers(0, 256, (count, nbytes), np.uint8)
    # The first two bytes are a float16, but for K types whose last ones are.
    scales = rng.uniform(0.001, 0.01, count).astype(np.float16)
    if kind == "MXFP4":  # an exponent
        blocks[:, 0] = rng.integers(110, 120, count)
    if kind == "IQ1_M":  # whose float16 is spread over the top bits of four words
        nibbles = (4 * scales).view(np.uint16)[:, None] >> np.arange(0, 16, 4, dtype=np.uint16) & 15
        blocks[:, 49::2] = blocks[:, 49::2] & 15 | (nibbles << 4).astype(np.uint8)
    for place in SCALES.get(kind, [0]):
        blocks[:, place : place + 2] = scales[:, None].view(np.uint8)
    return blocks.tobytes()


def random_tensors(
    kinds: Mapping[str, str], rng: np.random.Generator
) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """The tensors of a tiny model. kinds: the type by the end of the name; F32 for others."""
    tensors = {}
    for name, shape in shapes().items():
        kind = next((kind for end, kind in kinds.items() if name.endswith(f"{end}.weight")), "F32")
        if kind == "F32":
            base = 1.0 if "norm" in name else 0.0
            content = (base + 0.1 * rng.standard_normal(shape)).astype(np.float32).tobytes()
        elif kind == "F16":
            content = (0.1 * rng.standard_normal(shape)).astype(np.float16).tobytes()
        else:
            content = random_blocks(kind, shape, rng)
        tensors[name] = kind, shape, content
    return tensors


EXPERTS = 4


def with_experts(
    metadata: dict[str, Any],
    tensors: dict[str, tuple[str, tuple[int, ...], bytes]],
    rng: np.random.Generator,
    *,
    kind: str = "F16",
    inner: int = SIZES["inner"],
    shared: int | None = None,
) -> None:
    """Puts experts in the place of a tiny model's MLPs, in both arguments.

    kind: the type of the experts' tensors. inner: the channels inside of each. shared: those inside
    of the MLP of all tokens, which Qwen2-MoE has.
    """
    name, hidden = metadata["general.architecture"], SIZES["hidden"]
    metadata |= {f"{name}.expert_count": EXPERTS, f"{name}.expert_used_count": 2}
    if name != "llama":
        metadata[f"{name}.expert_feed_forward_length"] = inner
    if shared:
        metadata[f"{name}.expert_shared_feed_forward_length"] = shared

    def put(end: str, kind: str, *shape: int) -> None:
        tensors[end] = kind, shape, _content(kind, shape, rng)

    for layer in range(SIZES["layers"]):
        block = f"blk.{layer}.ffn"
        put(f"{block}_gate_inp.weight", "F32", EXPERTS, hidden)
        for half in ("gate", "up", "down"):
            del tensors[f"{block}_{half}.weight"]
            matrix = (hidden, inner) if half == "down" else (inner, hidden)
            put(f"{block}_{half}_exps.weight", kind, EXPERTS, *matrix)
            if shared:
                matrix = (hidden, shared) if half == "down" else (shared, hidden)
                put(f"{block}_{half}_shexp.weight", kind, *matrix)
        if shared:
            put(f"{block}_gate_inp_shexp.weight", "F32", hidden)


def _content(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> bytes:
    """Random bytes of a tensor."""
    if kind in ("F16", "F32"):
        dtype = np.float16 if kind == "F16" else np.float32
        return (0.1 * rng.standard_normal(shape)).astype(dtype).tobytes()
    return random_blocks(kind, shape, rng)


MIXED = {
    **{"token_embd": "Q8_0", "attn_q": "Q8_0", "attn_k": "Q8_0", "attn_v": "Q5_1"},
    **{"attn_output": "Q4_0", "ffn_gate": "Q5_0", "ffn_up": "Q4_1", "ffn_down": "F16"},
}


def write_llama(path: Path, rng: np.random.Generator, kinds: Mapping[str, str] = MIXED) -> Path:
    """A tiny model of the architecture `llama`."""
    path.write_bytes(gguf(llama_metadata(), random_tensors(kinds, rng)))
    return path
