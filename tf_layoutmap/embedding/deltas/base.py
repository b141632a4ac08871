"""The tables of an embedding in the checkpoint that deltas follow."""

# DOC-MERGE: Which rows of a variable differ from what files hold.
from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_layoutmap.embedding import checkpointing
from tf_layoutmap.embedding.deltas.chain import Delta
from tf_layoutmap.embedding.host.changes import LANES, WHOLE
from tf_layoutmap.vocabulary import state
from tf_layoutmap.vocabulary.state import shards_of

Array = np.ndarray[Any, Any]
ATTRIBUTE = "_variables"
ROWS = "rows"
# The counts of keys without a row are written by so many cells, of which a
# step changes few.
SKETCH_CELLS = 16
SKETCH_ROWS = "vocabulary_sketch_rows"


def reader_of(base: str) -> Any:
    """Returns what reads a checkpoint.

    Raises:
      ValueError: If there is none.
    """
    try:
        return tf.train.load_checkpoint(base)
    except (tf.errors.OpError, ValueError) as error:
        raise ValueError(
            "Argument `base` must be the prefix of a checkpoint of "
            f"TensorFlow. Received: base={base!r} ({error})."
        ) from None


def find_prefix(base: str, embedding: Any, root: Any = None) -> str:
    """Returns what the names of an embedding's tensors begin with.

    Args:
      base: Prefix of the checkpoint.
      embedding: The `tlm.TPUEmbedding`.
      root: The object that was saved. None: the tables are looked for by their
        names and shapes alone.

    Raises:
      ValueError: If it does not hold these tables, or several times, and
        without a `root` that says which they are.
    """
    variables: Mapping[str, Mapping[str, Any]] = embedding._variables
    shapes = reader_of(base).get_variable_to_shape_map()
    wanted = {
        checkpointing.key_of(ATTRIBUTE, table, name): list(variable.shape)
        for table, by_name in variables.items()
        for name, variable in by_name.items()
    }
    first = next(iter(wanted))
    prefixes = [
        key.removesuffix(first)
        for key in shapes
        if key.endswith(first) and key.removesuffix(first)[-1:] in ("", "/")
    ]
    fitting = [
        prefix
        for prefix in prefixes
        if all(
            shapes.get(prefix + key) == shape for key, shape in wanted.items()
        )
    ]
    below = (
        fitting
        if root is None
        else [
            prefix
            for prefix in fitting
            if _object_at(root, prefix) is embedding
        ]
    )
    if len(below) == 1:
        return below[0]
    problem = (
        "several times; argument `root`, the object that was saved, says which "
        "they are"
        if below
        else "below another object than `root`"
        if fitting
        else "not as they are now"
        if prefixes
        else "not"
    )
    raise ValueError(
        "Argument `base` must be a checkpoint that holds the embedding, once. "
        f"Received: base={base!r}, where tables {sorted(variables)} are "
        f"{problem}."
    )


def _object_at(root: Any, prefix: str) -> Any:
    """Returns the object whose tensors a checkpoint of `root` names so."""
    found = root
    for name in prefix.removesuffix("/").split("/") if prefix else ():
        # As TensorFlow has written the name of an attribute.
        local_name = re.sub(
            r"\.[.S]", lambda one: "." if one[0] == ".." else "/", name
        )
        found = tf.train.TrackableView(found).children(found).get(local_name)
        if found is None:
            return None
    return found


def read(
    base: Any,
    key: str,
    deltas: Sequence[Delta],
    table: str,
    name: str,
) -> Array:
    """Returns a variable as it is after deltas.

    Args:
      base: What `reader_of` returned.
      key: Name of its tensor there.
      deltas: Those that follow, in their order.
      table: What its table is called in them.
      name: Its own name.

    Raises:
      ValueError: If it cannot be read.
    """
    value = np.array(read_tensor(base, key))
    for delta in deltas:
        value = _written(
            value, tf.train.load_checkpoint(delta.tensors), table, name
        )
    return value


def read_tensor(base: Any, key: str) -> Any:
    """Returns a tensor of the base.

    Raises:
      ValueError: If its bytes are not those that were written.
    """
    try:
        return base.get_tensor(key)
    except (tf.errors.OpError, IndexError, RuntimeError) as error:
        raise ValueError(
            f"Tensor {key!r} cannot be read from the base, which was cut or "
            f"altered: {error}."
        ) from None


def _written(value: Array, delta: Any, table: str, name: str) -> Array:
    """A variable after what one delta writes to it."""
    changed = delta.get_tensor(f"{table}/{name}")
    if name in LANES:
        rows = delta.get_tensor(f"{table}/{ROWS}")
        # But of the row that unknown keys share.
        is_lane = rows < value.size
        value.reshape(-1)[rows[is_lane]] = changed[is_lane]
    elif name == state.SKETCH:
        value.reshape(-1, SKETCH_CELLS)[
            delta.get_tensor(f"{table}/{SKETCH_ROWS}")
        ] = changed
    elif value.ndim == 2:
        value[delta.get_tensor(f"{table}/{ROWS}")] = changed
    else:
        value = np.array(changed)
    return value


def has_rows(name: str) -> bool:
    """Whether a variable of a table has a value for each of its rows."""
    return name not in WHOLE


def differing_rows(stored: Array, variable: Any) -> Array:
    """Returns the rows whose bits differ, int64.

    Args:
      stored: What files hold: `[num_rows, dim]`, or by bucket.
      variable: What is now, of that shape.
    """
    found, first = [], 0
    for shard in shards_of(variable):
        now = shard.numpy()
        rows = _bits(now) != _bits(stored[first : first + len(now)])
        # Of a vocabulary each lane of a bucket is a row.
        is_lane = now.dtype in (np.int64, np.int32)
        different = rows.ravel() if is_lane else rows.any(1)
        found.append(
            np.flatnonzero(different) + first * (now.shape[1] if is_lane else 1)
        )
        first += len(now)
    return np.concatenate(found)


def _bits(values: Array) -> Array:
    return np.ascontiguousarray(values).view(f"u{values.dtype.itemsize}")
