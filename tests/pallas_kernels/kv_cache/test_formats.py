from __future__ import annotations

import itertools

import pytest

from mpjax.kernels import KVFormat

KINDS = (16, 8, 4, "fp8", "8s")
GIVEN = {"fp8": "head", "8s": "static"}


@pytest.mark.parametrize(("keys", "values"), list(itertools.product(KINDS, KINDS)))
def test_parse_inverts_str(keys, values):
    if {keys, values} == set(GIVEN):
        with pytest.raises(ValueError, match="scales are given for heads or for channels"):
            KVFormat(keys, values)
        return
    format = KVFormat(keys, values)
    assert str(format) == (f"KV{keys}" if keys == values else f"K{keys}V{values}")
    assert KVFormat.parse(str(format)) == format
    assert KVFormat.parse(f"K{keys}V{values}") == format
    for codes, kind in ((format.key_codes, keys), (format.value_codes, values)):
        assert codes.bits == (8 if kind in GIVEN else kind)
        assert codes.has_given_scales == (kind in GIVEN)
        assert codes.is_quantized == (kind != 16)
        assert codes.planes * codes.bits == 16
    assert format.scaling == GIVEN.get(keys, GIVEN.get(values))


def test_values_are_stored_as_keys_are_unless_said_otherwise():
    assert KVFormat(8) == KVFormat(8, 8) == KVFormat.parse("KV8")
    assert KVFormat() == KVFormat(16, 16)
    assert KVFormat("8", "4") == KVFormat(8, 4)
    assert len({KVFormat(8), KVFormat("8"), KVFormat(8, 8), KVFormat(8, 4)}) == 2


@pytest.mark.parametrize(
    "text", ["KV", "8", "KV8 .", "KVx", "KV-8", "K8", "K8KV8", "KFP8", "K8V4C4"]
)
def test_parse_refuses_other_words(text):
    with pytest.raises(ValueError, match=f"can't read the KV format '{text}'"):
        KVFormat.parse(text)


@pytest.mark.parametrize(
    ("text", "usual"),
    [("kv8", "KV8"), ("KV8 ", "KV8"), ("KVFP8", "KVfp8"), ("\tk8v4CG64", "K8V4cg64")],
)
def test_capitals_and_spaces_do_not_matter(text, usual):
    assert str(KVFormat.parse(text)) == usual


@pytest.mark.parametrize(
    ("text", "keys", "values", "block", "group"),
    [
        ("KV4c", "4c", 4, 128, 128),
        ("KV4cg64", "4cg64", 4, 128, 64),
        ("KV2", 2, 2, 256, 128),
        ("KV2g32", "2g32", 2, 256, 32),
        ("KV2t", "2t", 2, 256, None),
        ("K4cV2", "4c", 2, 256, 128),
        ("K8V2", 8, 2, 256, None),
        ("K4V8", 4, 8, None, None),
        ("KV4t", "4t", 4, None, None),
        ("K4tV2", "4t", 2, 256, None),
        ("K4cg64V4cg64", "4cg64", "4cg64", 128, 64),
        ("K8V4c", 8, "4c", 128, 128),
        ("K2V4c", 2, "4c", 256, 128),
    ],
)
def test_formats_with_blocks(text, keys, values, block, group):
    """BitDecoding's names; values beside channel-wise keys are per token."""
    format = KVFormat.parse(text)
    assert (format.keys, format.values) == (keys, values)
    assert format == KVFormat(keys, values)
    assert str(format) == text
    assert format.block == block
    assert format.group == group
    of_channels = (keys not in (8, 4, "4t", "2t"), "c" in str(values))
    for codes, is_channel in zip((format.key_codes, format.value_codes), of_channels, strict=True):
        assert codes.group == (group if is_channel else None)
        assert codes.scaling == ("channel" if is_channel else "token")


def test_channels_of_keys_and_values_have_groups_in_common():
    with pytest.raises(ValueError, match="K4cV4cg64: channels of keys and values need groups of"):
        KVFormat.parse("K4cV4cg64")


@pytest.mark.parametrize("text", ["K4cVfp8", "Kfp8V2", "K8sV2"])
def test_fp8_has_no_place_for_tokens_that_wait(text):
    with pytest.raises(ValueError, match=f"{text}: the tokens that wait in 16 bits"):
        KVFormat.parse(text)


def test_keys_that_wait_are_not_transformed():
    assert [KVFormat.parse(text).key_codes.hadamard for text in ("K4V8", "K4tV8")] == [True, False]
    with pytest.raises(ValueError, match=r"K4V2: keys of .* ask for K4cV2 or K4tV2"):
        KVFormat.parse("K4V2")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("KV0", "0"),
        ("K8V3", "3"),
        ("K32V16", "32"),
        ("KV8c", "8c"),
        ("KV8t", "8t"),
        ("KV2g16", "2g16"),
    ],
)
def test_others_do_not_exist(text, kind):
    message = f"KV{kind} is not a KV format: expected KV16, KV8, KV8s, KV4, KV4t"
    with pytest.raises(ValueError, match=message):
        KVFormat.parse(text)


def test_a_format_may_come_as_text():
    format = KVFormat.parse("K8V4")
    assert KVFormat.of(format) is format
    assert KVFormat.of("K8V4") == format
    with pytest.raises(ValueError, match="can't read the KV format 'K8': expected KV16"):
        KVFormat.of("K8")
    for other in (8, None):
        with pytest.raises(
            ValueError, match=f"KV format is {other}: expected a text, such as 'KV8'"
        ):
            KVFormat.of(other)  # type: ignore[arg-type]
