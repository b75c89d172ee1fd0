from benchmarks import summary
from mpjax.bench import attention, gemm, generate
from tests.mpjax.bench.rows import attention_row, gemm_row, generate_row


def cells(table, name):
    """The texts of the line that begins with a name."""
    [line] = [line for line in table.splitlines() if line.startswith(f"| {name} |")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_models_are_lines_and_batches_columns():
    rows = [
        generate.figures(generate_row(precision=precision, batch=batch, **changes))
        for precision, batch, changes in (
            ("W4A16KV8", 1, {}),
            ("W4A16KV8", 16, {}),
            ("W16A16KV16", 1, {}),
            ("W4A16KV8", 3, {}),
            ("W4A16KV2", 1, {"prompt_tokens": 8192}),
        )
    ]
    table = summary.generate(rows)
    first, second = cells(table, "W4A16KV8")
    assert first == f"{rows[0]['decode_tokens_per_second']:.0f} ({rows[0]['roofline_share']:.0%})"
    assert second.startswith(f"{rows[1]['decode_tokens_per_second']:.0f} (")
    assert cells(table, "W16A16KV16")[1] == ""
    assert "W4A16KV2" not in table


def test_rounded_products_replace_others_and_forced_ones_are_left_out():
    place = {"shape": summary.SHAPE, "M": 16}
    rows = [
        gemm.figures(gemm_row(**(place | changes)))
        for changes in (
            {"rounded": True, "microseconds": 10.0},
            {"microseconds": 20.0},
            {"microseconds": 1.0, "forced": "dequantize"},
            {"microseconds": 1.0, "in_model": True},
            {"microseconds": 5.0, "shape": "qwen3-8b.down"},
        )
    ]
    expected = f"{rows[0]['speedup']:.2f} ({rows[0]['times_floor']:.2f})"
    found = cells(summary.gemm(rows), "uint4:g128")
    assert found == [expected], "columns without a cell are left out"


def test_only_one_new_token_and_common_heads_are_compared():
    def row(name, **changes):
        return attention.figures(attention_row(shape=name, **changes))

    one, eight = row("b1-h32/8-d128-c4096"), row("b8-h32/8-d128-c4096", microseconds=50.0)
    names = ("b1-h32/8-d128-c4096-q512", "b1-h48/8-d128-c4096", "b1-h32/8-d128-c4096-l9000")
    others = [row(name, microseconds=1.0) for name in names]
    alone = row("b8-h32/8-d128-c4096", format="K8V4")
    table = summary.attention([one, *others, eight, alone])
    found = cells(table, one["format"])
    assert found[0] == f"{one['speedup']:.2f} ({one['times_floor']:.2f})"
    assert found[1] == f"{eight['speedup']:.2f} ({eight['times_floor']:.2f})"
    assert "K8V4" not in table


def test_perplexity_is_compared_with_the_first():
    rows = [{"precision": "W16", "perplexity": 8.0}, {"precision": "W4", "perplexity": 8.4}]
    table = summary.perplexity([*rows, rows[0]])
    assert cells(table, "W16") == ["8.000", "+0.0%"]
    assert cells(table, "W4") == ["8.400", "+5.0%"]
