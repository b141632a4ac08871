"""`import_rows`, which writes the rows of other tables to a vocabulary."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from tf_layoutmap._core import checks, literals
from tf_layoutmap.vocabulary import (
    foreign_rows,
    key_rows,
    key_tensors,
    row_files,
    state,
    stored_keys,
)

if TYPE_CHECKING:
    from tf_layoutmap._core.types import TensorLike

Array = np.ndarray[Any, Any]

FORMATS = ("tf_layoutmap", *foreign_rows.READERS)


def import_rows(
    source: str
    | os.PathLike[str]
    | state.Vocabulary
    | Iterable[key_rows.KeyBlock]
    | TensorLike,
    vocabulary: state.Vocabulary,
    *,
    format: literals.RowSource = "tf_layoutmap",
    name: str | None = None,
    keys: TensorLike | None = None,
    slots: bool | Mapping[str, TensorLike] | Mapping[str, str] | None = None,
) -> key_rows.WrittenKeys:
    """Writes the rows of another table to an open vocabulary, by key.

    The tables can have different capacities, numbers of shards and dtypes, and
    can be on a host or on parameter servers. Keys get rows without admission,
    see `Vocabulary.write`. Keys that are only in `vocabulary` are not changed.

    >>> import tempfile
    >>> import numpy as np
    >>> import tensorflow as tf
    >>> import tf_layoutmap as tlm
    >>> words = tlm.layers.ShardedEmbedding(
    ...     tlm.vocabulary.OpenVocabulary(100), 8,
    ...     optimizer=tf.tpu.experimental.embedding.Adagrad(0.1))
    >>> _ = words(np.array([[0]]))
    >>> larger = tlm.layers.ShardedEmbedding(
    ...     tlm.vocabulary.OpenVocabulary(1000), 8,
    ...     optimizer=tf.tpu.experimental.embedding.Adagrad(0.1))
    >>> _ = larger(np.array([[0]]))
    >>> _ = words.vocabulary.write([5, 7, 9])
    >>> path = tempfile.mkdtemp() + "/words"
    >>> words.vocabulary.export(path)
    3
    >>> tlm.vocabulary.import_rows(path, larger.vocabulary).num_new
    3

    Counts are copied. The number of steps since the last use of a key does not
    change: last steps are shifted by the difference between the steps of the
    two vocabularies, and are at least 0. A vocabulary that has no keys gets the
    step of the source. If the source has no counts and last steps, new keys
    have the count 1 and the current step.

    The memory must hold one block, and for a checkpoint of TFRA the tensors of
    one shard.

    Args:
      source: One of the following:

        - A folder that `Vocabulary.export` has written.
        - Another vocabulary, for example of another model.
        - Rows, `[num_rows, dim]`: an array, a tensor, or a variable such as a
          table without an open vocabulary. The keys are the argument `keys`.
        - A path of another format, see `format`.
        - An iterable of `tlm.vocabulary.KeyBlock`s with distinct keys.
      vocabulary: Vocabulary to which the rows are written.
      format: Format of the path `source`:

        - `"tf_layoutmap"`: a folder that `Vocabulary.export` has written.
        - `"tfra"`: rows of TensorFlow Recommenders Addons 0.8. `source` is the
          folder of `save_to_file_system` or `FileSystemSaver`, or the prefix of
          a checkpoint with the tensors `{name}_mht_1of1-keys` and `-values`.
        - `"hugectr"`: folder of a sparse model of HugeCTR 25.03, with the files
          `key` and `emb_vector`.
        - `"dynamicemb"`: folder that `DynamicEmbDump` of NVIDIA's dynamic
          embeddings for TorchRec has written.
        - `"text"`: a text file with a string and the numbers of its row in each
          line, as GloVe, word2vec, fastText (`.vec`) and gensim write. If a key
          occurs several times, its last row is imported.
        - `"word2vec"`: a binary file of word2vec.

        Rows of other systems must be float32. Slot variables are imported from
        TFRA only.
      name: Name of the table, for the formats `"tfra"` and `"dynamicemb"`.
      keys: Integers or strings, `[num_rows]`, if `source` contains rows. None:
        the integers 0 to `num_rows - 1`.
      slots: None: slot variables are written if the source has them. False:
        known keys keep the values of their slot variables, and new keys get the
        initial values. A dict, if `source` contains rows: maps names of slot
        variables to their values, see `Vocabulary.write`. A dict, for
        `format="tfra"`: maps names of slot variables to the names of the tables
        in which TFRA has saved them.

    Returns:
      A `WrittenKeys` with the attributes `num_written`, `num_new` and
      `without_row`, which contains the keys that got no row.

    Raises:
      ImportError: If the folder contains Parquet files and pyarrow is not
        installed.
      TypeError: If an argument has an unsupported type.
      ValueError: If an argument is missing or does not fit to `source`, the
        number of columns or the slot variables of the tables differ, or the
        files are not complete. Blocks before the error are written.
      tf.errors.InvalidArgumentError: If the keys of one table are strings, and
        the keys of the other table are integers.
      RuntimeError: If the function is called inside a `tf.function`.
    """
    if not isinstance(vocabulary, state.Vocabulary):
        raise TypeError(
            checks.message(
                "vocabulary",
                "a vocabulary, such as `layer.vocabulary` or a value of "
                "`embedding.vocabularies`",
                vocabulary,
            )
        )
    checks.check_one_of("format", format, FORMATS)
    blocks = _read_source(source, vocabulary, format, name, keys, slots)
    takes_step = vocabulary.stats()["num_keys"] == 0
    num_written, num_new = 0, 0
    without_row: list[Array] = []
    for block in blocks:
        written = vocabulary._write_block(block, takes_step=takes_step)
        num_written += written.num_written
        num_new += written.num_new
        if len(written.without_row):
            without_row.append(written.without_row)
    if format == "tfra" and isinstance(slots, Mapping):
        _import_slot_tables(source, vocabulary, slots)
    return key_rows.WrittenKeys(
        num_written,
        num_new,
        np.concatenate(without_row) if without_row else np.zeros([0], np.int64),
    )


def _read_source(
    source: Any,
    vocabulary: state.Vocabulary,
    format: str,
    name: str | None,
    keys: Any,
    slots: Any,
) -> Iterator[key_rows.KeyBlock]:
    """Returns the blocks of the source, and checks the arguments."""
    is_path = isinstance(source, str | os.PathLike)
    is_rows = hasattr(source, "shape")
    _check_only_for(is_path, "a path", format=(format, FORMATS[0]))
    _check_only_for(
        is_path and format != FORMATS[0],
        "a path of another system",
        name=(name, None),
    )
    _check_only_for(is_rows, "rows", keys=(keys, None))
    if isinstance(slots, Mapping):
        _check_only_for(
            is_rows or format == "tfra", "rows or of TFRA", slots=(slots, None)
        )
        vocabulary._check_slots(slots)
    elif slots is not None and slots is not False:
        raise TypeError(checks.message("slots", "None, False or a dict", slots))
    if is_rows:
        return _blocks_of_rows(source, keys, slots or {})
    if is_path and format != FORMATS[0]:
        return foreign_rows.READERS[format](
            os.fspath(source), name, vocabulary._rows.dim
        )
    if is_path:
        blocks = row_files.read_folder(os.fspath(source))
    elif isinstance(source, state.Vocabulary):
        blocks = source.blocks()
    elif isinstance(source, Iterable):
        blocks = _checked_blocks(source)
    else:
        raise TypeError(
            checks.message(
                "source",
                "a path, a vocabulary, rows or an iterable of "
                "tlm.vocabulary.KeyBlock",
                source,
            )
        )
    return _with_slots(blocks, vocabulary, has_slots=slots is None)


def _import_slot_tables(
    path: Any, vocabulary: state.Vocabulary, slots: Mapping[str, Any]
) -> None:
    """Writes slot variables that TFRA has saved as separate tables.

    Keys that have no row in the vocabulary are ignored.

    Args:
      path: Path of the tables.
      vocabulary: Vocabulary, to which the rows were already written.
      slots: Maps names of slot variables to names of tables.
    """
    for slot, table in slots.items():
        dim = vocabulary._rows.slots[slot]
        for block in foreign_rows.read_tfra(os.fspath(path), table, dim):
            has_row = vocabulary.contains(block.keys).numpy()
            vocabulary.write(
                block.keys[has_row], slots={slot: block.rows[has_row]}
            )


def _check_only_for(
    is_supported: bool, kind: str, **arguments: tuple[Any, Any]
) -> None:
    """Raises a ValueError if an argument would have no effect."""
    for argument, (value, default) in arguments.items():
        if not is_supported and value is not default and value != default:
            raise ValueError(
                checks.message(
                    argument, f"omitted unless `source` is {kind}", value
                )
            )


def _checked_blocks(source: Iterable[Any]) -> Iterator[key_rows.KeyBlock]:
    for block in source:
        if not isinstance(block, key_rows.KeyBlock):
            raise TypeError(
                checks.message(
                    "source",
                    "an iterable of tlm.vocabulary.KeyBlock",
                    type(block),
                )
            )
        yield block


def _blocks_of_rows(
    rows: Any, keys: Any, slots: Mapping[str, Any]
) -> Iterator[key_rows.KeyBlock]:
    num_rows = int(rows.shape[0])
    if isinstance(keys, stored_keys.StoredKeys):
        raise TypeError(
            checks.message(
                "keys",
                "integers or strings; `Vocabulary.write` accepts StoredKeys",
                type(keys),
            )
        )
    keys = np.arange(num_rows) if keys is None else key_tensors.as_array(keys)
    for name, value in (("keys", keys), *slots.items()):
        if value.shape[0] != num_rows:
            raise ValueError(
                checks.message(
                    name,
                    f"of length {num_rows}, as `source`",
                    int(value.shape[0]),
                )
            )
    for first in range(0, num_rows, key_rows.BLOCK_SIZE):
        here = slice(first, min(first + key_rows.BLOCK_SIZE, num_rows))
        yield key_rows.KeyBlock(
            keys[here],
            np.asarray(rows[here]),
            {name: np.asarray(value[here]) for name, value in slots.items()},
        )


def _with_slots(
    blocks: Iterator[key_rows.KeyBlock],
    vocabulary: state.Vocabulary,
    *,
    has_slots: bool,
) -> Iterator[key_rows.KeyBlock]:
    """Yields the blocks with the slot variables that are written.

    Raises:
      ValueError: If slot variables are not omitted, and the blocks have other
        slot variables than the vocabulary.
    """
    expected = set(vocabulary._rows.slots)
    for block in blocks:
        if has_slots and block.slots and set(block.slots) != expected:
            raise ValueError(
                "Argument `slots` must be False if the tables have different "
                "slot variables. Received: slot variables "
                f"{sorted(block.slots)} in the source, and {sorted(expected)} "
                f"in table {vocabulary.name!r}."
            )
        yield block if has_slots else dataclasses.replace(block, slots={})
