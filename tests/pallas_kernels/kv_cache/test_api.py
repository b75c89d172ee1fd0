from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KVFormat, UnsupportedError, append, backend
from pallas_kernels.kv_cache import api, reference, triton
from tests.pallas_kernels.kv_cache.pages import assert_same_bits, ragged_append, random_pages
from tests.pallas_kernels.oracles import QUICK


def pages_of(rng, bits=8, dtype="bfloat16", head_dim=64):
    return random_pages(
        rng, KVFormat(bits), pages=8, kv_heads=2, page_size=64, head_dim=head_dim, dtype=dtype
    )


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_implementations_agree(implementation, rng, interpreted_triton):
    pages = pages_of(rng)
    new = ragged_append(rng, pages, 2, "bfloat16")
    write = functools.partial(append, implementation=implementation)
    written = jax.jit(write, compiler_options=QUICK)(pages, *new.arrays())
    assert_same_bits(written, new.oracle(pages))


@pytest.mark.parametrize("implementation", ["triton", "reference"])
def test_sequences_can_be_packed(implementation, rng, interpreted_triton):
    """Four of them, of which one adds nothing and one runs past its end, and then padding."""
    pages = pages_of(rng)
    new = ragged_append(rng, pages, 3, "bfloat16")
    keys, values = (
        jnp.asarray(np.concatenate([*(x[b, :n] for b, n in enumerate(new.counts)), x[0, :2]]))
        for x in (new.keys, new.values)
    )
    write = functools.partial(append, implementation=implementation)
    written = jax.jit(write, compiler_options=QUICK)(pages, keys, values, *new.arrays()[2:])
    assert_same_bits(written, new.oracle(pages))


@pytest.mark.parametrize(
    ("keys", "values"),
    [
        ((4, 1, 3, 64), (4, 1, 3, 64)),
        ((4, 1, 2, 32), (4, 1, 2, 32)),
        ((4, 1, 2, 64), (4, 2, 2, 64)),
        ((4, 3, 64), (4, 3, 64)),
        ((2, 64), (2, 64)),
    ],
)
def test_keys_and_values_must_fit_the_pages(keys, values, rng):
    arguments = [jnp.zeros((4, 2), jnp.int32), jnp.zeros(4, jnp.int32), jnp.ones(4, jnp.int32)]
    message = r"must be \[batch, tokens, 2, 64\], the KV heads and head dimension of the pages"
    with pytest.raises(ValueError, match=message):
        append(pages_of(rng), jnp.zeros(keys), jnp.zeros(values), *arguments)


def test_unknown_implementations_are_refused(rng):
    pages = pages_of(rng)
    new = ragged_append(rng, pages, 1, "bfloat16")
    with pytest.raises(ValueError, match="append: unknown implementation 'xla'"):
        append(pages, *new.arrays(), implementation="xla")  # type: ignore[arg-type]


def test_the_kernel_needs_a_gpu(rng, monkeypatch):
    monkeypatch.setattr(backend, "why_triton_cannot_run", lambda: "there is no GPU")
    pages = pages_of(rng)
    new = ragged_append(rng, pages, 1, "bfloat16")
    with pytest.raises(UnsupportedError, match=r"append: .*'triton'.*there is no GPU"):
        append(pages, *new.arrays(), implementation="triton")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"bits": 16, "dtype": "float32"}, "pages of float32 are not 16 bits wide"),
        ({"head_dim": 80}, "head dimension 80 is not one of (64, 96, 128, 256)"),
    ],
)
def test_what_the_kernel_cannot_do_goes_to_the_reference(changes, reason, rng, pretend_gpu):
    pages = pages_of(rng, **changes)
    new = ragged_append(rng, pages, 2, changes.get("dtype", "bfloat16"))
    assert api.why_not_triton(pages) == reason
    written = jax.jit(append, compiler_options=QUICK)(pages, *new.arrays())
    assert_same_bits(written, new.oracle(pages))
    with pytest.raises(UnsupportedError, match=re.escape(reason)):
        append(pages, *new.arrays(), implementation="triton")


@pytest.mark.parametrize("supported", [True, False])
def test_the_kernel_is_chosen_where_it_can_run(supported, rng, monkeypatch):
    reason = None if supported else "there is no GPU"
    monkeypatch.setattr(backend, "why_triton_cannot_run", lambda: reason)
    monkeypatch.setattr(triton, "append", lambda *_: "triton")
    monkeypatch.setattr(reference, "append", lambda *_: "reference")
    pages = pages_of(rng)
    chosen: object = append(pages, *ragged_append(rng, pages, 1, "bfloat16").arrays())
    assert chosen == ("triton" if supported else "reference")


def test_tokens_one_at_a_time_equal_all_at_once(rng, trace_counter):
    pages = pages_of(rng)
    new = ragged_append(rng, pages, 4, "bfloat16")
    keys, values, block_tables, starts, counts = new.arrays()
    counted = trace_counter(append)
    step = jax.jit(counted, donate_argnums=0)
    expected = new.oracle(pages)
    for token in range(4):
        chosen = slice(token, token + 1)
        more = (counts > token).astype(jnp.int32)
        pages = step(pages, keys[:, chosen], values[:, chosen], block_tables, starts + token, more)
    assert counted.count == 1
    assert_same_bits(pages, expected)
    assert np.asarray(counts).tolist() == [4, 0, 3, 4]
