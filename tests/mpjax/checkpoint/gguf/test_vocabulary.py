"""Tokenizers that are built from a GGUF file's metadata."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpjax.checkpoint.gguf import vocabulary
from mpjax.checkpoint.gguf.header import read_header
from mpjax.checkpoint.gguf.metadata import Metadata
from mpjax.errors import CheckpointError
from mpjax.text.tokenizer import Tokenizer
from tests.mpjax.checkpoint.gguf.write_gguf import TOKENS, gguf
from tests.mpjax.checkpoint.gguf.write_gguf import vocabulary as byte_level

TEXTS = ("hello world", "  two  spaces\n\n", "I'LL say 2024, don't", "日本 🙂", "", "<|user|>hi")
PIECES = [
    *("<unk>", "<s>", "</s>", "<0x0A>", "<0xC3>", "<0xA9>", "▁", "h", "e", "l", "o", "w"),
    *("he", "ll", "hell", "hello", "▁w", "▁hello", "wo", "<mark>"),
]


def sentence_piece() -> dict:
    """A vocabulary whose best merges are those of the longest tokens."""
    kinds = [2, 3, 3, 6, 6, 6] + [1] * (len(PIECES) - 7) + [4]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": PIECES,
        "tokenizer.ggml.scores": [float(len(piece)) for piece in PIECES],
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def build(tmp_path: Path, values: dict) -> Tokenizer:
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf(values, {}))
    return vocabulary.read_tokenizer(Metadata(path, read_header(path).metadata))


def test_byte_level(tmp_path):
    tokenizer = build(tmp_path, byte_level())
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text
    ids = tokenizer.encode("hello world")
    assert [TOKENS[i] for i in ids] == ["hello", "Ġw", "o", "r", "l", "d"]
    assert tokenizer.encode("<|user|>")[0] == 1
    assert (tokenizer.stop_ids, tokenizer.special_ids) == ((0,), {0, 1})
    assert tokenizer.chat([{"role": "user", "content": "hi"}]) == "<|user|>hi"


def test_ends_of_texts(tmp_path):
    values = byte_level() | {"tokenizer.ggml.bos_token_id": 1}
    plain = build(tmp_path, values).encode("he")
    added = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.add_eos_token": True}
    assert build(tmp_path, values | added).encode("he") == [1, *plain, 0]
    llama3 = values | {"tokenizer.ggml.pre": "llama-bpe"}
    assert build(tmp_path, llama3).encode("he") == [1, *plain]


@pytest.mark.parametrize("name", vocabulary.SPLITTINGS)
def test_every_rule_of_splitting_keeps_the_text(name, tmp_path):
    tokenizer = build(tmp_path, byte_level() | {"tokenizer.ggml.pre": name})
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt-2", ["I", "'", "LL", " say", " 2024", ",", " don", "'t"]),
        ("smollm", ["I", "'", "LL", " say", " ", "2", "0", "2", "4", ",", " don", "'t"]),
        ("llama-bpe", ["I", "'LL", " say", " ", "202", "4", ",", " don", "'t"]),
        ("qwen2", ["I", "'LL", " say", " ", "2", "0", "2", "4", ",", " don", "'t"]),
        ("gpt-4o", ["I'LL", " say", " ", "202", "4", ",", " don't"]),
        ("tekken", ["I", "'LL", " say", " ", "2", "0", "2", "4", ",", " don", "'t"]),
    ],
)
def test_words(name, words, tmp_path):
    backend = build(tmp_path, byte_level() | {"tokenizer.ggml.pre": name}).backend
    text = "I'LL say 2024, don't"
    cuts = [span for _, span in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[begin:end] for begin, end in cuts] == words


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("qwen2", ["नमस", "्त", "े", " 中国abc", "1", "2", "\n", "x", ".foo"]),
        ("qwen35", ["नमस्ते", " 中国abc", "1", "2", "\n", "x", ".foo"]),
        ("seed-coder", ["नमस", "्त", "े", " 中国abc", "1", "2", "\n", "x", ".foo"]),
        ("deepseek-v3", ["नमस्ते", " ", "中国", "abc", "12", "\n", "x", ".foo"]),
        ("deepseek-llm", ["नमस्ते", " ", "中国", "abc", "12", "\n", "x", ".", "foo"]),
        ("kimi-k2", ["नमस्ते", " ", "中国", "abc", "12", "\n", "x", ".foo"]),
    ],
)
def test_words_of_other_scripts(name, words, tmp_path):
    backend = build(tmp_path, byte_level() | {"tokenizer.ggml.pre": name}).backend
    text = "नमस्ते 中国abc12\nx.foo"
    cuts = [span for _, span in backend.pre_tokenizer.pre_tokenize_str(text)]
    assert [text[begin:end] for begin, end in cuts] == words


def test_sentence_piece(tmp_path):
    tokenizer = build(tmp_path, sentence_piece())
    pieces = [PIECES[i] for i in tokenizer.encode("hello wo")]
    assert pieces == ["<s>", "▁hello", "▁w", "o"]  # ▁w ties with wo, and comes first in the file
    assert tokenizer.decode(tokenizer.encode("hello\né<mark>")) == "hello\né<mark>"
    assert tokenizer.byte_ids == {3: 0x0A, 4: 0xC3, 5: 0xA9}
    bare = sentence_piece() | {"tokenizer.ggml.add_space_prefix": False}
    assert [PIECES[i] for i in build(tmp_path, bare).encode("hello")] == ["<s>", "hello"]


def test_listed_merges_of_characters(tmp_path):
    """As in Gemma 4's files: spaces are characters, none is put in front, and bytes fall back."""
    values = sentence_piece() | {
        **{"tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": ["h e", "l l", "▁ w"]}
    }
    del values["tokenizer.ggml.scores"]
    tokenizer = build(tmp_path, values)
    ids = tokenizer.encode("hello wo")
    assert [PIECES[i] for i in ids] == ["<s>", "he", "ll", "o", "▁w", "o"]
    assert tokenizer.decode(tokenizer.encode("hello\né<mark>")) == "hello\né<mark>"


def test_control_tokens_that_end_an_answer(tmp_path):
    values = byte_level() | {"tokenizer.ggml.tokens": ["<|endoftext|>", "<|im_end|>", *TOKENS[2:]]}
    assert build(tmp_path, values).stop_ids == (0, 1)
    del values["tokenizer.ggml.eos_token_id"]
    assert build(tmp_path, values | {"tokenizer.ggml.eot_token_id": 1}).stop_ids == (1, 0)


def test_templates_by_name(tmp_path):
    values = byte_level() | {"tokenizer.chat_template.tool_use": "{{ tools }}"}
    assert build(tmp_path, values).chat_templates.keys() == {"default", "tool_use"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"tokenizer.ggml.model": "rwkv"},
            "model is 'rwkv': expected gpt2 or llama or gemma4; load",
        ),
        ({"tokenizer.ggml.pre": "new"}, "by the rule 'new' .* expected one of llama3, "),
        ({"tokenizer.ggml.merges": ["he"]}, "merges has 'he': expected two tokens"),
        ({"tokenizer.ggml.merges": ["he xyz"]}, "holds no tokenizer that can be built: .*xyz"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos_token_id is 9999: expected an id from 0 to"),
        ({"tokenizer.ggml.token_type": [1]}, "token_type' is ndarray of 1: expected a list of 263"),
        ({"tokenizer.ggml.tokens": "a"}, "tokens' is 'a': expected a list of texts"),
    ],
)
def test_vocabularies_that_are_refused(change, said, tmp_path):
    with pytest.raises(CheckpointError, match=said):
        build(tmp_path, byte_level() | change)


def test_sentence_piece_needs_scores(tmp_path):
    values = {key: v for key, v in sentence_piece().items() if "scores" not in key}
    with pytest.raises(CheckpointError, match=r"has no 'tokenizer\.ggml\.scores': expected a list"):
        build(tmp_path, values)
