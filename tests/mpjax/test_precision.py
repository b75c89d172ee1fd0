from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpjax import precision as precision_module
from mpjax.kernels import KVFormat, WeightFormat
from mpjax.kernels.formats import can_be_symmetric, group_sizes
from mpjax.kernels.kv_cache.codes import KEY_KINDS
from mpjax.precision import Precision, describe_weights

packed_formats = st.one_of(
    st.builds(
        WeightFormat,
        st.sampled_from(["uint4", "uint8"]),
        st.sampled_from([32, 64, 128, None]),
        st.booleans(),
    ),
    st.builds(
        WeightFormat,
        st.sampled_from(["table4", "table3", "table2"]),
        st.sampled_from([32, 64, 128, 256]),
    ),
    st.builds(
        WeightFormat,
        st.just("float8"),
        st.sampled_from([128, None]),
        st.just(False),
        st.sampled_from([None, "float8"]),
    ),
    st.sampled_from([WeightFormat("int8"), WeightFormat("liquid4", 64), WeightFormat("int4", 128)]),
)
caches = st.one_of(
    st.builds(KVFormat, *[st.sampled_from([16, 8, 4, "fp8"])] * 2),
    st.builds(KVFormat, st.sampled_from(["4c", 2, "2t", "2g32"]), st.sampled_from([16, 4, 2])),
)
formats = st.one_of(st.just(WeightFormat("bfloat16")), packed_formats)
bits = st.sampled_from([16, 32])
precisions = st.one_of(
    st.builds(Precision, st.one_of(st.none(), formats), caches, bits=bits),
    st.builds(Precision.mixed, st.sets(formats, min_size=1, max_size=4), caches, bits),
)


@pytest.mark.parametrize(
    ("text", "head", "embedding"),
    [
        ("W4A16KV8H8", "uint8:gK:sym", None),
        ("W4A16KV8E8", None, "uint8:gK:sym"),
        ("A16K8V4H8g64E16", "uint8:g64:sym", "bfloat16"),
        ("W16+W4A16KVfp8HFP8", "float8:g128", None),
        ("W4A8KV4cg64H4E4gK", "uint4:g128:sym", "uint4:gK:sym"),
        ("WFP8AFP8KV8sHNF4g128", "table4:g128", None),
        ("W8A8KV2tH8A8", "int8", None),
    ],
)
def test_tables(text, head, embedding):
    precision = Precision.parse(text)
    assert precision.head == (None if head is None else WeightFormat.parse(head))
    assert precision.embedding == (None if embedding is None else WeightFormat.parse(embedding))
    assert str(precision) == text
    assert Precision.parse(text.lower()) == precision
    assert {*precision.tables} == {
        *(["head"] if head else []),
        *(["embedding"] if embedding else []),
    }
    assert precision.with_tables({}) == Precision.parse(text[: text.index("H" if head else "E")])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("W4A16KV8H9", "H9: W9A16 is not implemented"),
        ("W4A16KV8E8g7", "E8g7: W8g7 is not implemented with A16"),
        ("W4A16KV8H16g32", "H16g32: W16 and W32 have no group size"),
        ("W4A16KV8HX", "can't read the KV format 'KV8HX'"),
        ("W4A16KV8E8H8", "can't read the KV format 'KV8E8'"),
    ],
)
def test_tables_that_there_are_not(text, message):
    with pytest.raises(ValueError, match=message):
        Precision.parse(text)


@pytest.mark.parametrize(
    ("text", "weights", "kv"),
    [
        ("W4gKsymA16KV16", WeightFormat("uint4", None, True), 16),
        ("WNF3g128A16KV8", WeightFormat("table3", 128), 8),
        ("WFP8g128AFP8KV8", WeightFormat("float8", 128, False, "float8"), 8),
        ("W4A8KV4", WeightFormat("liquid4", 64), 4),
        ("W4AxKV4", WeightFormat("int4", 128), 4),
        ("A16KV8", None, 8),
        ("WFP8AFP8K8V4", WeightFormat("float8", None, False, "float8"), (8, 4)),
        ("A16Kfp8V4", None, ("fp8", 4)),
        ("W4A16KV4cg32", WeightFormat("uint4", 128), "4cg32"),
    ],
)
def test_parse(text, weights, kv):
    precision = Precision.parse(text)
    assert precision == Precision(weights, KVFormat(*kv) if isinstance(kv, tuple) else KVFormat(kv))
    assert str(precision) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("W32A32KV16", Precision(WeightFormat("bfloat16"), bits=32)),
        ("W4A32KV8", Precision(WeightFormat("uint4", 128), KVFormat(8), bits=32)),
        ("A32KV16", Precision(bits=32)),
        (
            "W16+W4A16KV8",
            Precision(None, KVFormat(8), (WeightFormat("uint4", 128), WeightFormat("bfloat16"))),
        ),
        (
            "W16A16+WFP8AFP8KV16",
            Precision(mixture=(WeightFormat("bfloat16"), WeightFormat("float8", operand="float8"))),
        ),
        (
            "W32A32+W8A8KV16",
            Precision(mixture=(WeightFormat("int8"), WeightFormat("bfloat16")), bits=32),
        ),
    ],
)
def test_mixtures_and_float32(text, expected):
    """`LanguageModel.precision` of models that are not in one format with 16 bits."""
    assert Precision.parse(text) == expected
    assert str(expected) == text


@pytest.mark.parametrize(
    ("text", "usual"),
    [
        (" W4A16KV8\n", "W4A16KV8"),
        ("wfp8Afp8KVFP8", "WFP8AFP8KVfp8"),
        ("wnf3G32a16k4CG64v4", "WNF3g32A16KV4cg64"),
        ("W8A16+W16A16KV8", "W16+W8A16KV8"),
        ("W4+W4A16KV8", "W4A16KV8"),
    ],
)
def test_capitals_spaces_and_order_do_not_matter(text, usual):
    assert str(Precision.parse(text)) == usual


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("W4A16", "W4A16KV16"),
        ("8-bit", "W8A16KV16"),
        ("nf4", "WNF4A16KV16"),
        ("KV8", "A16KV8"),
        ("W4-A16-KV8", "W4A16KV8"),
        ("W4A16C8", "W4A16KV8"),
        ("uint4:g32:sym", "W4g32symA16KV16"),
        ("W4KV8", "W4A16KV8"),
    ],
)
def test_what_was_probably_meant(text, meant):
    with pytest.raises(ValueError, match=rf"the precision '{text}': did you mean '{meant}'\?$"):
        Precision.parse(text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("W5A16", "W5A16 is not implemented: expected W16A16, W4A16, W8A16"),
        ("W3KV16", "W3A16 is not implemented: expected"),
        ("W4g7", "W4g7 is not implemented with A16: expected g32, g64, g128 or gK"),
    ],
)
def test_a_part_that_there_is_not_is_named_and_nothing_is_suggested(text, reason):
    with pytest.raises(ValueError, match=f"^precision '{text}': {reason}") as error:
        Precision.parse(text)
    assert "did you mean" not in str(error.value)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (4, "precision is 4: expected a text, such as 'W4A16KV16'"),
        (None, "precision is None: expected a text, such as 'W4A16KV8'"),
        (["W4A16KV8"], r"precision is \['W4A16KV8'\]: expected a text, such as 'W4A16KV8'"),
    ],
)
def test_what_is_no_text(value, message):
    with pytest.raises(ValueError, match=message):
        Precision.of(value)


def test_what_takes_a_precision_takes_it_as_text():
    precision = Precision.parse("W4A16KV8")
    assert Precision.of(precision) is precision
    assert Precision.of("W4A16KV8") == Precision("uint4:g128", "KV8") == precision  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weights": "uint4:g99"}, "uint4 with group size 99"),
        ({"kv": "KV9"}, "KV9 is not a KV format"),
        ({"bits": 8}, "bits is 8: expected 16 or 32"),
        ({"mixture": ("uint4:g32",)}, "mixture has 1 format.* expected a mixture of two"),
        ({"weights": "uint4:g32", "mixture": ("uint4:g32", "int8")}, "and weights of None"),
    ],
)
def test_fields_that_there_cannot_be(fields, message):
    with pytest.raises(ValueError, match=message):
        Precision(**fields)


@pytest.mark.parametrize(
    ("text", "found", "agrees"),
    [
        ("A16KV8", "W4A16KV16", True),
        ("W4A16KV8", "W4symA16KV16", True),
        ("W4A16KV8", "W16+W4A16KV16", True),  # maps that a checkpoint left in 16 bits
        ("W4A16KV8", "W4g32A16KV16", False),
        ("W4A16KV8", "W4+W8A16KV16", False),
        ("W4A16KV8", "W16A16KV16", False),
        ("W16A16KV8", "W16A16KV16", True),
        ("W16A16KV8", "W4A16KV16", False),
        ("W16+W4A16KV8", "W16+W4symA16KV16", True),
        ("W16+W4A16KV8", "W4A16KV16", False),
        ("W16+W4A16KV8", "W16+W4+W8A16KV16", False),
    ],
)
def test_agreement_with_what_is_there(text, found, agrees):
    assert Precision.parse(text).agrees_with(Precision.parse(found).formats) == agrees


def test_precisions_that_can_share_their_weights():
    one, other = (Precision.parse(f"W16+W4A16{kv}") for kv in ("KV8", "KV4"))
    assert one.of_weights == other.of_weights != Precision.parse("A16KV8").of_weights


def test_the_default_group_size_can_be_written():
    assert Precision.parse("W4g128A16KV16") == Precision.parse("W4A16KV16")


@given(precisions)
def test_parse_inverts_str(precision):
    assert Precision.parse(str(precision)) == precision


@pytest.mark.parametrize(
    ("text", "one_in", "written"),
    [
        ("W4AxKV4", 8, "W4AxKV4"),
        ("w4ax16kv4", 16, "W4Ax16KV4"),
        ("W16A16+W4Ax4KV8", 4, "W16A16+W4Ax4KV8"),
    ],
)
def test_one_block_in_so_many_has_eight_bits(text, one_in, written):
    precision = Precision.parse(text)
    assert (precision.wide_blocks, str(precision)) == (one_in, written)
    assert Precision.parse(written) == precision
    assert Precision("uint4:g128", wide_blocks=3) == Precision("uint4:g128")  # which has no blocks


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "can't read the precision '': expected, for example, W4A16KV8"),
        ("AWQ", "can't read the precision 'AWQ': expected, for example, W4A16KV8"),
        (
            "W8A4KV4",
            r"'W8A4KV4': A4 is not implemented: activations can be A16 \(A32 in f.*\), A8, AFP8 or",
        ),
        ("W3A16KV8", "W3A16 is not implemented: expected W16A16, W4A16"),
        ("A8KV8", "A8 needs a W part"),
        ("W4g48A16KV8", "W4g48 is not implemented with A16: expected g32, g64, g128 or gK, all"),
        ("W4g128A8KV8", "W4g128 is not implemented with A8: expected g64$"),
        ("WNF4symA16KV8", "WNF4A16 has no zero point: leave sym out"),
        ("W16symA16KV8", "W16 and W32 have no group size and no sym"),
        ("W32A16KV8", "W32A16 is not implemented: .* as in W16A16 and W32A32"),
        ("W8AxKV8", "AX is not implemented"),
        ("W4Ax0KV8", "Ax0 is no share of blocks in 8 bits: write A4 for none"),
        ("W4Ax4+W4Ax8KV8", "Ax has one share of blocks for the whole model"),
        ("W4A16+W8A32KV8", "A16 and A32 can't be in one model, which"),
        ("W4A16KV3", "KV3 is not a KV format: expected KV16, KV8, KV8s, KV4"),
        ("W4A16KxV8", "can't read the KV format 'KxV8'"),
    ],
)
def test_what_cannot_be_read_is_named(text, message):
    with pytest.raises(ValueError, match=message):
        Precision.parse(text)


def rows_of_docs(heading: str) -> list[list[str]]:
    """The cells of a table in docs/precision.md, below a heading and without the table's own."""
    text = (Path(__file__).parents[2] / "docs" / "precision.md").read_text(encoding="utf-8")
    section = text.split(f"## {heading}")[1].split("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip().strip("`") for cell in row] for row in rows]


def test_the_docs_name_every_weight_format():
    rows = rows_of_docs("W and A")
    for name, format, bits, activations, sizes, sym, _ in rows:
        weights = Precision.parse(f"{name}KV16").weights
        assert (str(weights), f"{name}KV16") == (format, str(Precision(weights)))
        assert weights is not None
        assert weights.bits == int(bits)
        assert (
            activations.split(",")[0]
            == {None: "16 bits", "float8": "e4m3", "int8": "int8"}[weights.operand]
        )
        found = ["K" if size is None else str(size) for size in group_sizes(weights.codes)]
        assert sizes == (", ".join(found) if weights.is_packed else "")
        assert sym == ("yes" if can_be_symmetric(weights.codes) else "")
    assert {name for name, *_ in rows} == {f"W{w}A{a}" for w, a in precision_module._formats()}


def test_the_docs_name_every_kv_format():
    rows = rows_of_docs("KV:")
    for name, _, bits, *_ in rows:
        kv = KVFormat.parse(name)
        assert str(kv) == name
        assert kv.key_codes.bits == kv.value_codes.bits == int(float(bits))
    kinds = {f"KV{kind}" for kind in KEY_KINDS if "g" not in kind}
    assert {name for name, *_ in rows} == kinds | {"K4cV4c"}


def test_describe_weights():
    assert describe_weights(WeightFormat("float16")) == "W16"
    assert describe_weights(WeightFormat("bfloat16"), 32) == "W32"
    assert describe_weights(WeightFormat("uint8", None)) == "W8gK"
