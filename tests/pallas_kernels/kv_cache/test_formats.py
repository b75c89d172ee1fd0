from __future__ import annotations

import itertools

import pytest

from pallas_kernels import KVFormat

KINDS = (16, 8, 4, "fp8")


@pytest.mark.parametrize(("keys", "values"), list(itertools.product(KINDS, KINDS)))
def test_parse_inverts_str(keys, values):
    format = KVFormat(keys, values)
    assert str(format) == (f"KV{keys}" if keys == values else f"K{keys}V{values}")
    assert KVFormat.parse(str(format)) == format
    assert KVFormat.parse(f"K{keys}V{values}") == format
    for codes, kind in ((format.key_codes, keys), (format.value_codes, values)):
        assert codes.bits == (8 if kind == "fp8" else kind)
        assert codes.is_quantized == (kind != 16)
        assert codes.planes * codes.bits == 16


def test_values_are_stored_as_keys_are_unless_said_otherwise():
    assert KVFormat(8) == KVFormat(8, 8) == KVFormat.parse("KV8")
    assert KVFormat() == KVFormat(16, 16)
    assert len({KVFormat(8), KVFormat(8, 8), KVFormat(8, 4)}) == 2


@pytest.mark.parametrize("text", ["KV", "kv8", "8", "KV8 ", "KVx", "KV-8", "K8", "K8KV8", "KVFP8"])
def test_parse_refuses_other_words(text):
    with pytest.raises(ValueError, match=f"can't read the KV format '{text}'"):
        KVFormat.parse(text)


@pytest.mark.parametrize(("text", "kind"), [("KV0", 0), ("KV2", 2), ("K8V3", 3), ("K32V16", 32)])
def test_other_widths_do_not_exist(text, kind):
    message = f"KV{kind} is not a KV format: expected KV16, KV8, KV4 or KVfp8, or one for each as"
    with pytest.raises(ValueError, match=message):
        KVFormat.parse(text)
