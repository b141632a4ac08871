"""Compares the messages of processes. The module does not use TensorFlow.

A batch is described as `[[path, dtype, shape], ...]`; None has the dtype
`"None"`. Lists of messages are sorted by process index.
"""

from collections.abc import Mapping, Sequence
from typing import Any

ACTIVITIES = {
    "train": "training",
    "test": "evaluating",
    "predict": "predicting",
}


def batch_size(batch: Sequence[Sequence[Any]]) -> int | None:
    """Returns the number of samples of a batch; None if tensors differ.

    >>> batch_size([["0", "float32", [8, 3]], ["1", "int64", [8]]])
    8
    """
    sizes = {tuple(shape[:1]) for _, _, shape in batch if shape is not None}
    if len(sizes) != 1 or sizes == {()}:
        return None
    return sizes.pop()[0]


def step_difference(messages: Sequence[Mapping[str, Any]]) -> str | None:
    """Returns a description of the first difference between steps, or None.

    The number of samples is not compared.

    >>> step_difference([{"kind": "train", "step": 1}] * 2)
    >>> step_difference([{"kind": "train", "step": 1},
    ...                  {"kind": "test", "step": 1}])
    'process 0 is before step 1 of training, process 1 before step 1 of \
evaluating'
    """
    first = messages[0]
    for number, other in enumerate(messages):
        if any(other.get(name) != first.get(name) for name in ("kind", "step")):
            return (
                f"process 0 is before step {first['step']} of "
                f"{ACTIVITIES[first['kind']]}, process {number} before step "
                f"{other['step']} of {ACTIVITIES[other['kind']]}"
            )
        if other.get("is_full") != first.get("is_full"):
            return (
                f"process 0 compares {_scope(first)} in this step, process "
                f"{number} {_scope(other)}: set_process_checks was called with "
                "different arguments, or the model is new in one of them"
            )
        if other.get("times_set") != first.get("times_set"):
            return (
                f"weights or settings of the model were assigned, loaded "
                f"or restored {first['times_set']} times in process 0 and "
                f"{other['times_set']} times in process {number}: make the "
                "same changes in all processes"
            )
        difference = list_difference(
            "batch",
            _without_samples(first.get("batch", ())),
            _without_samples(other.get("batch", ())),
            number,
        )
        if difference is not None:
            return difference
    return None


def _scope(message: Mapping[str, Any]) -> str:
    return "everything" if message.get("is_full") else "only sizes"


def _without_samples(batch: Sequence[Sequence[Any]]) -> list[list[Any]]:
    return [
        [path, dtype, shape if not shape else ["samples", *shape[1:]]]
        for path, dtype, shape in batch
    ]


def list_difference(
    kind: str, first: Sequence[Any], other: Sequence[Any], number: int
) -> str | None:
    """Returns a description of the first entry that differs in two processes.

    >>> list_difference("weight", [["kernel", [2]]], [["kernel", [3]]], 1)
    'weight kernel is [2] in process 0 and [3] in process 1'
    >>> list_difference("weight", [["a"]], [], 1)
    'weight a is in process 0 and not in process 1'
    """
    for mine, theirs in zip(first, other):
        if mine[0] != theirs[0]:
            return (
                f"{kind} {mine[0]} of process 0 is {theirs[0]} in process "
                f"{number}"
            )
        if mine != theirs:
            return (
                f"{kind} {mine[0]} is {_entry_text(mine)} in process 0 and "
                f"{_entry_text(theirs)} in process {number}"
            )
    if len(first) == len(other):
        return None
    shorter, longer, holder = (
        (other, first, 0) if len(first) > len(other) else (first, other, number)
    )
    return (
        f"{kind} {longer[len(shorter)][0]} is in process {holder} and not "
        f"in process {number if holder == 0 else 0}"
    )


def _entry_text(entry: Sequence[Any]) -> str:
    return " ".join(str(part) for part in entry[1:])


def parts_difference(
    kind: str, checksums: Sequence[Sequence[Any]]
) -> str | None:
    """Returns a description of the first shard with different values.

    >>> parts_difference("weight", [[["kernel", {"0:2": 5}]],
    ...                             [["kernel", {"0:2": 6, "2:4": 7}]]])
    'weight kernel has different values in process 1 and in process 0, in the \
shard 0:2 that both hold'

    Args:
      kind: Kind of the compared values, for the message.
      checksums: For each process, `[[path, {bounds of shard: checksum}], ...]`.
        All processes have the same paths.
    """
    for entries in zip(*checksums):
        owner: dict[str, tuple[int, int]] = {}
        for number, (path, parts) in enumerate(entries):
            for part, checksum in parts.items():
                before, known = owner.setdefault(part, (number, checksum))
                if checksum != known:
                    where = (
                        f", in the shard {part} that both hold" if part else ""
                    )
                    return (
                        f"{kind} {path} has different values in process "
                        f"{number} and in process {before}{where}"
                    )
    return None
