from __future__ import annotations

from mpjax.generation.buckets import bucket_rows, bucket_tokens, ladder


def test_lengths():
    assert [bucket_tokens(n) for n in (1, 16, 17, 64, 65, 512, 513, 1024, 1025)] == [
        *(16, 16, 32, 64, 128, 512, 1024, 1024, 1536)
    ]


def test_rows():
    assert [bucket_rows(n) for n in (1, 2, 3, 4, 5, 8, 9, 16, 17, 100)] == [
        *(1, 2, 4, 4, 8, 8, 16, 16, 24, 104)
    ]


def test_ladder():
    assert ladder(1, 1) == [1]
    assert ladder(16, 256) == [16, 64, 256]
    assert ladder(16, 300) == [16, 64, 256, 300]
