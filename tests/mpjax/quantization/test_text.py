from __future__ import annotations

import numpy as np
import pytest

from mpjax.quantization.text import Calibration


@pytest.fixture
def read(tiny):
    def windows(documents, **options):
        options = {"window": 8, "tokens": 1000, "batch": 2} | options
        return Calibration(**options).windows(documents, tiny.tokenizer, tiny.config)

    return windows


def test_windows_are_of_one_document_each(read, tiny):
    texts = ["a b c d e f g h i j k", "x y"]
    batches = read(texts)
    assert {windows.tokens.shape for windows in batches} == {(2, 8)}
    pieces = [
        list(tokens[real])
        for windows in batches
        for tokens, real in zip(*windows, strict=True)
        if real.any()
    ]
    start = [] if tiny.tokenizer.bos_id is None else [tiny.tokenizer.bos_id]
    whole = [start + tiny.tokenizer.encode(text) for text in texts]
    cut = [ids[begin : begin + 8] for ids in whole for begin in range(0, len(ids), 8)]
    assert [list(map(int, piece)) for piece in pieces] == cut
    assert all((windows.tokens[~windows.is_real] == 0).all() for windows in batches)


def test_only_so_many_tokens_are_read(read):
    batches = read(["a b c d e f g h", "i j k l m n o p"], tokens=11)
    assert sum(int(windows.is_real.sum()) for windows in batches) == 11


def test_short_texts_make_narrow_windows(read):
    [windows] = read(["a"], window=99, batch=16)
    assert windows.tokens.shape[0] == 1
    assert np.all(windows.is_real)
