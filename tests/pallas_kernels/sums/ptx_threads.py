"""Runs the PTX of a sum in threads of several simulated devices, one instruction at a time.

Memory is read and written as the threads of all devices come to it, in a random order. A device's
next kernel begins when all threads of the kernel before have ended, as in a stream.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

SPAN = 1 << 28  # the addresses of a device
INPUT, OUTPUT, INBOX = 1 << 26, 2 << 26, 3 << 26  # places in them
_MASK = {"b32": 2**32 - 1, "u32": 2**32 - 1, "s32": 2**32 - 1, "b64": 2**64 - 1, "s64": 2**64 - 1}


class Kernel(NamedTuple):
    """PTX, its programs, the threads of each, and its arrays' offset from their places."""

    ptx: str
    programs: int
    threads: int
    offset: int


class Devices:
    """The memories of some devices: 32-bit words by address. Words that were not written are 0."""

    def __init__(self, count: int, seed: int) -> None:
        self.words, self.random = dict[int, int](), random.Random(seed)
        self.begins = [SPAN * (device + 1) for device in range(count)]

    def write(self, device: int, place: int, array: Any) -> None:
        """Writes an array's words at a place of a device."""
        for number, word in enumerate(np.ascontiguousarray(array).reshape(-1).view(np.uint32)):
            self.words[self.begins[device] + place + 4 * number] = int(word)

    def read(self, device: int, place: int, words: int) -> np.ndarray:
        """Reads words of a place of a device."""
        begin = self.begins[device] + place
        found = [self.words.get(begin + 4 * number, 0) for number in range(words)]
        return np.array(found, np.uint32)

    def run(self, kernels: Sequence[Kernel], most_steps: int) -> None:
        """Runs a sequence of kernels on every device.

        Raises TimeoutError if threads still wait after so many steps of all threads.
        """
        waiting = [list(kernels) for _ in self.begins]
        running: list[list[Any]] = [[] for _ in self.begins]
        for _ in range(most_steps):
            for device, threads in enumerate(running):
                if not threads and waiting[device]:
                    threads += self._threads(self.begins[device], waiting[device].pop(0))
            busy = [device for device, threads in enumerate(running) if threads]
            if not busy:
                return
            threads = running[self.random.choice(busy)]
            for _ in range(self.random.choice((1, 4, 32))):  # so that devices get ahead of others
                for thread in self.random.sample(threads, -(-len(threads) // 2)):
                    if next(thread, "end") == "end":
                        threads.remove(thread)
        raise TimeoutError("threads wait for words that nobody writes")

    def _threads(self, begin: int, kernel: Kernel) -> list[Iterator[str]]:
        found, lines = list[Iterator[str]](), _parse(kernel.ptx)
        arrays = {"$0": begin + INPUT + kernel.offset, "$1": begin + INBOX}
        arrays["$2"] = begin + OUTPUT + kernel.offset
        for program in range(kernel.programs):
            arrived: list[int] = []
            for thread in range(kernel.threads):
                registers = {"%tid.x": thread, "%ctaid.x": program} | arrays
                found.append(_thread(lines, registers, self.words, arrived, kernel.threads))
        return found


def _parse(ptx: str) -> list[tuple[str | None, str, list[str]]]:
    """Each instruction's predicate, name and operands; a label is an instruction `label`."""
    text = re.sub(r"\.reg [^;]*;", "", ptx.strip()[1:-1])
    text = re.sub(r"(\w+):", r"label \1;", text)
    found = []
    for line in filter(None, (line.strip() for line in text.split(";"))):
        predicate, rest = re.fullmatch(r"(?:@(\w+)\s+)?(.*)", line, re.DOTALL).groups()
        name, _, operands = rest.partition(" ")
        found.append((predicate, name, re.findall(r"\{[^}]*\}|\[[^]]*\]|[^,\s]+", operands)))
    return found


def _thread(
    lines: list[Any], registers: dict[str, Any], words: dict[int, int], arrived: list[int], of: int
) -> Iterator[str]:
    """Yields before each access to memory, and while it waits at a barrier."""
    labels = {o[0]: at for at, (_, name, o) in enumerate(lines) if name == "label"}
    at = 0
    while at < len(lines):
        predicate, name, operands = lines[at]
        at += 1
        if name == "label" or (predicate is not None and not registers[predicate]):
            continue
        kind, *parts = name.split(".")
        if kind == "bra":
            at = labels[operands[0]]
        elif kind == "trap":
            raise TimeoutError("a thread has polled too often")
        elif kind == "bar":
            arrived.append(1)
            while len(arrived) % of:
                yield "bar"
        elif kind in ("ld", "st"):
            yield kind
            target, address = operands if kind == "ld" else operands[::-1]
            _access(kind, parts[-1], _list(target), _place(address, registers), registers, words)
        else:
            values = [_value(operand, registers) for operand in operands[1:]]
            found = _compute(kind, parts, values)
            if len(targets := _list(operands[0])) == 2:
                found, registers[targets[1]] = found & _MASK["b32"], found >> 32
            registers[targets[0]] = found


def _value(operand: str, registers: dict[str, Any]) -> Any:
    """A number, or the value of a register, or 64 bits of two registers."""
    if operand.startswith("{"):
        low, high = (_value(each, registers) for each in _list(operand))
        return low | high << 32
    if re.fullmatch(r"-?\d\w*", operand):
        return int(operand, 0)
    return registers.get(operand, 0)  # words that a thread without data has not loaded


def _place(operand: str, registers: dict[str, Any]) -> int:
    base, _, offset = operand[1:-1].partition("+")
    return int(registers[base]) + int(offset or 0)


def _list(operand: str) -> list[str]:
    return re.findall(r"[\w$]+", operand)


def _access(
    kind: str, dtype: str, names: list[str], address: int, registers: Any, words: dict[int, int]
) -> None:
    """All words at once, as the hardware does with up to 16 bytes."""
    each = int(dtype[1:]) // 32
    assert address % (4 * each * len(names)) == 0, "misaligned"
    for number, name in enumerate(names):
        places = [address + 4 * (number * each + word) for word in range(each)]
        if kind == "ld":
            registers[name] = sum(words.get(p, 0) << 32 * word for word, p in enumerate(places))
        else:
            for word, p in enumerate(places):
                words[p] = registers.get(name, 0) >> 32 * word & 0xFFFFFFFF


def _compute(kind: str, parts: list[str], values: list[Any]) -> Any:
    if kind == "mov":
        return values[0]
    if kind == "add" and parts[-1] == "f32":
        first, second = (np.array(v, np.uint32).view(np.float32) for v in values)
        return int((first + second).view(np.uint32))
    if kind == "cvt":
        pair = np.array(values[::-1], np.uint32).view(np.float32).astype(jnp.bfloat16)
        return int(pair.view(np.uint32)[0])
    if kind == "setp":
        first, second = values
        return {"lt": first < second, "gt": first > second, "ne": first != second}[parts[0]]
    if kind in ("mad", "mul"):
        found = values[0] * values[1] + (values[2] if kind == "mad" else 0)
        return found & (2**64 - 1 if parts[0] == "wide" else 2**32 - 1)
    first, second = values
    found = {
        "add": lambda: first + second,
        "and": lambda: first & second,
        "or": lambda: first | second,
        "xor": lambda: first ^ second,
        "shl": lambda: first << second,
    }[kind]()
    return found & _MASK[parts[-1]]
