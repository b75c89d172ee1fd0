"""PTX of a sum over devices: every thread pushes its words with a flag, and polls the others'."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import jax.numpy as jnp

from mpjax.kernels.sums.layout import COUNTERS, MOST_PROGRAMS, RANK, UNIT, Tiles

MOST_POLLS = 1 << 27  # of a thread: about a minute, after which it ends the program with an error
# Writes the address of an inbox ($0) to a result ($1).
ADDRESS = "st.global.b64 [$1], $0;"
_BATCH = 16  # most loads of a thread in flight; each takes four registers
_PAIRS = (0, 1)  # halves of a unit: two words and their flags are 16 bytes


def write_addresses(devices: int) -> str:
    """PTX that writes the addresses ($0) of all inboxes and this device's number ($1) to one ($2).

    $3: a result, which is not written.
    """
    copies = "".join(
        f"ld.global.b64 address, [$0+{8 * device}]; st.global.b64 [$2+{8 * device}], address;"
        for device in range(devices)
    )
    number = f"ld.global.b32 number, [$1]; st.global.b32 [$2+{RANK}], number;"
    return "{.reg .b64 address; .reg .b32 number;" + copies + number + "}"


def push_and_add(tiles: Tiles, dtype: jnp.dtype, inbox: int, part: int) -> str:
    """PTX that sums the terms of x on each device, and all devices' sums in the devices' order.

    $0: the address of x, float32 or bfloat16 (dtype). $1: of this device's inbox. $2: of the
    result. inbox: the offset of the parts in an inbox. part: the bytes between those of two
    devices.

    A word and the round's number are written and read as 64 bits, which are never seen in part. So
    a reader that sees the number has the word, and no fence is needed.
    """
    units = range(tiles.units)
    lines = [_begin(tiles, inbox, part), *(_load(tiles, unit, dtype) for unit in units)]
    for device in range(tiles.devices):
        lines.append(f"ld.global.b64 address, [$1+{8 * device}]; add.s64 address, address, target;")
        lines += [_push(tiles, unit, pair) for unit in units for pair in _PAIRS]
    # All threads have read the counter before one writes it.
    lines.append("bar.sync 0; mov.u32 polls, 0;")
    together = max(_BATCH // (2 * tiles.units), 1)
    for begin in range(0, tiles.devices, together):
        devices = range(begin, min(begin + together, tiles.devices))
        lines.append(_poll(tiles, devices, part))
    lines += [_add(tiles, unit, dtype) for unit in units]
    return "{" + "\n".join([*lines, _end(tiles)]) + "}"


def _names(letter: str, *counts: int) -> Iterable[str]:
    """The names of registers, such as y1_0_3."""
    for indices in itertools.product(*map(range, counts)):
        yield letter + "_".join(map(str, indices))


def _slot(tiles: Tiles, unit: int, pair: int) -> int:
    """The offset of a pair of words from a thread's first: neighbouring threads' are contiguous."""
    return (2 * unit + pair) * tiles.threads * UNIT


def _begin(tiles: Tiles, inbox: int, part: int) -> str:
    x = ", ".join(_names("x", tiles.units, 4))
    parts = ", ".join(
        itertools.chain(*(_names(letter, tiles.devices, tiles.units, 4) for letter in "yf"))
    )
    pairs = ", ".join(_names("d", tiles.devices, tiles.units, 4))
    return f"""
        .reg .b32 {x}, {parts}, {", ".join(_names("t", tiles.terms, 4))};
        .reg .b32 thread, program, round, rank, place, polls, differs, other, bits;
        .reg .b64 {pairs}, first, second, empty, address, own;
        .reg .b64 target, mine, source, result, counter;
        .reg .f32 lower, upper, term;
        .reg .pred {", ".join(_names("valid", tiles.units))}, again, late, counts, moved;
        mov.u32 thread, %tid.x;
        mov.u32 program, %ctaid.x;
        mad.wide.u32 counter, program, 4, $1;
        ld.global.b32 round, [counter+{COUNTERS}];
        ld.global.b32 rank, [$1+{RANK}];
        mad.wide.u32 own, rank, 8, $1;
        ld.global.b64 own, [own+0];
        add.u32 round, round, 1;
        mov.b64 empty, {{round, round}};
        and.b32 place, round, 1;
        mul.wide.u32 target, place, {tiles.devices * part};
        add.s64 target, target, {inbox};
        mad.wide.u32 target, program, {2 * UNIT * tiles.threads * tiles.units}, target;
        mad.wide.u32 target, thread, {UNIT}, target;
        add.s64 mine, $1, target;
        mad.wide.u32 target, rank, {part}, target;
        mad.lo.u32 place, program, {tiles.threads * tiles.units}, thread;
        mad.wide.u32 source, place, {UNIT}, $0;
        mad.wide.u32 result, place, {UNIT}, $2;"""


def _load(tiles: Tiles, unit: int, dtype: jnp.dtype) -> str:
    before = unit * tiles.threads
    lines = [f"setp.lt.s32 valid{unit}, place, {tiles.nbytes // UNIT - before};"]
    for term in range(tiles.terms):
        words = ", ".join(_names(f"t{term}_", 4))
        place = f"source+{term * tiles.nbytes + UNIT * before}"
        lines.append(f"@valid{unit} ld.global.v4.b32 {{{words}}}, [{place}];")
    for word in range(4):
        terms = [f"t{term}_{word}" for term in range(tiles.terms)]
        lines.append(_total(f"x{unit}_{word}", terms, dtype))
    return "\n".join(lines)


def _push(tiles: Tiles, unit: int, pair: int) -> str:
    first, second = (f"x{unit}_{2 * pair + word}" for word in (0, 1))
    return (
        f"mov.b64 first, {{{first}, round}}; mov.b64 second, {{{second}, round}};"
        f"@valid{unit} st.relaxed.sys.global.v2.b64 [address+{_slot(tiles, unit, pair)}],"
        " {first, second};"
    )


def _poll(tiles: Tiles, devices: range, part: int) -> str:
    """PTX that loads the words of some devices until all have this round's number."""
    units, loads, flags = range(tiles.units), list[str](), list[str]()
    for device, unit, pair in itertools.product(devices, units, _PAIRS):
        names = [f"{device}_{unit}_{2 * pair + word}" for word in (0, 1)]
        loads.append(
            f"mov.b64 d{names[0]}, empty; mov.b64 d{names[1]}, empty;"
            f"@valid{unit} ld.relaxed.sys.global.v2.b64 {{d{names[0]}, d{names[1]}}},"
            f" [mine+{device * part + _slot(tiles, unit, pair)}];"
        )
        flags += [
            f"mov.b64 {{y{name}, f{name}}}, d{name};"
            f"xor.b32 other, f{name}, round; or.b32 differs, differs, other;"
            for name in names
        ]
    label, several = f"poll{devices[0]}", "\n".join([*loads, "mov.b32 differs, 0;", *flags])
    return f"""{label}:
        {several}
        add.u32 polls, polls, 1;
        setp.gt.u32 late, polls, {MOST_POLLS};
        @late trap;
        setp.ne.b32 again, differs, 0;
        @again bra {label};"""


def _add(tiles: Tiles, unit: int, dtype: jnp.dtype) -> str:
    lines = [
        _total(f"x{unit}_{word}", [f"y{q}_{unit}_{word}" for q in range(tiles.devices)], dtype)
        for word in range(4)
    ]
    words, place = ", ".join(_names(f"x{unit}_", 4)), f"result+{UNIT * unit * tiles.threads}"
    return "\n".join([*lines, f"@valid{unit} st.global.v4.b32 [{place}], {{{words}}};"])


def _total(result: str, words: list[str], dtype: jnp.dtype) -> str:
    """PTX that adds words, each of one float32 or two bfloat16, in float32."""
    if len(words) == 1:
        return f"mov.b32 {result}, {words[0]};"
    if dtype == jnp.float32:
        return f"{_added('lower', 'mov.b32 bits, {};', words)} mov.b32 {result}, lower;"
    # A bfloat16 is the upper half of a float32.
    lower = _added("lower", "shl.b32 bits, {}, 16;", words)
    upper = _added("upper", "and.b32 bits, {}, 0xffff0000;", words)
    return f"{lower} {upper} cvt.rn.bf16x2.f32 {result}, upper, lower;"


def _added(register: str, widen: str, words: list[str]) -> str:
    """PTX that adds numbers in a float32 register. widen: makes the bits of a float32 of a word."""
    terms = [widen.format(word) + "mov.b32 term, bits;" for word in words]
    first = f"{terms[0]} mov.f32 {register}, term;"
    return "\n".join([first, *(f"{t} add.rn.f32 {register}, {register}, term;" for t in terms[1:])])


def _end(tiles: Tiles) -> str:
    """PTX that counts the round, also for programs that this sum does not have.

    It ends the program with an error if XLA has moved the inbox to another address.
    """
    return f"""
        setp.ne.u64 moved, own, $1;
        @moved trap;
        mad.lo.u32 place, thread, {tiles.programs}, program;
        setp.lt.u32 counts, place, {MOST_PROGRAMS};
        mad.wide.u32 counter, place, 4, $1;
        @counts st.global.b32 [counter+{COUNTERS}], round;"""
