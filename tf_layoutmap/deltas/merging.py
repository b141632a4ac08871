"""`merge` and `prune`: replace several deltas by one delta."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np

from tf_layoutmap._core import checks, files
from tf_layoutmap.deltas import base as base_file
from tf_layoutmap.deltas import delta_files
from tf_layoutmap.deltas import weights as model_weights
from tf_layoutmap.deltas.served import chain, changes, storage
from tf_layoutmap.deltas.served.chain import Delta, Meta
from tf_layoutmap.vocabulary import parts

Array = np.ndarray[Any, Any]


def merge(
    paths: Sequence[str | os.PathLike[str]],
    target: str | os.PathLike[str],
) -> Delta:
    """Writes one delta that is equivalent to several consecutive deltas.

    The merged delta contains each changed row and weight once, with the values
    of the last delta that contains it. `tlm.deltas.apply`,
    `tlm.deltas.ServedModel` and `tlm.deltas.update_export` accept a merged
    delta in place of the deltas that it replaces, with bitwise identical
    results. A model to which some of these deltas were already applied also
    accepts the merged delta.

    >>> import tempfile
    >>> import tensorflow as tf
    >>> import tf_layoutmap as tlm
    >>> tpu = tf.tpu.experimental.embedding
    >>> words = tpu.TableConfig(1000, 4, initializer=tf.ones, name="words")
    >>> embedding = tlm.TPUEmbedding(
    ...     {"title": tpu.FeatureConfig(words)}, tpu.Adagrad(0.1))
    >>> embedding.build()
    >>> where = tempfile.mkdtemp()
    >>> base = tf.train.Checkpoint(embedding=embedding).save(where + "/base")
    >>> writer = tlm.deltas.DeltaWriter(embedding, where + "/deltas", base=base)
    >>> for ids in ([3, 5], [5, 7, 9]):
    ...     embedding.enqueue({"title": tf.constant(ids)})
    ...     _ = embedding.dequeue()
    ...     embedding.apply_gradients({"title": tf.ones([len(ids), 4])})
    ...     _ = writer.write()
    >>> merged = tlm.deltas.merge(
    ...     [delta.path for delta in writer.deltas], where + "/merged")
    >>> merged.meta.first, merged.meta.sequence
    (1, 2)
    >>> merged.meta.tables["words"]["num_rows"]
    4

    Args:
      paths: Paths of the deltas, in the order in which they were written. Each
        delta must follow the previous delta of the list. A delta can be merged.
      target: Path of the merged delta, which must not exist. The function
        writes the delta to a temporary directory next to `target`, and then
        renames the directory. On a file system that is not local, it writes the
        file `meta.json` of the delta last.

    Returns:
      The merged delta.

    Raises:
      TypeError: If `paths` is a single path.
      ValueError: If `paths` is empty. The function also raises this error if a
        delta is missing, is repeated, has another base, contains other tables,
        or is truncated or modified. The message names the delta.
      OSError: If the delta cannot be written, or `target` exists.
    """
    if isinstance(paths, str | bytes | os.PathLike):
        raise TypeError(
            checks.message("paths", "a list of paths of deltas", paths)
        )
    if not paths:
        raise ValueError(
            checks.message("paths", "a list with at least one delta", paths)
        )
    deltas = chain.read_chain(
        [os.fspath(path) for path in paths], "", "of the first delta", None
    )
    return _write_merged(deltas, storage.local_path(os.fspath(target)))


def prune(directory: str | os.PathLike[str], *, keep: int) -> list[Delta]:
    """Merges all deltas of a directory except the last deltas.

    The function writes the merged delta, removes the deltas that it replaces,
    and removes files of writers that were killed. If the process is killed, the
    directory still contains all changes, and the next call removes the deltas
    that are no longer required. A `tlm.deltas.DeltaWriter` of the directory can
    continue to write. No process should read the directory while deltas are
    removed: a reader then raises an error, and can try again.

    After the call, a served model that has applied the second to last delta
    reads only the last delta. A served model that lags behind by more than
    `keep` deltas reads the merged delta.

    >>> import tempfile
    >>> import tensorflow as tf
    >>> import tf_layoutmap as tlm
    >>> tpu = tf.tpu.experimental.embedding
    >>> words = tpu.TableConfig(1000, 4, initializer=tf.ones, name="words")
    >>> embedding = tlm.TPUEmbedding(
    ...     {"title": tpu.FeatureConfig(words)}, tpu.Adagrad(0.1))
    >>> embedding.build()
    >>> where = tempfile.mkdtemp()
    >>> base = tf.train.Checkpoint(embedding=embedding).save(where + "/base")
    >>> writer = tlm.deltas.DeltaWriter(embedding, where + "/deltas", base=base)
    >>> for _ in range(5):
    ...     _ = writer.write()
    >>> remaining = tlm.deltas.prune(where + "/deltas", keep=2)
    >>> [(delta.meta.first, delta.meta.sequence) for delta in remaining]
    [(1, 3), (4, 4), (5, 5)]

    Args:
      directory: Directory of the deltas of one base.
      keep: Number of deltas that are not merged, at least 0.

    Returns:
      The deltas that the directory contains after the call, in order.

    Raises:
      TypeError: If `keep` is not an integer.
      ValueError: If `keep` is negative. The function also raises this error if
        a delta is missing, is repeated, has another base, or is truncated or
        modified. In this case, no file is changed.
      OSError: If the merged delta cannot be written.
    """
    directory = storage.local_path(os.fspath(directory))
    checks.check_int("keep", keep, lowest=0)
    deltas = chain.read_chain(
        chain.pending_paths(directory, 0), "", "of the first delta"
    )
    last = chain.last_sequence(deltas)
    merged = [delta for delta in deltas if delta.meta.sequence <= last - keep]
    if len(merged) > 1:
        name = chain.directory_name(
            merged[-1].meta.sequence, merged[0].meta.first
        )
        deltas[: len(merged)] = [
            _write_merged(merged, os.path.join(directory, name))
        ]
    _remove_others(directory, deltas)
    delta_files.remove_leftovers(directory)
    return deltas


def _remove_others(directory: str, deltas: Sequence[Delta]) -> None:
    """Removes all deltas of a directory that are not in `deltas`."""
    kept = {os.path.basename(delta.path) for delta in deltas}
    for name in storage.names_in(directory):
        if chain.numbers_of(name) is None or name in kept:
            continue
        path = os.path.join(directory, name)
        if not storage.is_local(path):
            # Readers ignore a delta without this file.
            storage.remove_tree(path, chain.META_FILE)
            continue
        # The directory is renamed first, so that no reader finds a delta
        # without some of its files.
        with files.staged(delta_files.staging_path(path)) as folder:
            os.rename(path, os.path.join(folder, "old-delta"))
            shutil.rmtree(os.path.join(folder, "old-delta"))
    files.sync(directory)


def _write_merged(deltas: Sequence[Delta], target: str) -> Delta:
    """Writes the merged delta of consecutive deltas that were checked."""
    first, last = deltas[0].meta, deltas[-1].meta
    _check_same_tables(deltas)
    tensors: dict[str, Array] = {}
    tables: dict[str, chain.TableOfDelta] = {}
    for table, of_last in last.tables.items():
        merged = _merged_table(deltas, table, of_last["variables"])
        tables[table] = {**of_last, "num_rows": len(merged[base_file.ROWS])}
        of_first = first.tables[table]
        if "from_step" in of_last and "from_step" in of_first:
            tables[table]["from_step"] = of_first["from_step"]
        tensors.update(
            {f"{table}/{name}": value for name, value in merged.items()}
        )
    weights: dict[str, chain.WeightOfDelta] = {}
    for delta in deltas:
        for label, described in delta.meta.weights.items():
            is_changed = label in weights and weights[label]["is_changed"]
            weights[label] = {
                **described,
                "is_changed": described["is_changed"] or is_changed,
            }
    for label in weights:
        value = model_weights.read_changed(label, deltas)
        if value is not None:
            tensors[chain.weight_tensor(label)] = value
    return delta_files.write_files(
        target,
        tensors,
        lambda of_files: Meta(
            last.sequence,
            last.base,
            last.prefix,
            first.previous,
            tables,
            of_files,
            tuple(
                link
                for delta in deltas
                for link in (delta.meta.merged or (delta.meta.link,))
            ),
            tuple(
                delta.meta.writer_of(number)
                for delta in deltas
                for number in range(delta.meta.first, delta.meta.sequence + 1)
            ),
            weights,
        ),
    )


def _check_same_tables(deltas: Sequence[Delta]) -> None:
    """Checks that all deltas have the same tables and variables.

    Raises:
      ValueError: If they have not.
    """

    def variables_of(delta: Delta) -> dict[str, list[str]]:
        return {
            table: sorted(description["variables"])
            for table, description in delta.meta.tables.items()
        }

    expected = variables_of(deltas[0])
    for delta in deltas[1:]:
        if variables_of(delta) != expected:
            raise ValueError(
                "All deltas must have the same tables and variables as delta "
                f"{deltas[0].meta.sequence}, which has {expected}. Received: "
                f"{variables_of(delta)} (delta {delta.path!r})."
            )


def _merged_table(
    deltas: Sequence[Delta], table: str, names: Sequence[str]
) -> dict[str, Array]:
    """Returns the merged tensors of one table, by name of the variable."""
    readers = [storage.open_checkpoint(delta.tensors) for delta in deltas]

    def read(name: str) -> list[Array]:
        return [
            np.asarray(reader.get_tensor(f"{table}/{name}"))
            for reader in readers
        ]

    rows = read(base_file.ROWS)
    merged, at = changes.last_occurrences(rows)
    tensors = {base_file.ROWS: merged}
    for name in names:
        values = read(name)
        if name == parts.SKETCH:
            blocks = read(base_file.SKETCH_ROWS)
            tensors[base_file.SKETCH_ROWS], of_blocks = (
                changes.last_occurrences(blocks)
            )
            tensors[name] = np.concatenate(values)[of_blocks]
        elif base_file.has_rows(name):
            tensors[name] = np.concatenate(values)[at]
        else:
            tensors[name] = values[-1]
    return tensors
