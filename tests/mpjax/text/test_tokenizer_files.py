"""Sound files are read right; tests/mpjax/test_bad_files.py has the others."""

from __future__ import annotations

import pytest

from mpjax.checkpoint import CheckpointError
from mpjax.text.tokenizer_files import (
    explain_missing,
    read_backend,
    read_chat_templates,
    read_optional,
    read_special_tokens,
    read_stop_ids,
)
from tests.mpjax.bad_files.ways import bounds
from tests.mpjax.tokenizer_folders import sentencepiece, write


def test_many_tokens_are_added_at_once_with_the_ids_that_they_are_given(tmp_path):
    """One after the other, each takes time for all before it: two minutes."""
    backend = sentencepiece()
    start = backend.get_vocab_size()
    tokens = {str(start + i): {"content": f"<{i}>", "special": bool(i % 2)} for i in range(20_000)}
    shuffled = dict(sorted(tokens.items(), key=lambda item: item[1]["content"]))
    extra = [f"<{i}>" for i in range(4, 20_000)]
    config = {"added_tokens_decoder": shuffled, "extra_special_tokens": extra}
    write(tmp_path, backend, tokenizer_config=config)
    backend = read_backend(tmp_path)
    with bounds():
        read_special_tokens(tmp_path, backend)
    assert all(backend.token_to_id(f"<{i}>") == start + i for i in range(20_000))
    added = backend.get_added_tokens_decoder()
    assert [added[start + i].special for i in range(6)] == [False, True, False, True, True, True]


def test_names_of_special_tokens(tmp_path):
    config = {
        "bos_token": {"content": "<s>", "lstrip": False},
        "eos_token": None,
        "pad_token": "<nowhere>",  # no token of this model, and a name all the same
        "add_bos_token": True,
        "image_token": 5,  # who knows what it means
        "extra_special_tokens": {"boi_token": "ab"},
    }
    write(tmp_path, sentencepiece(), tokenizer_config=config, special_tokens_map={"eos_token": "e"})
    backend = read_backend(tmp_path)
    names = read_special_tokens(tmp_path, backend)
    assert names == {
        "bos_token": "<s>",
        "eos_token": "e",
        "pad_token": "<nowhere>",
        "boi_token": "ab",
    }
    special = {token.content for token in backend.get_added_tokens_decoder().values()}
    assert {"e", "ab"} <= special
    assert "<nowhere>" not in special


def test_missing_files_say_nothing(tmp_path):
    assert read_optional(tmp_path / "tokenizer_config.json") == {}
    assert read_chat_templates(tmp_path) == {}
    assert read_stop_ids(tmp_path) == []
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json; it holds nothing\.$"):
        read_backend(tmp_path)


def test_null_counts_as_missing(tmp_path):
    config = {"chat_template": None, "added_tokens_decoder": None, "extra_special_tokens": None}
    write(
        tmp_path,
        sentencepiece(),
        tokenizer_config=config,
        chat_template={"chat_template": "P"},
        generation_config={"eos_token_id": None, "text_config": None},
        config={"text_config": {"eos_token_id": 4, "vocab_size": 5}},
    )
    assert read_special_tokens(tmp_path, read_backend(tmp_path)) == {}
    assert read_chat_templates(tmp_path) == {"default": "P"}
    assert read_stop_ids(tmp_path) == [4]


def test_a_template_keeps_its_line_ends(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"a\r\nb\n")
    assert read_chat_templates(tmp_path) == {"default": "a\r\nb\n"}


@pytest.mark.parametrize("name", ["tokenizer.model", "vocab.json"])
def test_other_tokenizers_are_named(name, tmp_path):
    (tmp_path / name).touch()
    assert f"has {name} but no tokenizer.json: convert it once" in explain_missing(tmp_path)
