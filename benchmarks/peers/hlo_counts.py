"""Counts operations, kernels and collectives of a program of XLA.

The program is the text of a compiled module (`as_text()`), which has one
computation per block, and one instruction per line.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

_INSTRUCTION = re.compile(
    r"^\s+(?:ROOT )?%?[\w.\-]+ = (\(.*?\)|\S+) ([\w\-]+)\((.*)$"
)
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_ARRAY = re.compile(r"\b(pred|bf16|[fsuc]\d+)\[([\d,]*)\]")
_GROUPS = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_GROUPS_IN_SHORT = re.compile(r"replica_groups=\[\d+,(\d+)\]")

# Instructions that compute nothing.
_NOT_COUNTED = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all "
    "partition-id replica-id".split()
)
_WITH_COMPUTATIONS = ("fusion", "call", "while", "conditional")


@dataclasses.dataclass
class Counts:
    """What one device computes and sends.

    Attributes:
      ops: Operations, including the operations in fused kernels.
      kernels: Kernels that are launched.
      collectives: Number of collectives.
      sent_bytes: Bytes that one device sends, with ring algorithms.
    """

    ops: int = 0
    kernels: int = 0
    collectives: int = 0
    sent_bytes: float = 0

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            *(
                a + b
                for a, b in zip(
                    dataclasses.astuple(self), dataclasses.astuple(other)
                )
            )
        )


def sent_bytes(kind: str, size: float, devices: int) -> float:
    """Returns the bytes that one of `devices` devices sends.

    Args:
      kind: `"all-reduce"`, `"all-gather"`, `"reduce-scatter"`, `"all-to-all"`
        or `"collective-permute"`.
      size: Bytes of the result on one device.
      devices: Number of devices that exchange data.
    """
    if kind == "collective-permute":
        return size
    if kind == "reduce-scatter":
        return size * (devices - 1)
    factor = 2 if kind == "all-reduce" else 1
    return factor * size * (devices - 1) / devices


_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)


class Module:
    """A compiled module.

    Args:
      text: Text of the module.
      devices: Number of devices, for collectives of all devices.
    """

    def __init__(self, text: str, devices: int):
        self._devices = devices
        self._computations: dict[str, list[tuple[str, str, str]]] = {}
        self._entry = ""
        name = ""
        for line in text.splitlines():
            header = _COMPUTATION.match(line)
            if header:
                name = header.group(2)
                self._computations[name] = []
                if header.group(1):
                    self._entry = name
                continue
            instruction = _INSTRUCTION.match(line)
            if instruction:
                self._computations[name].append(instruction.groups())

    def counts(self, of_loop: bool = False) -> Counts:
        """Returns the counts of the module; of a loop, one iteration.

        Args:
          of_loop: Whether to count one iteration of the loop with the most
            kernels instead of the module.
        """
        if not of_loop:
            return self._counts(self._entry)
        return max(
            (self._counts_of(*loop) for loop in self._loops(self._entry)),
            key=lambda counts: counts.kernels,
            default=Counts(),
        )

    def _loops(self, name: str) -> Iterator[tuple[str, str, str]]:
        for instruction in self._computations[name]:
            if instruction[1] == "while":
                yield instruction
            elif instruction[1] == "call":
                for called in _CALLED.findall(instruction[2]):
                    yield from self._loops(called)

    def _counts(self, name: str) -> Counts:
        return sum(
            (self._counts_of(*line) for line in self._computations[name]),
            Counts(),
        )

    def _counts_of(self, result: str, kind: str, rest: str) -> Counts:
        if kind in _NOT_COUNTED:
            return Counts()
        kind = kind.removesuffix("-start")
        if kind.endswith("-done"):
            return Counts()
        if kind in _COLLECTIVES:
            return Counts(
                1, 1, 1, sent_bytes(kind, _size(result), self._group(rest))
            )
        if kind not in _WITH_COMPUTATIONS:
            return Counts(1, 1)
        called = _CALLED.findall(rest)
        for names in _BRANCHES.findall(rest):
            called += [part.strip(" %") for part in names.split(",")]
        counts = sum(map(self._counts, called), Counts())
        return (
            dataclasses.replace(counts, kernels=1)
            if (kind == "fusion")
            else counts
        )

    def _group(self, rest: str) -> int:
        listed = _GROUPS.search(rest)
        if listed:
            return len(listed.group(1).split(","))
        short = _GROUPS_IN_SHORT.search(rest)
        return int(short.group(1)) if short else self._devices


def _size(result: str) -> int:
    """Returns the bytes of the arrays in the type of a result."""
    return sum(
        math.prod(map(int, filter(None, dims.split(","))))
        * (1 if kind == "pred" else 2 if kind == "bf16" else int(kind[1:]) // 8)
        for kind, dims in _ARRAY.findall(result)
    )
