"""Builds a Tokenizer from the metadata of a GGUF file.

Two tokenizer models are supported. `gpt2` is byte-level BPE: the file lists tokens and merges, and
names the pre-tokenizer (`tokenizer.ggml.pre`). `llama` is SentencePiece BPE: the file lists tokens
and scores, from which the merges follow. Source: llama.cpp, src/llama-vocab.cpp and
include/llama.h.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from mpjax.checkpoint.gguf.metadata import Metadata
from mpjax.errors import CheckpointError
from mpjax.text.tokenizer import Tokenizer
from mpjax.text.tokenizer_files import explained

# Token types (`tokenizer.ggml.token_type`). CONTROL tokens have no text. USER_DEFINED ones are
# matched before pre-tokenization. Other types, such as bytes, need no case.
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
SPACE = "▁"  # SentencePiece's space symbol
NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator"}
STOP_KEYS = ("eos", "eot", "eom")
# Control tokens that end an answer even if the file doesn't list them.
STOP_TEXTS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>"),
    *("<|end_of_text|>", "<|return|>", "<EOT>", "_<EOT>", "<｜end▁of▁sentence｜>"),
)


class Splitting(NamedTuple):
    """A pre-tokenizer of byte-level BPE.

    pattern: the regular expression of a word, or several that are applied one after another; None
    for GPT-2's, built into `tokenizers`. digits: whether digits are split off first. whole_words:
    whether a word that is a token skips merging. begins: the default of add_bos_token.
    """

    pattern: str | tuple[str, ...] | None = None
    digits: bool = False
    whole_words: bool = False
    begins: bool = False


_LETTERS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_WITH_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(ending: str, close: str = "]") -> str:
    """The pattern of words in lower, upper or title case, followed by `ending`.

    close: the end of the classes of letters, which may leave some out.
    """
    start = r"[^\r\n\p{L}\p{N}]?"
    upper, lower = f"{_UPPER[:-1]}{close}", f"{_LOWER[:-1]}{close}"
    return f"{start}{upper}*{lower}+{ending}|{start}{upper}+{lower}*{ending}"


_BY_THREE_DIGITS = rf"{_SHORT}|{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
_LLAMA3 = Splitting(_BY_THREE_DIGITS, whole_words=True, begins=True)
_QWEN2 = Splitting(rf"{_SHORT}|{_LETTERS}|\p{{N}}|{_REST}")
_GPT2, _DIGITS = Splitting(), Splitting(digits=True)

# DeepSeek's: digits, then Chinese and Japanese, then words with their combining marks.
_DEEPSEEK3 = Splitting(
    (
        r"\p{N}{1,3}",
        "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
        r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    )
)
# Scripts with letters in two cases that the older pattern leaves out.
_WITHOUT = r"\u0560-\u0588\u10c7-\u10ff\u1c80-\u1c8f\u2d00-\u2d2d\ua790-\uab68"
_WITHOUT += r"\x{10570}-\x{105bc}\x{10d40}-\x{10d8f}\x{16e40}-\x{1df1e}"
_DEEPSEEK = Splitting(
    (
        r"[\r\n]",
        rf"\s?[\p{{Lu}}\p{{Ll}}\p{{Lt}}&&[^{_WITHOUT}]]+",
        r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+",
        r"\s+$",
        "[一-龥\u0800-一가-\ud7ff]+",
        r"\p{N}+",
    )
)
_MARKS = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
_OF_KIMI = r"&&[^\p{Han}]]"

SPLITTINGS: Mapping[str, Splitting] = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral"), _LLAMA3),
    **dict.fromkeys(("falcon-h1", "lfm2", "midm-2.0"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), Splitting(_BY_THREE_DIGITS)),
    **dict.fromkeys(("glm4", "glm5"), Splitting(_BY_THREE_DIGITS, whole_words=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "hunyuan", "solar-open"), _QWEN2),
    **dict.fromkeys(("stablelm2", "grok-2", "kormo"), _QWEN2),
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "granite-docling", "exaone4", "mpt"), _GPT2),
    **dict.fromkeys(("gigachat", "a.x-4.0", "jais", "trillion"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS),
    **dict.fromkeys(("exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(
        ("gpt-4o", "llama4", "kanana2", "minimax-m2"),
        Splitting(rf"{_cased(f'{_SHORT}?')}|\p{{N}}{{1,3}}|{_REST_WITH_SLASHES}"),
    ),
    "tekken": Splitting(
        rf"{_cased('')}|\p{{N}}|{_REST_WITH_SLASHES}", whole_words=True, begins=True
    ),
    "qwen35": Splitting(rf"{_MARKS}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"),
    "seed-coder": Splitting(
        rf"{_SHORT}|{_LETTERS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "deepseek-llm": _DEEPSEEK,
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK3),
    "kimi-k2": Splitting(rf"\p{{Han}}+|{_cased(f'{_SHORT}?', _OF_KIMI)}|\p{{N}}{{1,3}}|{_REST}"),
}


def read_tokenizer(metadata: Metadata) -> Tokenizer:
    """Builds a file's tokenizer. Raises CheckpointError if that is not possible."""
    tokens = metadata.texts("tokenizer.ggml.tokens")
    builders = {"gpt2": _byte_level, "llama": _sentence_piece, "gemma4": _sentence_piece}
    model = metadata.text("tokenizer.ggml.model")
    if model not in builders:
        raise CheckpointError(
            f"{metadata.path}: the tokenizer's model is {model!r:.80}: expected "
            f"{' or '.join(builders)}; load the model's safetensors checkpoint"
        )
    kinds = _kinds(metadata, tokens)
    with explained(f"{metadata.path} holds no tokenizer that can be built"):
        backend = builders[model](metadata, tokens, kinds)
        _add_tokens(backend, tokens, kinds)
    special = _special_tokens(metadata, tokens)
    _add_ends(backend, metadata, special, begins=_begins(metadata, model))
    return Tokenizer(
        backend,
        special_tokens=special,
        chat_templates=_chat_templates(metadata),
        stop_ids=read_stop_ids(metadata),
        name=str(metadata.path),
    )


def read_stop_ids(metadata: Metadata) -> list[int]:
    """The stop ids of a file. Raises CheckpointError for ids outside the vocabulary."""
    tokens = metadata.texts("tokenizer.ggml.tokens", [])
    kinds = _kinds(metadata, tokens)
    named = [_token_id(metadata, kind, tokens) for kind in STOP_KEYS]
    controls = {tokens[index]: int(index) for index in np.flatnonzero(kinds == CONTROL)}
    texts = [controls[text] for text in STOP_TEXTS if text in controls]
    return list(dict.fromkeys([*(index for index in named if index is not None), *texts]))


def _kinds(metadata: Metadata, tokens: Sequence[str]) -> np.ndarray:
    kinds = metadata.numbers("tokenizer.ggml.token_type", None, len(tokens))
    return np.full(len(tokens), NORMAL) if kinds is None else kinds


def _byte_level(
    metadata: Metadata, tokens: Sequence[str], kinds: np.ndarray
) -> tokenizers.Tokenizer:
    splitting = _splitting(metadata)
    backend = tokenizers.Tokenizer(
        models.BPE(
            _numbered(tokens), _written_merges(metadata), ignore_merges=splitting.whole_words
        )
    )
    steps: list[pre_tokenizers.PreTokenizer] = []
    if splitting.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    pattern = splitting.pattern or ()
    for each in (pattern,) if isinstance(pattern, str) else pattern:
        steps.append(pre_tokenizers.Split(Regex(each), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(False, use_regex=splitting.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    return backend


def _written_merges(metadata: Metadata) -> list[tuple[str, str]]:
    """The file's merges of two tokens. Raises CheckpointError for others."""
    found = []
    for merge in metadata.texts("tokenizer.ggml.merges"):
        first, _, second = merge.partition(" ")
        if not second:
            raise CheckpointError(
                f"{metadata.path}: tokenizer.ggml.merges has {merge!r:.80}: expected two tokens"
            )
        found.append((first, second))
    return found


def _splitting(metadata: Metadata) -> Splitting:
    name = metadata.text("tokenizer.ggml.pre", "gpt-2")
    if name not in SPLITTINGS:
        raise CheckpointError(
            f"{metadata.path}: the tokenizer splits texts by the rule {name!r:.80} "
            f"(tokenizer.ggml.pre): expected one of {', '.join(SPLITTINGS)}; load the model's "
            "safetensors checkpoint"
        )
    return SPLITTINGS[name]


def _sentence_piece(
    metadata: Metadata, tokens: Sequence[str], kinds: np.ndarray
) -> tokenizers.Tokenizer:
    # Gemma 4's files list the merges; in others they follow from the scores.
    is_listed = metadata.text("tokenizer.ggml.model") == "gemma4"
    if is_listed:
        merges = _written_merges(metadata)
    else:
        scores = metadata.numbers("tokenizer.ggml.scores", length=len(tokens))
        merges = [*_merges(tokens, scores, kinds)]
    unknown = _token_id(metadata, "unknown", tokens)
    backend = tokenizers.Tokenizer(
        models.BPE(
            _numbered(tokens),
            merges,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spaces: list[normalizers.Normalizer] = [normalizers.Replace(" ", SPACE)]
    undo: list[decoders.Decoder] = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    if metadata.flag("tokenizer.ggml.add_space_prefix", not is_listed):
        spaces.insert(0, normalizers.Prepend(SPACE))
        undo.append(decoders.Strip(" ", 1, 0))
    backend.normalizer = normalizers.Sequence(spaces)
    backend.decoder = decoders.Sequence(undo)
    return backend


def _merges(
    tokens: Sequence[str], scores: np.ndarray, kinds: np.ndarray
) -> Iterator[tuple[str, str]]:
    """Pairs of tokens whose concatenation is a token, in descending order of its score."""
    normal = {token for token, kind in zip(tokens, kinds, strict=True) if kind == NORMAL}
    for index in np.argsort(-scores.astype(np.float32), kind="stable"):
        token = tokens[index]
        if token not in normal:
            continue
        for cut in range(1, len(token)):
            pair = token[:cut], token[cut:]
            if pair[0] in normal and pair[1] in normal:
                yield pair


def _numbered(tokens: Sequence[str]) -> dict[str, int]:
    """Token → id; the first id for duplicates."""
    ids: dict[str, int] = {}
    for index, token in enumerate(tokens):
        ids.setdefault(token, index)
    return ids


def _add_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[str], kinds: np.ndarray) -> None:
    added = [
        AddedToken(tokens[index], normalized=False, special=bool(kinds[index] == CONTROL))
        for index in np.flatnonzero((kinds == CONTROL) | (kinds == USER_DEFINED)).tolist()
        if tokens[index]
    ]
    backend.add_special_tokens([token for token in added if token.special])
    backend.add_tokens([token for token in added if not token.special])


def _token_id(metadata: Metadata, kind: str, tokens: Sequence[str]) -> int | None:
    """The id of a special token such as `bos`; None if the file has none."""
    key = f"tokenizer.ggml.{kind}_token_id"
    index = metadata.whole(key, None)
    if index is None:
        return None
    if not 0 <= index < len(tokens):
        raise CheckpointError(
            f"{metadata.path}: {key} is {index}: expected an id from 0 to {len(tokens) - 1}"
        )
    return index


def _special_tokens(metadata: Metadata, tokens: Sequence[str]) -> dict[str, str]:
    found = {name: _token_id(metadata, key, tokens) for name, key in NAMES.items()}
    return {f"{name}_token": tokens[id] for name, id in found.items() if id is not None}


def _begins(metadata: Metadata, model: str) -> bool:
    """The default of add_bos_token."""
    return model in ("llama", "gemma4") or _splitting(metadata).begins


def _add_ends(
    backend: tokenizers.Tokenizer, metadata: Metadata, special: Mapping[str, str], *, begins: bool
) -> None:
    """Makes the backend add bos and eos tokens as the file says."""
    wanted = {
        "bos_token": metadata.flag("tokenizer.ggml.add_bos_token", begins),
        "eos_token": metadata.flag("tokenizer.ggml.add_eos_token", False),
    }
    ends = {name: special[name] for name, add in wanted.items() if add and name in special}
    if not ends:
        return
    sequence = [ends.get("bos_token"), "$A", ends.get("eos_token")]
    ids = [(token, backend.token_to_id(token)) for token in ends.values()]
    backend.post_processor = processors.TemplateProcessing(
        single=[piece for piece in sequence if piece is not None], special_tokens=ids
    )


def _chat_templates(metadata: Metadata) -> dict[str, str]:
    prefix = "tokenizer.chat_template"
    found = {
        key.removeprefix(f"{prefix}."): metadata.text(key)
        for key in metadata.values
        if key.startswith(f"{prefix}.")
    }
    default = metadata.text(prefix, None)
    return found if default is None else {"default": default, **found}
