"""Proposers as texts."""

from __future__ import annotations

import pytest

import mpjax
from mpjax.generation.speculation.spelling import head_options, parse

pytestmark = pytest.mark.any_version


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ngram", mpjax.Ngram()),
        ("ngram:6", mpjax.Ngram(6)),
        ("ngram:6:2", mpjax.Ngram(6, 2)),
        ("mtp", mpjax.MTP(3)),
        ("mtp:1", mpjax.MTP(1)),
        ("eagle", mpjax.Eagle(3)),
        ("eagle:4:a:folder", mpjax.Eagle(4)),
    ],
)
def test_proposers_without_a_model(text, expected):
    assert parse(text) == expected


def test_a_draft_is_loaded_in_its_precision(tiny_folder):
    draft = parse(f"draft:3:{tiny_folder}@W4A32KV8")
    assert (draft.k, str(draft.kv_format)) == (3, "KV8")  # type: ignore[attr-defined]
    assert draft.model.config.vocab_size == 2048  # type: ignore[attr-defined]
    strange = tiny_folder.with_name("tiny@home")
    strange.symlink_to(tiny_folder)
    assert str(parse(f"draft:3:{strange}").kv_format) == "KV16"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "text",
    ["", "ngrams", "ngram:x", "ngram:4:3:2", "draft", "draft:4", "mtp:x", "mtp:1:2", "eagle:x:a"],
)
def test_other_texts_are_refused(text):
    with pytest.raises(ValueError, match=r"speculate is .*: expected ngram, ngram:4 or ngram:4:3"):
        parse(text)


@pytest.mark.parametrize("text", ["draft:4:", "draft:4:@W4A16KV8"])
def test_an_empty_folder_is_not_the_current_one(text):
    with pytest.raises(ValueError, match="the model's folder is empty text"):
        parse(text)


def test_numbers_are_refused_before_a_model_is_loaded():
    with pytest.raises(ValueError, match="draft: k is 99: expected a whole number from 1 to 32"):
        parse("draft:99:nowhere")
    for text, match in (
        ("ngram:4:0", "Ngram: n is 0"),
        ("mtp:99", "MTP: k is 99"),
        ("eagle:0:a", "Eagle: k"),
    ):
        with pytest.raises(ValueError, match=match):
            parse(text)


def test_a_head_is_loaded_with_the_model():
    assert head_options(None) == head_options("ngram:4:3") == {}
    assert head_options("mtp:4") == {"mtp": True}
    assert head_options("eagle:3:owner/name") == {"drafter": "owner/name"}
    assert head_options("eagle:3:C:/a") == {"drafter": "C:/a"}
    for text in ("eagle", "eagle:3", "eagle:3:"):
        with pytest.raises(ValueError, match=r"speculate is .*: expected ngram"):
            head_options(text)
