"""Reads and writes tables and slot variables in Keras' weight files.

A table is stored as one array, independent of its number of shards. For an HDF5
file, one shard at a time is copied. Other stores require the full array in
memory. `save_table` and `load_table` handle one table. `save_tables` and
`load_tables` handle all variables of a `TPUEmbedding`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import keras_private, user_warnings
from tf_layoutmap.embedding.configs import open_tables as open_specs
from tf_layoutmap.embedding.table_access import LayerAccess
from tf_layoutmap.embedding.table_variable import shards_of
from tf_layoutmap.embedding.tpu_embedding import EmbeddingBase
from tf_layoutmap.sharded import ShardedVariable
from tf_layoutmap.sharded.routing.checks import known_size, known_sizes
from tf_layoutmap.vocabulary import (
    bucket_layout,
    kept_strings,
    parts,
    shared,
)

if TYPE_CHECKING:
    from tf_layoutmap._core.types import Weights
    from tf_layoutmap.layout.keras3.variable import MeshVariable
    from tf_layoutmap.vocabulary.conversion import MovedRows

# Part of the keys of arrays that contain the strings of vocabularies.
_STRINGS = ".vocabulary_strings."

dtensor = tf.experimental.dtensor

# Key of the variable that describes which tables share vocabularies.
_OWNERS = "vocabulary_owners"


def is_table(value: Any) -> bool:
    """Returns whether `value` is a table of this package.

    Tables are saved and loaded shard by shard.
    """
    from tf_layoutmap.layout.keras3.variable import MeshVariable

    return isinstance(value, ShardedVariable | MeshVariable)


def save_table(
    store: Any, key: str, table: ShardedVariable | MeshVariable
) -> None:
    """Writes `table` under `key` of a `save_own_variables` store."""
    dtype = tf.as_dtype(table.dtype).as_numpy_dtype
    dataset = None
    if np.dtype(dtype).kind != "f" and hasattr(store, "create_dataset"):
        # bfloat16 is saved as float32, because HDF5 has no bfloat16, and
        # float32 can represent all bfloat16 values.
        dtype = np.float32
    if np.dtype(dtype).kind == "f":  # Keras converts all other dtypes.
        dataset = keras_private.h5_dataset(
            store, key, tuple(known_sizes(table)), dtype
        )
    if dataset is None:
        store[key] = table.numpy()
        return
    for index, shard in _shards(table):
        dataset[index] = shard().astype(dtype, copy=False)


def _shards(
    table: ShardedVariable | MeshVariable,
) -> Iterator[tuple[tuple[slice, ...], Callable[[], np.ndarray]]]:
    """Yields each shard's position, and a function that returns its values."""
    if isinstance(table, ShardedVariable):
        for start, shard in zip(table.partition.offsets, table.variables):
            yield (slice(start, start + known_size(shard)),), shard.numpy
        return
    from tf_layoutmap.layout.mesh import transfer

    value = transfer.read_divided(table.divided_value)
    layout = table.layout
    if layout.mesh.num_local_devices() < layout.mesh.size:
        # Other processes hold the remaining shards.
        yield (slice(None),), table.numpy
        return
    indices = transfer.slices_of_devices(table.shape, layout)
    # Several devices can hold the same shard. The dict contains each shard
    # once.
    shards = {
        tuple((s.start, s.stop) for s in index): (index, shard)
        for index, shard in zip(indices, dtensor.unpack(value))
    }
    for index, shard in shards.values():
        # Rows after the last row of the table are padding.
        size = index[0].stop - index[0].start
        yield index, lambda shard=shard, size=size: shard.numpy()[:size]


def load_table(
    store: Any, key: str, table: ShardedVariable | MeshVariable
) -> None:
    """Reads a table from an array that `save_table` or Keras wrote.

    Raises:
      ValueError: If the array and the variable have different shapes. In this
        case, no variable is changed.
    """
    value = _read_checked(store, key, table)
    if isinstance(table, ShardedVariable):
        for start, shard in zip(table.partition.offsets, table.variables):
            shard.assign(
                tf.cast(value[start : start + known_size(shard)], shard.dtype)
            )
        return
    from tf_layoutmap.layout.mesh import transfer

    shards = transfer.unique_shards(table.shape, table.layout)
    variable = table.divided_value
    variable.assign(
        tf.cast(
            transfer.packed(
                shards,
                (np.array(value[shard.slices], order="C") for shard in shards),
                table.layout,
            ),
            variable.dtype,
        )
    )


def check_table(store: Any, key: str, variable: Any) -> None:
    """Checks a saved array, before a variable is changed.

    Args:
      store: Store of `load_own_variables`.
      key: Key of the array.
      variable: A table, or any other variable.

    Raises:
      ValueError: If the array and the variable have different shapes.
    """
    _read_checked(store, key, variable)


def _read_checked(store: Any, key: str, variable: Any) -> Any:
    value = keras_private.h5_dataset(store, key)
    if value is None or "dtype" in value.attrs:
        value = store[key]
    if tuple(value.shape) != tuple(variable.shape):
        kind = "Table" if is_table(variable) else "Variable"
        raise ValueError(
            f"{kind} {variable.name!r} must be loaded from an array of shape "
            f"{tuple(variable.shape)}. Received: shape {tuple(value.shape)}."
        )
    return value


def save_tables(embedding: EmbeddingBase, store: Weights):
    """Writes each variable as one array, independent of its shards.

    Rows of 16 bits are written as uint16, because HDF5 has no bfloat16. The key
    of such a variable ends with its dtype. The strings of a vocabulary are
    written as numeric arrays, because Keras files cannot contain strings with
    zero bytes.
    """
    for key, variable in variables_by_key(embedding).items():
        values = variable.numpy()
        store[key] = values.view(np.uint16) if _is_half(variable) else values
    for number, strings in enumerate(LayerAccess(embedding).strings()):
        if strings is not None:
            texts = strings.all_strings().numpy()
            for name, values in kept_strings.to_columns(texts).items():
                store[f"{number}{_STRINGS}{name}"] = values


def load_tables(embedding: EmbeddingBase, store: Weights, *, layer: str):
    """Reads what `save_tables` wrote; the number of shards may differ.

    If an open vocabulary was saved with another capacity, its keys get new
    rows, as by `tlm.vocabulary.convert`. If a vocabulary is too small for all
    saved keys, the function warns about the number of keys that are dropped.

    Args:
      embedding: A built embedding.
      store: The saved arrays.
      layer: Name of the layer, for messages.

    Raises:
      ValueError: If the saved tables differ in number, dtype, optimizer or
        shape, except in the capacity of an open vocabulary, or if saved strings
        are not valid. In this case, no variable is changed.
    """
    variables = variables_by_key(embedding)
    saved_keys = {key for key in store.keys() if _STRINGS not in key}
    if saved_keys != set(variables):
        raise ValueError(
            f"The saved weights of layer {layer!r} must hold "
            f"{sorted(variables)}. Received: {sorted(saved_keys)}."
        )
    if _OWNERS in variables:
        owners, saved = (
            shared.decode_owners(value)
            for value in (variables[_OWNERS].numpy(), store[_OWNERS][...])
        )
        if owners != saved:
            raise ValueError(
                f"The tables of layer {layer!r} must share vocabularies as in "
                f"the file, {saved}. Received: {owners}."
            )
    moved = _moved_tables(embedding, store, variables)
    for key, variable in variables.items():
        table, _, name = key.partition(".")
        saved = tuple(store[key].shape)
        shape = moved[table].shape(name, saved) if table in moved else saved
        if shape != tuple(variable.shape):
            raise ValueError(
                f"Weight {key!r} of layer {layer!r} must be of shape "
                f"{tuple(variable.shape)}. Received: {saved}."
            )
    strings = _read_strings(embedding, store, layer)
    for key, variable in variables.items():
        table, _, name = key.partition(".")
        values = store[key][...]
        if table in moved:
            values = moved[table].value(name, values)
        variable.assign(
            values.view(variable.dtype.as_numpy_dtype)
            if _is_half(variable)
            else values
        )
    for kept, texts in strings:
        kept.load(tf.constant(list(texts), tf.string))
    LayerAccess(embedding).load_variables()
    for moved_table in moved.values():
        moved_table.warn_if_dropped(layer)


def save_shards(embedding: EmbeddingBase, store: Weights):
    """Writes the rows of this process, if tables are sharded over processes.

    Files must not contain these arrays, because their rows depend on the number
    of processes.
    """
    for key, variable in variables_by_key(embedding).items():
        (part,) = shards_of(variable)
        store[key] = part.numpy()


def load_shards(embedding: EmbeddingBase, store: Weights):
    """Reads what `save_shards` wrote in this process."""
    for key, variable in variables_by_key(embedding).items():
        (part,) = shards_of(variable)
        part.assign(store[key])
    LayerAccess(embedding).load_variables()


@dataclasses.dataclass(frozen=True, eq=False)
class _MovedTable:
    """A table that was saved with another capacity.

    Attributes:
      name: Name of the table.
      capacity: Capacity of the layer's vocabulary.
      num_rows: Number of saved rows.
      rows: The new rows of the saved keys.
    """

    name: str
    capacity: int
    num_rows: int
    rows: MovedRows

    def shape(self, name: str, saved: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of a variable with the new capacity."""
        if name in self.rows.vocabulary:
            return self.rows.vocabulary[name].shape
        if saved[:1] == (self.num_rows,):
            return (self.rows.num_rows, *saved[1:])
        return saved

    def value(self, name: str, saved: np.ndarray[Any, Any]) -> Any:
        """Returns the value of a variable with the new capacity."""
        if name in self.rows.vocabulary:
            return self.rows.vocabulary[name]
        return (
            self.rows.of(saved)
            if saved.shape[:1] == (self.num_rows,)
            else saved
        )

    def warn_if_dropped(self, layer: str) -> None:
        """Warns if the layer has no row for some of the saved keys."""
        counts = self.rows.conversion
        if counts.num_dropped:
            user_warnings.warn(
                f"Layer {layer!r} has no rows for {counts.num_dropped} of the "
                f"{counts.num_dropped + counts.num_kept} keys in the file, "
                f"because the capacity of its vocabulary is {self.capacity} "
                f"(table {self.name!r}). The keys with the highest scores "
                "according to `evict` were loaded, and the others were dropped."
            )


def _moved_tables(
    embedding: EmbeddingBase, store: Weights, variables: dict[str, Any]
) -> dict[str, _MovedTable]:
    """Returns the tables whose capacity differs from the saved capacity.

    The keys of the result are the table numbers, as in the keys of `store`.
    """
    moved_tables: dict[str, _MovedTable] = {}
    spec = LayerAccess(embedding).spec
    moved: dict[int, MovedRows] = {}
    for number, table in enumerate(spec.tables):
        if table.vocabulary is None:
            continue
        owner = open_specs.owner_of(spec, number)
        keys = f"{owner}.{parts.KEYS}"
        saved_buckets = int(store[keys].shape[0])
        if saved_buckets == int(variables[keys].shape[0]):
            continue
        settings = embedding.vocabularies[spec.tables[owner].name].settings
        if owner not in moved:
            from tf_layoutmap.vocabulary import conversion

            moved[owner] = conversion.move_vocabulary(
                lambda name, owner=owner: store[f"{owner}.{name}"][...],
                settings,
                has_sketch=settings.has_sketch,
            )
        moved_tables[str(number)] = _MovedTable(
            table.name,
            settings.capacity,
            bucket_layout.KEYS_PER_BUCKET * saved_buckets + 1,
            moved[owner],
        )
    return moved_tables


def _read_strings(
    embedding: EmbeddingBase, store: Weights, layer: str
) -> list[tuple[kept_strings.KeptStrings, Sequence[bytes]]]:
    """Returns the saved strings of each vocabulary that keeps strings.

    If the file contains no strings, the strings of its keys are not known.

    Raises:
      ValueError: If the saved strings are not valid.
    """
    strings = []
    for number, kept in enumerate(LayerAccess(embedding).strings()):
        if kept is None:
            continue
        start = f"{number}{_STRINGS}"
        columns = {
            key.removeprefix(start): np.asarray(store[key][...])
            for key in store.keys()
            if key.startswith(start)
        }
        try:
            texts = kept_strings.from_columns(columns) if columns else ()
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"The saved strings of layer {layer!r} must be three arrays "
                f"that belong together. Received: {sorted(columns)} ({error})."
            ) from None
        strings.append((kept, texts))
    return strings


def variables_by_key(embedding: EmbeddingBase) -> dict[str, Any]:
    """Returns all variables, keyed by table number and variable name."""
    variables = {}
    for number, by_name in enumerate(LayerAccess(embedding).variables()):
        for name, variable in by_name.items():
            dtype = f".{variable.dtype.name}" * _is_half(variable)
            variables[f"{number}.{name}{dtype}"] = variable
    owners = getattr(embedding, shared.OWNERS, None)
    if owners is not None:
        variables[_OWNERS] = owners
    updates = getattr(embedding, "schedule_updates", None)
    if updates is not None:
        variables["schedule_updates"] = updates
    return variables


def _is_half(variable: Any) -> bool:
    return variable.dtype.size == 2


def set_weights_error(layer: str) -> str:
    """Returns the error message of `set_weights`."""
    return (
        "`set_weights` must receive an array that `get_weights` returned in "
        f"this process for layer {layer!r}, whose tables are not Keras "
        "weights: this array holds a copy of the tables. Received: an array "
        "without a copy. Use `save_weights` and `load_weights`, or "
        "ModelCheckpoint."
    )
