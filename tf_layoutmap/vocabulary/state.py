"""`Vocabulary`, which gives access to the keys of one table.

`parts.py` defines the names of a vocabulary's variables.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tf_layoutmap._core import checks, literals, ops
from tf_layoutmap.sharded.routing import assertions
from tf_layoutmap.vocabulary import (
    bucket_layout,
    key_rows,
    key_tensors,
    parts,
    row_files,
    sampling,
    stock_find,
    stored_keys,
)
from tf_layoutmap.vocabulary.open_vocabulary import OpenVocabulary
from tf_layoutmap.vocabulary.parts import (
    COUNTS,
    KEYS,
    NUMBERS,
    NUMBERS_HELD,
    Part,
    Parts,
)
from tf_layoutmap.vocabulary.sharded_numbers import KIND, STEP

if TYPE_CHECKING:
    from tf_layoutmap._core.types import TensorLike, VocabularyStats

Array = np.ndarray[Any, Any]
Variables = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Conversion:
    """The numbers of keys that a conversion of a table kept and dropped.

    Attributes:
      num_kept: Number of keys that have a row in the new table.
      num_dropped: Number of keys that got no row in the new table.
    """

    num_kept: int
    num_dropped: int


class Vocabulary(sampling.KeyCounts):
    """The keys of one table.

    `embedding.vocabularies` contains one object of this class for each table
    with an open vocabulary. Each object follows `resize` of any other object
    for the same vocabulary.

    Attributes:
      name: Name of the table.
    """

    def __init__(
        self,
        name: str,
        current: Callable[[], tuple[OpenVocabulary, Variables]],
        evict_keys: Callable[..., tf.Tensor],
        resize: Callable[[int], Conversion],
        rows: key_rows.RowAccess,
    ):
        """Creates the object for variables of an embedding.

        Args:
          name: Name of the table.
          current: Function that returns the current settings, and the current
            variables by name, such as `KEYS`.
          evict_keys: Function that evicts int64 `keys`, or all expired keys
            with `expired=True`, and returns the evicted keys.
          resize: Function that changes the capacity.
          rows: Access to the rows of the table.
        """
        self.name = name
        self._current = current
        self._evict_keys = evict_keys
        self._resize = resize
        self._rows = rows

    def _show_as(
        self,
        name: str,
        change_settings: Callable[[OpenVocabulary], OpenVocabulary],
    ) -> None:
        """Changes the name, and the result of `settings`."""
        current = self._current

        def changed() -> tuple[OpenVocabulary, Variables]:
            settings, variables = current()
            return change_settings(settings), variables

        self.name = name
        self._current = changed

    @property
    def settings(self) -> OpenVocabulary:
        """The `OpenVocabulary` of the table, with the current capacity."""
        return self._current()[0]

    @property
    def _variables(self) -> Variables:
        return self._current()[1]

    def __repr__(self) -> str:
        return f"Vocabulary({self.name!r}, {self.settings})"

    @property
    def key_variable(self) -> Any:
        """The keys, `[num_buckets, 8]` int64. -2^63 marks empty places.

        The row of a key is 8 times its bucket, plus its position in the bucket.
        """
        return self._variables[KEYS]

    @property
    def _num_buckets(self) -> int:
        return int(self.key_variable.shape[0])

    def read_keys_by_row(self) -> tf.Tensor:
        """Returns all values of `key_variable`, `[num_buckets, 8]` int64."""
        return tf.concat(
            [keys for (keys,) in self._each("read_keys_by_row", parts.keys_of)],
            0,
        )

    def lookup(self, keys: TensorLike | stored_keys.StoredKeys) -> tf.Tensor:
        """Returns the row of each key, or -1 for unknown keys.

        The lookup does not count as a use of the keys.

        Args:
          keys: Integers or strings, of any shape.

        Returns:
          int64 rows, in the shape of `keys`.

        Raises:
          TypeError: If `keys` are neither integers nor strings.
          tf.errors.InvalidArgumentError: If `keys` are strings and the keys of
            the table are integers, or if `keys` are integers and the keys of
            the table are strings.
        """
        key_tensor, kind = self._read_keys(keys)
        with tf.control_dependencies(self._check_kind(kind)):
            return self._find(key_tensor)

    def contains(self, keys: TensorLike | stored_keys.StoredKeys) -> tf.Tensor:
        """Returns whether each key has a row; see `lookup`."""
        return self.lookup(keys) >= 0

    @property
    def count_variable(self) -> Any:
        """Number of uses of each key, `[num_buckets, 8]` int32.

        If `half_life_steps` is set, the decayed count at the time of the key's
        last use.
        """
        return self._variables[COUNTS]

    def rows_of_keys(
        self,
        keys: tf.Tensor,
        kind: int | tf.Tensor = key_tensors.INTEGERS,
        *,
        by_op: bool = False,
    ) -> tf.Tensor:
        """Returns the row of each key, or the common row of unknown keys.

        Args:
          keys: `[num_keys]` int64. If the ids are strings, the keys are hashes.
          kind: Kind of the ids, one of `key_tensors.KINDS`. The op fails if
            the keys of the table are of another kind.
          by_op: Whether the op `FindKeys` of this package finds the keys. False
            uses only TensorFlow's own operations, for exported graphs.
        """
        with tf.control_dependencies(self._check_kind(kind)):
            keys = tf.identity(keys)
        if not by_op:
            return stock_find.find_rows(
                self.key_variable, self._num_buckets, keys
            )
        rows = self._find(keys)
        common_row = self._num_buckets * bucket_layout.KEYS_PER_BUCKET
        return tf.where(rows < 0, tf.constant(common_row, tf.int64), rows)

    def keys(self) -> tf.Tensor:
        """Returns all keys that have a row, `[num_keys]` int64, sorted by row.

        If the ids are strings, the keys are hashes. With `keep_strings=True`,
        the method returns the strings instead, `[num_keys]` of dtype string.

        Raises:
          tf.errors.InvalidArgumentError: If the string of a key is not known,
            because the key is from a file or checkpoint without strings.
        """
        stored = tf.concat(
            [
                tf.reshape(keys, [-1])
                for (keys,) in self._each("keys", parts.keys_of)
            ],
            0,
        )
        keys = tf.boolean_mask(stored, stored != bucket_layout.EMPTY_KEY)
        strings = self._rows.strings
        return keys if strings is None else strings.require(keys)

    def stats(self) -> VocabularyStats:
        """Returns statistics of the vocabulary.

        Returns:
          A dict with the current state, the totals of all training steps, and
          the numbers of keys that `write` added or could not add:

          - `num_keys`: keys that have a row now.
          - `num_rows`: rows that are available for keys.
          - `load`: `num_keys / num_rows`.
          - `step`: training steps.
          - `num_lookups`: lookups of keys.
          - `num_known`: lookups whose key had a row.
          - `num_probes`: buckets that were searched.
          - `num_admitted`: keys that got a row, in steps and in `write`.
          - `num_rejected`: keys that were not admitted, counted once per step.
          - `num_full`: keys that were not assigned a row, because the table
            was full.
          - `num_evicted`: keys that were evicted.
          - `num_expired`: evicted keys that had expired.
          - `hit_rate`: `num_known / num_lookups`; None without lookups.
          - `key_type`: `"integers"`, `"strings"` or None.

          With `keep_strings=True`, the dict also has these entries:

          - `num_strings`, `num_string_bytes`: strings that are stored, also of
            evicted keys whose strings are not removed yet, and their length.
          - `num_collisions`: strings in training steps, `write` and `evict`
            that differ from the stored string with the same hash.
          - `collisions`: at most 16 pairs of strings with the same hash: the
            stored string and the other string, as bytes.

        Raises:
          RuntimeError: If the method is called inside a `tf.function`.
        """
        _require_eager("stats")
        numbers = self._variables[NUMBERS].numpy().tolist()
        held = dict(zip(NUMBERS_HELD, numbers))
        num_rows = bucket_layout.KEYS_PER_BUCKET * self._num_buckets
        counts = self._each("stats", parts.num_keys_of)
        num_keys = sum(int(count) for (count,) in counts)
        kind = key_tensors.KINDS.get(held.pop("kind"))
        lookups = held["num_lookups"]
        stats: Any = {
            "num_keys": num_keys,
            "num_rows": num_rows,
            "load": num_keys / num_rows,
            **held,
            "hit_rate": held["num_known"] / lookups if lookups else None,
            "key_type": kind,
            **(self._rows.strings.stats() if self._rows.strings else {}),
        }
        return stats

    def evict(self, keys: TensorLike | stored_keys.StoredKeys) -> tf.Tensor:
        """Evicts keys. All processes of a strategy must call it together.

        Args:
          keys: Integers or strings, of any shape. Unknown keys are ignored.

        Returns:
          The keys that had a row, `[num_evicted]` int64. With
          `keep_strings=True`, their strings, `[num_evicted]` of dtype string.

        Raises:
          TypeError: If `keys` are neither integers nor strings.
          tf.errors.InvalidArgumentError: Same as for `lookup`.
          tf.errors.FailedPreconditionError: If a step in flight uses the row
            of a key. No key is evicted.
        """
        key_tensor, kind = self._read_keys(keys)
        with tf.control_dependencies(self._check_kind(kind)):
            if self._rows.strings is not None:
                # The result contains the strings, also if a key is from a
                # checkpoint without strings.
                self._rows.strings.keep_input(keys)
            return self._named(self._evict_keys(key_tensor, expired=False))

    def evict_expired(self) -> tf.Tensor:
        """Evicts all keys that have expired according to `ttl_steps`.

        If a program does not call this method, an expired key is evicted when
        another key needs its row. Rows that a step in flight uses are not
        evicted.

        Returns:
          The evicted keys, `[num_evicted]` int64, sorted by row. With
          `keep_strings=True`, their strings, `[num_evicted]` of dtype string.
          The element is an empty string if the string of the key is not known;
          the `strings` that `on_evict` receives contain None instead.
        """
        return self._named(
            self._evict_keys(tf.zeros([0], tf.int64), expired=True)
        )

    def report_evicted(self) -> int:
        """Calls `on_evict` with evicted keys that were not reported yet.

        On parameter servers, the steps of workers evict keys, and `on_evict`
        receives these keys later: when the program calls this method, `evict`,
        `evict_expired` or `resize`, when it reads `embedding_tables` or
        `blocks`, and before it saves or restores a checkpoint. Elsewhere,
        `on_evict` receives keys in the step that evicts them, and the method
        does nothing.

        Returns:
          The number of keys that `on_evict` has received, for all tables of the
          embedding.

        Raises:
          RuntimeError: If the method is called inside a `tf.function`.
        """
        _require_eager("report_evicted")
        return self._rows.report_evicted()

    def _named(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns the strings of evicted keys, if the vocabulary keeps them."""
        strings = self._rows.strings
        return keys if strings is None else strings.read(keys)[0]

    def write(
        self,
        keys: TensorLike,
        rows: TensorLike | None = None,
        slots: Mapping[str, TensorLike] | None = None,
        *,
        counts: TensorLike | None = None,
        last_steps: TensorLike | None = None,
    ) -> key_rows.WrittenKeys:
        """Writes the rows of keys, for example pretrained vectors.

        A key without a row gets a row without admission, in the order of
        `keys`. No key is evicted: if all places of a new key are occupied, the
        key is not written, and the result contains the key, also with
        `on_full="error"`.

        >>> import numpy as np
        >>> import tensorflow as tf
        >>> import tf_layoutmap as tlm
        >>> words = tlm.layers.ShardedEmbedding(
        ...     tlm.vocabulary.OpenVocabulary(100), 8,
        ...     optimizer=tf.tpu.experimental.embedding.Adagrad(0.1))
        >>> _ = words(np.array([[0]]))
        >>> written = words.vocabulary.write([5, 7], np.ones([2, 8]))
        >>> written.num_new, len(written.without_row)
        (2, 0)

        The next step uses the written rows. If a step in flight uses a key, the
        gradients of this step are later applied to the written row. A pending
        pipelined update is applied before the rows are written. Under
        `MultiWorkerMirroredStrategy`, all processes must call the method with
        the same arguments. Otherwise, the next step raises an error.

        A call with many keys writes them in blocks, so other steps can run
        between the blocks.

        Args:
          keys: Integers, strings or the result of `SampledKeys.ids`,
            `[num_keys]`, without duplicates.
          rows: Rows of the keys, `[num_keys, dim]`. Values are rounded to the
            dtype of the table. None: known keys keep their rows, and new keys
            get initial values, as in their first step.
          slots: Maps names of slot variables to their values for the keys,
            `[num_keys, dim]`, or `[num_keys, 1]` for slot variables with one
            value per row. If a slot variable is missing, known keys keep its
            values, and new keys get its initial value.
          counts: Counts of the keys, `[num_keys]` integers. None: known keys
            keep their counts, and new keys have the count 1.
          last_steps: Step of the last use of each key, `[num_keys]` integers
            that are at most `stats()["step"]`. A known key keeps its last step
            if its last step is later. None: known keys keep their last steps,
            and the last step of new keys is the current step.

        Returns:
          A `WrittenKeys` with the attributes `num_written`, `num_new` and
          `without_row`, which contains the keys that got no row.

        Raises:
          TypeError: If `keys` are neither integers nor strings.
          ValueError: If an argument has the wrong shape, a key occurs twice, a
            slot variable does not exist, a value is out of range, or the keys
            of a table with `keep_strings=True` are integers. In this case,
            nothing is written.
          tf.errors.InvalidArgumentError: Same as for `lookup`.
          RuntimeError: If the method is called inside a `tf.function`.
        """
        _require_eager("write")
        checked = key_rows.check_rows(
            self._rows,
            self.name,
            keys,
            rows,
            slots,
            counts,
            last_steps,
            highest_step=self._step(),
        )
        return self._write_checked(checked, key_tensors.as_array(keys))

    def blocks(
        self, block_size: int = key_rows.BLOCK_SIZE
    ) -> Iterator[key_rows.KeyBlock]:
        """Returns an iterator over all keys, with their rows.

        >>> import numpy as np
        >>> import tensorflow as tf
        >>> import tf_layoutmap as tlm
        >>> words = tlm.layers.ShardedEmbedding(
        ...     tlm.vocabulary.OpenVocabulary(100), 8,
        ...     optimizer=tf.tpu.experimental.embedding.Adagrad(0.1))
        >>> _ = words(np.array([[0]]))
        >>> _ = words.vocabulary.write([5, 7, 9])
        >>> for block in words.vocabulary.blocks():
        ...     print(block.keys.shape, block.rows.shape, list(block.slots))
        (3,) (3, 8) ['accumulators']

        The keys are sorted by row. Each block is a copy from one point in time.
        If training steps run between two blocks, a key that gets another row in
        the meantime can be in two blocks or in no block.

        Args:
          block_size: Number of places in a block, at least 8. A block contains
            only keys, so the number of its keys is lower if places are free.

        Returns:
          An iterator over objects with the attributes `keys`, `rows`, `slots`,
          `counts` and `last_steps`.

        Raises:
          TypeError: If `block_size` is not an integer.
          ValueError: If `block_size` is less than 8.
          RuntimeError: If the method is called inside a `tf.function`.
        """
        _require_eager("blocks")
        self._store("blocks")
        checks.check_int(
            "block_size", block_size, lowest=bucket_layout.KEYS_PER_BUCKET
        )
        return key_rows.read_blocks(
            self._rows, self.name, block_size, self._step, self._key_type
        )

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        format: literals.KeyFileFormat = "numpy",
        block_size: int = key_rows.BLOCK_SIZE,
    ) -> int:
        """Writes all keys with their rows to files.

        The files can be read with NumPy, or with pyarrow and all other readers
        of Parquet, without TensorFlow and without this package.
        `tlm.vocabulary.import_rows` writes them to a table.

        >>> import tempfile
        >>> import numpy as np
        >>> import tf_layoutmap as tlm
        >>> words = tlm.layers.ShardedEmbedding(
        ...     tlm.vocabulary.OpenVocabulary(100), 8,
        ...     optimizer=tf.tpu.experimental.embedding.Adagrad(0.1))
        >>> _ = words(np.array([[0]]))
        >>> _ = words.vocabulary.write([5, 7, 9])
        >>> path = tempfile.mkdtemp() + "/words"
        >>> words.vocabulary.export(path)
        3
        >>> np.load(path + "/keys-00000.npz")["rows"].shape
        (3, 8)

        The folder `path` contains a file for each block, see `blocks`, and
        `_meta.json`. With `format="numpy"`, a file `keys-00000.npz` contains
        the arrays `keys`, `rows`, `counts` and `last_steps`, and an array
        `slot/{name}` for each slot variable. With `format="parquet"`, the file
        `keys-00000.parquet` contains the columns `key`, `row`, `count`,
        `last_step` and `slot/{name}`. With `keep_strings=True`, the files also
        contain the strings of the keys: see the guide.

        The memory must hold one block. Under `MultiWorkerMirroredStrategy`, all
        processes must call the method, and the first process writes the files.

        Args:
          path: Folder to write. An existing folder is replaced when all files
            of the new folder are on the disk.
          format: `"numpy"`, or `"parquet"`, which requires pyarrow.
          block_size: Same as for `blocks`.

        Returns:
          The number of keys.

        Raises:
          ImportError: If pyarrow is not installed, for `format="parquet"`.
          TypeError: If `block_size` is not an integer.
          ValueError: If `format` or `block_size` is out of range.
          OSError: If the files cannot be written. An existing folder is not
            changed.
          RuntimeError: If the method is called inside a `tf.function`.
        """
        _require_eager("export")
        checks.check_one_of("format", format, row_files.FORMATS)
        blocks = self.blocks(block_size)
        # If the table is sharded over processes, all processes read this.
        key_type = self._key_type()
        if not self._rows.is_writer:
            return sum(len(block.keys) for block in blocks)
        return row_files.write_folder(
            os.fspath(path),
            blocks,
            format,
            row_files.FolderInfo(
                self.name, self._rows.dim, self._rows.slots, key_type
            ),
        )

    def _write_block(
        self, block: key_rows.KeyBlock, *, takes_step: bool
    ) -> key_rows.WrittenKeys:
        """Writes a block of another table; see `tlm.vocabulary.import_rows`.

        Args:
          block: The block. Its slot variables must exist in this table.
          takes_step: Whether the vocabulary has no keys, so that it gets the
            step of the block.
        """
        checked = key_rows.check_block(
            self._rows, self.name, block, self._step(), takes_step=takes_step
        )
        return self._write_checked(checked, np.asarray(block.keys))

    def _write_checked(
        self, checked: key_rows.RowsToWrite, names: Array
    ) -> key_rows.WrittenKeys:
        if checked.kind == stored_keys.ANY:
            checked = dataclasses.replace(checked, kind=self._own_kind())
        # On servers, each shard knows only the kind of its own keys, so the
        # kind is checked before any shard is changed.
        self._check_kind(checked.kind)
        return key_rows.write_rows(self._rows, checked, names)

    def _check_slots(self, slots: Mapping[str, Any]) -> None:
        """Raises a ValueError if a slot variable does not exist."""
        key_rows.check_slots(self._rows, slots, f"table {self.name!r}")

    def _step(self) -> int:
        return int(self._variables[NUMBERS].numpy()[STEP])

    def _own_kind(self) -> int:
        """Returns the kind of keys that were read from this vocabulary."""
        if self._rows.strings is not None:
            return key_tensors.STRINGS
        kind = int(self._variables[NUMBERS].numpy()[KIND])
        if kind not in key_tensors.KINDS:
            raise ValueError(
                "Argument `keys` must be integers or strings, because table "
                f"{self.name!r} has no keys yet. Received: StoredKeys without "
                "a kind."
            )
        return kind

    def _key_type(self) -> str:
        kind = int(self._variables[NUMBERS].numpy()[KIND])
        return key_tensors.KINDS.get(
            kind, key_tensors.KINDS[key_tensors.INTEGERS]
        )

    def resize(self, capacity: int) -> Conversion:
        """Changes the capacity of the vocabulary.

        Keys keep the values of their rows and slot variables, their steps and
        their counts. If there are too many keys, the keys with the highest
        score according to `evict` are kept, and the other keys are passed to
        `on_evict`. `tlm.vocabulary.convert` explains what happens to the
        counts of keys without a row.

        The table gets new variables, and the embedding gets a new engine, so
        that the counts in `TPUEmbedding.stats` start at zero. Functions that
        were traced before the call must be traced again; otherwise their steps
        raise an error. For a Keras model, call
        `make_train_function(force=True)` or `compile`. A program that restarts
        must create the embedding with the new capacity.

        Args:
          capacity: Same as for `OpenVocabulary`.

        Returns:
          The numbers of keys that were kept and dropped.

        Raises:
          TypeError: If `capacity` is not an integer.
          ValueError: If `capacity` is out of range.
          RuntimeError: If steps are in flight, or the method is called inside a
            `tf.function`. In this case, no variable is changed.
        """
        _require_eager("resize")
        return self._resize(capacity)

    def _store(self, method: str) -> Parts:
        """Returns the store, after a check that it can be read here."""
        store = self._rows.store()
        store.check_can_read(f"`{method}` of vocabulary {self.name!r}")
        return store

    def _each(
        self, method: str, function: Callable[[Part], list[Any]]
    ) -> list[Any]:
        return self._store(method).each(self._rows.table, function)

    def _ask(
        self,
        arguments: tf.Tensor,
        function: Callable[[Part, tf.Tensor], list[tf.Tensor]],
        num_results: int,
    ) -> list[list[tf.Tensor]]:
        return self._rows.store().ask(
            self._rows.table, arguments, function, num_results
        )

    def _find(self, keys: tf.Tensor) -> tf.Tensor:
        num_buckets = self._num_buckets

        def find(part: Part, keys: tf.Tensor) -> list[tf.Tensor]:
            return [
                ops.find_keys(
                    shards=[shard.handle for shard in part.vocabulary[KEYS]],
                    offsets=part.offsets(),
                    keys=keys,
                    table=self.name,
                    first_bucket=part.buckets.start,
                    # The op takes several shards only if they are complete.
                    vocabulary_buckets=part.buckets_if_shard(num_buckets),
                )
            ]

        rows = [
            result for (result,) in self._ask(key_tensors.flat(keys), find, 1)
        ]
        # A key can have a row in only one part. Its other rows are -1.
        highest = (
            rows[0] if len(rows) == 1 else tf.reduce_max(tf.stack(rows), 0)
        )
        return key_tensors.in_shape_of(keys, highest)

    def _read_keys(self, keys: Any) -> tuple[tf.Tensor, int]:
        return key_tensors.read_keys(keys, f"table {self.name!r}")

    def _check_kind(self, kind: int | tf.Tensor) -> list[tf.Operation]:
        if isinstance(kind, int) and kind == stored_keys.ANY:
            return []
        known = self._variables[NUMBERS][KIND]
        if not isinstance(kind, int):  # The kind of a packed batch.
            kind = tf.cast(kind, tf.int64)
            return assertions.require(
                (known == 0) | (kind == 0) | (known == kind),
                f"The keys of table {self.name!r} must all be integers or all "
                "be strings. Received: a packed batch with the other kind.",
            )
        other = (key_tensors.INTEGERS + key_tensors.STRINGS) - kind
        return assertions.require(
            (known == 0) | (known == kind),
            f"The keys of table {self.name!r} must be "
            f"{key_tensors.KINDS[other]}, as those before. Received: "
            f"{key_tensors.KINDS[kind]}; {key_tensors.REMEDIES[kind]}.",
        )


def _require_eager(method: str) -> None:
    if not tf.executing_eagerly():
        raise RuntimeError(f"`{method}` must be called outside tf.function.")
