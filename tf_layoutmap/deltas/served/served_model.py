"""`ServedModel`: applies deltas to a model that this process serves."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from . import changes, export_state
from .changes import TableChanges, VariableChanges
from .export_state import EMPTY_KEY, KEYS, PARAMETERS, StoredVariable
from .lookup_lock import LookupLock

Array = np.ndarray[Any, Any]

# A write of rows blocks lookups. The number of rows per write is adapted so
# that a write takes between these times, in seconds.
_SHORT_WRITE, _LONG_WRITE = 0.00007, 0.00014
_FEWEST_ROWS, _FIRST_ROWS, _MOST_ROWS = 32, 128, 2**15


class ServedModel:
    """A loaded SavedModel to which deltas of its variables are applied.

    The SavedModel is written with `tlm.export(..., delta_writer=writer)`, or is
    marked by `tlm.deltas.DeltaWriter.mark_export`. After all deltas are
    applied, the tables and weights are bitwise identical to the variables of a
    model that is exported when the last delta is written. The class requires
    only TensorFlow and NumPy: a process without tf_layoutmap can use a copy of
    the folder `tf_layoutmap/deltas/served`.

    >>> import tempfile
    >>> import tensorflow as tf
    >>> import tf_layoutmap as tlm
    >>> tpu = tf.tpu.experimental.embedding
    >>> words = tpu.TableConfig(1000, 4, initializer=tf.ones, name="words")
    >>> embedding = tlm.TPUEmbedding(
    ...     {"title": tpu.FeatureConfig(words)}, tpu.SGD(0.5))
    >>> embedding.build()
    >>> where = tempfile.mkdtemp()
    >>> base = tf.train.Checkpoint(embedding=embedding).save(where + "/base")
    >>> writer = tlm.deltas.DeltaWriter(embedding, where + "/deltas", base=base)
    >>> spec = [{"title": tf.TensorSpec([None], tf.int64)}]
    >>> _ = tlm.export(
    ...     embedding, where + "/model", input_signature=spec,
    ...     delta_writer=writer)
    >>> embedding.enqueue({"title": tf.constant([3])})
    >>> _ = embedding.dequeue()
    >>> embedding.apply_gradients({"title": tf.ones([1, 4])})
    >>> _ = writer.write()
    >>> served = tlm.deltas.ServedModel(where + "/model")
    >>> served.apply(where + "/deltas")
    1
    >>> ids = tf.constant([3, 4], tf.int64)
    >>> with served.lookups():
    ...     served.model.serve({"title": ids})["title"][:, 0].numpy().tolist()
    [0.5, 1.0]

    Lookups can run in other threads while deltas are applied:

    - A lookup never returns a mixture of the old and the new values of one row.
      This also holds without `lookups()`.
    - In a block `with served.lookups():`, a lookup of a key returns the row
      that the key had before the deltas, or the row that the key has
      afterwards. Without the block, a lookup in a table with an open vocabulary
      can treat a key as unknown while the key moves, or can return the row of
      another key if it reads a row that is being reassigned.
    - Different rows in a batch can be from before and after the deltas, except
      with `apply(..., atomic=True)` in a block `with served.lookups():`.
    - In a block `with served.lookups():`, all dense weights are from before or
      from after the deltas. If the deltas contain dense weights,
      `atomic=True` is the default, so that the rows match the weights. Calls
      without the block can combine old and new variables.

    Attributes:
      model: The object that `tf.saved_model.load` returned.
      base: Fingerprint of the checkpoint on which the deltas are based.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        tags: str | Sequence[str] | None = None,
        options: tf.saved_model.LoadOptions | None = None,
    ):
        """Loads the SavedModel.

        Args:
          path: Folder of the SavedModel.
          tags: Same as for `tf.saved_model.load`.
          options: Same as for `tf.saved_model.load`.

        Raises:
          ValueError: If the SavedModel was not written for deltas, or its
            variables do not match its description of the tables.
          RuntimeError: If the SavedModel was replaced while it was loaded.
        """
        path = os.fspath(path)
        self._state = export_state.read(path)
        self.model = tf.saved_model.load(path, tags, options)
        if export_state.read(path) != self._state:
            raise RuntimeError(
                f"{path!r} was replaced while it was loaded. Load it again."
            )
        self.base = self._state.base
        self._lock = LookupLock()
        self._applying = threading.Lock()
        self._rows_per_write = _FIRST_ROWS
        self._variables = {
            key: _find_variable(self.model, stored, path)
            for key, stored in self._state.variables().items()
        }
        # A weight is assigned in full, except if it is stored like a table.
        assigned = {
            weight.variable.key
            for weight in self._state.weights
            if not weight.variable.kind
        }
        for key, variable in self._variables.items():
            if key not in assigned:
                _prepare_scatter(variable)

    @property
    def sequence(self) -> int:
        """Number of the last applied delta, or 0 if no delta was applied."""
        return self._state.sequence

    def lookups(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which keys and rows of lookups match.

        Blocks of several threads run at the same time. A block waits while
        `apply` writes rows whose keys change, which takes a few milliseconds at
        most, and `apply` waits for the blocks that run. Do not wait for other
        threads inside the block.
        """
        return self._lock.shared()

    def apply(
        self,
        deltas: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        atomic: bool | None = None,
    ) -> int:
        """Applies all deltas that follow the last applied delta.

        The method reads and checks all deltas before it changes the model. If
        an exception such as `KeyboardInterrupt` interrupts the writes, some
        rows are new and `sequence` is unchanged. The next call then writes all
        rows again.

        Args:
          deltas: Directory of the deltas, or a list of paths of deltas. Deltas
            of a directory that were already applied are ignored. In a list,
            they raise an error.
          atomic: Whether to write all rows and weights in one step, so that
            each block `with lookups()` sees the model before or after all
            deltas. Lookups in these blocks then wait until all rows are
            written. By default, True if the deltas contain weights that the
            model uses, in addition to rows of tables.

        Returns:
          The number of the last applied delta.

        Raises:
          ValueError: If a delta is missing, is repeated, has another base, does
            not follow the last applied delta, was truncated or modified, does
            not match the tables and weights, or contains a row that the storage
            type of the table cannot represent. The model is unchanged.
          RuntimeError: If the method is called in a block `with lookups()`, or
            in a `tf.function`.
        """
        if not tf.executing_eagerly():
            raise RuntimeError("`apply` must be called outside tf.function.")
        with self._applying:
            delta_changes = changes.read_changes(self._state, deltas)
            rows = [
                change for change in delta_changes.weights if change.is_rows
            ]
            # All tensors are created before lookups wait.
            weights = [
                (variable, tf.constant(change.values[0], variable.dtype))
                for change in delta_changes.weights
                if not change.is_rows
                for variable in [self._variables[change.variable.key]]
            ]
            if atomic is None:
                atomic = bool(delta_changes.weights)
            with self._exclusive(atomic):
                for table in delta_changes.tables:
                    self._write_table(table, atomic)
                for change in rows:
                    self._write_rows(
                        self._variables[change.variable.key],
                        change.rows,
                        change.values,
                        atomic,
                    )
                with self._exclusive(bool(weights) and not atomic):
                    for variable, value in weights:
                        variable.assign(value)
            self._state = delta_changes.state
        return self._state.sequence

    def _exclusive(
        self, is_needed: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Returns a context without blocks of `lookups()`, if it is needed."""
        return self._lock.exclusive() if is_needed else contextlib.nullcontext()

    def _write_table(self, table: TableChanges, atomic: bool) -> None:
        others = dict(table.variables)
        if PARAMETERS in others and KEYS in others:
            self._write_open_table(
                others.pop(PARAMETERS), others.pop(KEYS), atomic
            )
        for change in others.values():
            variable = self._variables[change.variable.key]
            if change.is_rows:
                self._write_rows(variable, change.rows, change.values, atomic)
            elif change.is_lanes:
                _write_lanes(variable, change.rows, change.values)
            else:
                variable.assign(change.apply_to(variable.numpy()))

    def _write_open_table(
        self, rows: VariableChanges, keys: VariableChanges, atomic: bool
    ) -> None:
        """Writes rows and keys so that keys never belong to other rows.

        Rows whose keys do not change are written first. The other rows are
        written in groups. If a key moves from one row to another, both rows are
        in the same group, so that the key never has two rows or no row.

        Unknown keys can share a row. Before this row changes, keys get a row
        without replacing other keys. After this row has changed, keys without a
        replacement lose their row. The rows in which a new key replaces another
        key are written together with the shared row. Each of these keys has its
        old row or the old shared row before, and its new row or the new shared
        row afterwards.
        """
        of_rows = self._variables[rows.variable.key]
        of_keys = self._variables[keys.variable.key]
        before = _read_lanes(of_keys, keys.rows)
        changed = np.flatnonzero(before != keys.values)
        # `keys` has the first rows of `rows`; the row that unknown keys share
        # follows.
        is_same = np.ones(len(rows.rows), bool)
        is_same[changed] = False
        shared = np.arange(len(keys.rows), len(rows.rows))
        if _are_equal(of_rows, rows.rows[shared], rows.values[shared]):
            shared = shared[:0]
        is_same[shared] = False
        self._write_rows(
            of_rows, rows.rows[is_same], rows.values[is_same], atomic
        )
        old_keys, new_keys = before[changed], keys.values[changed]
        labels = _labels(old_keys, new_keys)
        phases = (
            _phases(old_keys, new_keys, labels)
            if len(shared)
            else np.zeros(len(changed), np.int64)
        )
        for phase in (_ADMISSIONS, _REPLACEMENTS, _EVICTIONS):
            (of_phase,) = np.nonzero(phases == phase)
            if phase == _REPLACEMENTS:
                self._write_group(rows, keys, changed[of_phase], atomic, shared)
                continue
            for group in _groups(
                labels[of_phase], lambda: self._rows_per_write
            ):
                self._write_group(rows, keys, changed[of_phase[group]], atomic)

    def _write_group(
        self,
        rows: VariableChanges,
        keys: VariableChanges,
        at: Array,
        atomic: bool,
        shared: Array | None = None,
    ) -> None:
        """Writes some rows and their keys while no block of `lookups()` runs.

        Args:
          rows: Changes of the rows of an open table.
          keys: Changes of the keys of the table.
          at: Indices of the changes to write.
          atomic: Whether the caller excludes blocks of `lookups()`.
          shared: Indices of rows without a key to write with these rows.
        """
        also = np.zeros([0], np.int64) if shared is None else shared
        if not len(at) and not len(also):
            return
        of_rows = self._variables[rows.variable.key]
        of_keys = self._variables[keys.variable.key]
        # For lookups outside of `lookups()`, the keys are removed before the
        # rows change. All tensors are created before lookups wait.
        places = _lanes(of_keys, keys.rows[at])
        no_keys = tf.fill([len(at)], tf.constant(EMPTY_KEY, tf.int64))
        written = np.concatenate([at, also])
        at_rows = tf.constant(rows.rows[written, np.newaxis], tf.int64)
        values = tf.constant(rows.values[written], of_rows.dtype)
        own_keys = tf.constant(keys.values[at], tf.int64)
        with self._exclusive(not atomic):
            started = time.perf_counter()
            _scatter_nd(of_keys, places, no_keys)
            _scatter_nd(of_rows, at_rows, values)
            _scatter_nd(of_keys, places, own_keys)
            seconds = time.perf_counter() - started
        if shared is None:
            self._adapt(seconds)
        if not atomic:
            self._pause(seconds)

    def _write_rows(
        self, variable: Any, rows: Array, values: Array, atomic: bool
    ) -> None:
        """Writes rows in several short writes, and pauses between them."""
        start = 0
        while start < len(rows):
            end = start + self._rows_per_write
            started = time.perf_counter()
            _scatter(variable, rows[start:end], values[start:end])
            seconds = time.perf_counter() - started
            self._adapt(seconds)
            if not atomic:
                self._pause(seconds)
            start = end

    def _pause(self, seconds: float) -> None:
        """Lets lookups of other threads run, for the time of the last write.

        Args:
          seconds: Duration of the last write. If other programs use all cores,
            a write takes longer, but the pause is limited.
        """
        time.sleep(min(seconds, _LONG_WRITE))

    def _adapt(self, seconds: float) -> None:
        """Adapts the number of rows to the time of the last write."""
        if seconds > _LONG_WRITE:
            self._rows_per_write = max(self._rows_per_write // 2, _FEWEST_ROWS)
        elif seconds < _SHORT_WRITE:
            self._rows_per_write = min(self._rows_per_write * 2, _MOST_ROWS)


def _find_variable(model: Any, stored: StoredVariable, path: str) -> Any:
    """Returns a variable of a loaded SavedModel.

    Raises:
      ValueError: If the variable does not exist, or has another shape or dtype.
    """
    variable: Any = model
    for name in export_state.path_of(stored.key):
        if variable is not None:
            variable = (
                tf.train.TrackableView(model).children(variable).get(name)
            )
    if (
        variable is None
        or not hasattr(variable, "handle")
        or tuple(variable.shape) != stored.shape
        or variable.dtype.name != stored.dtype
    ):
        raise ValueError(
            f"SavedModel {path!r} must contain the variable {stored.key!r} of "
            f"shape {list(stored.shape)} and dtype {stored.dtype}. Received: "
            f"{variable}."
        )
    return variable


def _prepare_scatter(variable: Any) -> None:
    """Prepares a variable for writes of rows.

    At the first write of rows, TensorFlow changes how the variable is read, and
    copies the variable if a lookup is reading it. A write of no rows prevents a
    copy during lookups.
    """
    width = tuple(variable.shape)[1:]
    if width:
        _scatter(
            variable,
            np.zeros([0], np.int64),
            np.zeros([0, *width], variable.dtype.as_numpy_dtype),
        )


def _scatter(variable: Any, rows: Array, values: Array) -> None:
    """Writes rows of a variable in one operation.

    `ResourceScatterNdUpdate` holds the lock of the variable exclusively, and a
    lookup holds it while it reads. `ResourceScatterUpdate` writes while lookups
    read, so that a lookup could return a mixture of old and new values.
    """
    _scatter_nd(
        variable,
        tf.constant(rows[:, np.newaxis], tf.int64),
        tf.constant(values, variable.dtype),
    )


def _write_lanes(variable: Any, places: Array, values: Array) -> None:
    """Writes elements of a variable `[num_buckets, lanes]` in one operation."""
    _scatter_nd(
        variable,
        _lanes(variable, places),
        tf.constant(values, variable.dtype),
    )


def _lanes(variable: Any, places: Array) -> tf.Tensor:
    """Returns the indices of elements of a variable `[num_buckets, lanes]`."""
    lanes = variable.shape[1]
    return tf.constant(np.stack([places // lanes, places % lanes], 1), tf.int64)


def _scatter_nd(variable: Any, indices: tf.Tensor, values: tf.Tensor) -> None:
    tf.raw_ops.ResourceScatterNdUpdate(
        ref=variable.handle,
        indices=indices,
        updates=values,
        use_locking=True,
    )


def _read_lanes(variable: Any, places: Array) -> Array:
    """Returns elements of a variable `[num_buckets, lanes]`."""
    lanes = variable.shape[1]
    buckets = tf.gather(variable, places // lanes).numpy()
    return buckets[np.arange(len(places)), places % lanes]


def _are_equal(variable: Any, rows: Array, values: Array) -> bool:
    """Returns whether rows of a variable are bitwise equal to values."""
    return (
        not len(rows)
        or tf.gather(variable, rows).numpy().tobytes() == values.tobytes()
    )


# Order of the writes of an open table whose shared row changes.
_ADMISSIONS, _REPLACEMENTS, _EVICTIONS = range(3)


def _phases(before: Array, after: Array, labels: Array) -> Array:
    """Returns the phase in which each row is written.

    >>> before = np.array([7, EMPTY_KEY, 8, 5, 6])
    >>> after = np.array([1, 2, EMPTY_KEY, 6, 5])
    >>> _phases(before, after, _labels(before, after)).tolist()
    [1, 0, 2, 0, 0]

    Args:
      before: `[num_rows]` int64, old key of each row.
      after: `[num_rows]` int64, new key of each row.
      labels: Result of `_labels`. Rows with the same label are written in the
        same phase.
    """
    admits = (after != EMPTY_KEY) & ~np.isin(after, before)
    evicts = (before != EMPTY_KEY) & ~np.isin(before, after)
    # A label is the index of a row.
    by_label = np.zeros([2, len(labels)], bool)
    by_label[0, labels[admits]] = True
    by_label[1, labels[evicts]] = True
    admits, evicts = by_label[:, labels]
    return np.where(
        evicts, np.where(admits, _REPLACEMENTS, _EVICTIONS), _ADMISSIONS
    )


def _groups(labels: Array, num_rows: Callable[[], int]) -> Iterator[Array]:
    """Yields groups of rows whose keys change.

    >>> before, after = np.array([7, 8, 9, 5]), np.array([1, 9, 2, 7])
    >>> [one.tolist() for one in _groups(_labels(before, after), lambda: 2)]
    [[0, 3], [1, 2]]

    Args:
      labels: Label of each row. Rows with equal labels are in the same group.
      num_rows: Function that returns the number of rows of the next group. A
        group is larger if it contains more rows with the same label.

    Yields:
      Indices of rows.
    """
    order = np.argsort(labels, kind="stable")
    ends = np.append(np.flatnonzero(np.diff(labels[order])) + 1, len(labels))
    start = 0
    while start < len(labels):
        # The first end at or after the wanted number of rows.
        wanted = min(start + num_rows(), len(labels))
        end = int(ends[np.searchsorted(ends, wanted)])
        yield order[start:end]
        start = end


def _labels(before: Array, after: Array) -> Array:
    """Returns equal labels for rows between which keys move.

    The label of a row is the lowest index of all rows that are connected with
    it.
    """
    keys, old, new = np.intersect1d(before, after, return_indices=True)
    moved = (keys != EMPTY_KEY) & (old != new)
    old, new = old[moved], new[moved]
    labels = np.arange(len(before))
    while True:
        lowest = np.minimum(labels[old], labels[new])
        updated = labels.copy()
        np.minimum.at(updated, old, lowest)
        np.minimum.at(updated, new, lowest)
        # The label of a row's label is also a label of the row.
        updated = updated[updated]
        if np.array_equal(updated, labels):
            return labels
        labels = updated
