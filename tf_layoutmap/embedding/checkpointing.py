"""Checkpoint hooks of a `TPUEmbedding`, and the shape check before a restore.

TensorFlow assigns the variables of a checkpoint one after the other. If a shape
is wrong, TensorFlow raises an error only after it has overwritten some tables.
`check_shapes` raises the error before any table is overwritten.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.deltas.served import storage
from tf_layoutmap.embedding.checkpoints import layouts
from tf_layoutmap.embedding.checkpoints.restoring import TableRestore
from tf_layoutmap.embedding.configs import open_tables
from tf_layoutmap.embedding.state import EmbeddingState
from tf_layoutmap.vocabulary import checkpoint_files, parts, shared


def check_shapes(
    path: str,
    attribute: str,
    variables: Mapping[str, Mapping[str, Any]],
    owners: Mapping[str, str],
):
    """Checks that tables match the tensors in a checkpoint.

    Args:
      path: Prefix of the checkpoint.
      attribute: Name of the attribute that holds `variables`.
      variables: `{table name: {variable name: variable}}`.
      owners: Tables that use the vocabulary of another table, with the other
        table.

    Raises:
      ValueError: If a table has another shape or dtype in the checkpoint, if a
        table has an open vocabulary only in the checkpoint or only in the
        program, or if a table shares its vocabulary with another table than in
        the checkpoint.
    """
    reader = storage.open_checkpoint(path)
    stored_shapes = dict(sorted(reader.get_variable_to_shape_map().items()))
    dtypes = reader.get_variable_to_dtype_map()
    expected_variables = {
        checkpoint_files.key_of(attribute, table, name): (
            table,
            list(variable.shape),
            tf.as_dtype(variable.dtype),
        )
        for table, by_name in variables.items()
        for name, variable in by_name.items()
    }
    # The checkpoint may contain several embeddings whose tables have equal
    # names, and the prefix of this embedding is not known here. Therefore the
    # check passes if the shapes match under at least one prefix.
    mismatches: dict[str, str | None] = {}
    for key, shape in stored_shapes.items():
        suffix = key[key.rfind(f"{attribute}/") :]
        if suffix not in expected_variables:
            continue
        prefix = key.removesuffix(suffix)
        mismatches.setdefault(prefix, None)
        table, expected, dtype = expected_variables[suffix]
        if shape != expected:
            mismatches[prefix] = (
                f"Table {table!r} must be restored from a tensor of shape "
                f"{expected}. Received: shape {shape} ({key!r} in checkpoint "
                f"{path!r})."
            )
        elif dtypes[key] != dtype:
            mismatches[prefix] = (
                f"Table {table!r} must be restored from a tensor of dtype "
                f"{dtype.name}; `table_dtypes` sets the dtype of a table. "
                f"Received: {dtypes[key].name} ({key!r} in checkpoint "
                f"{path!r})."
            )
    for prefix in mismatches:
        saved = prefix + checkpoint_files.key_of(shared.OWNERS)
        mismatches[prefix] = (
            _owner_mismatch(
                [
                    table
                    for table in variables
                    if prefix
                    + checkpoint_files.key_of(attribute, table, "parameters")
                    in stored_shapes
                ],
                owners,
                shared.decode_owners(reader.get_tensor(saved))
                if saved in stored_shapes
                else {},
                path,
            )
            or _vocabulary_mismatch(
                stored_shapes, path, prefix, attribute, variables
            )
            or mismatches[prefix]
        )
    if mismatches and all(mismatches.values()):
        raise ValueError(next(iter(mismatches.values())))


def _owner_mismatch(
    tables: Sequence[str],
    owners: Mapping[str, str],
    saved: Mapping[str, str],
    path: str,
) -> str | None:
    """Returns an error message if tables do not share vocabularies as saved.

    Args:
      tables: Names of the tables.
      owners: The owners of shared vocabularies in the program.
      saved: The owners in the checkpoint.
      path: Prefix of the checkpoint.
    """
    for table in tables:
        if owners.get(table) == saved.get(table):
            continue
        expected, other = (
            f"the vocabulary of table {owner!r}"
            if owner is not None
            else "a separate vocabulary or no vocabulary"
            for owner in (owners.get(table), saved.get(table))
        )
        return (
            f"Table {table!r} with {expected} must be restored from a table "
            f"with {expected}. Received: a table with {other} (checkpoint "
            f"{path!r}). "
            "Restore the checkpoint into tables with the saved vocabularies, "
            "and copy the rows with tlm.vocabulary.import_rows."
        )
    return None


def _vocabulary_mismatch(
    stored_shapes: Mapping[str, Any],
    path: str,
    prefix: str,
    attribute: str,
    variables: Mapping[str, Mapping[str, Any]],
) -> str | None:
    """Returns an error message if a vocabulary does not match, or None.

    If rows are identified by keys only in the table or only in the checkpoint,
    the restored rows would belong to other ids.
    """
    for table, by_name in variables.items():
        if (
            prefix + checkpoint_files.key_of(attribute, table, "parameters")
            not in stored_shapes
        ):
            continue
        shapes = [
            None
            if parts.KEYS not in by_name
            else list(by_name[parts.KEYS].shape),
            stored_shapes.get(
                prefix + checkpoint_files.key_of(attribute, table, parts.KEYS)
            ),
        ]
        if shapes[0] == shapes[1]:
            continue
        expected, other = (
            "ids that are row indices"
            if shape is None
            else "an open vocabulary"
            if None in shapes
            else f"space for {math.prod(shape)} keys"
            for shape in shapes
        )
        return (
            f"Table {table!r} with {expected} must be restored from a table "
            f"with {expected}. Received: a table with {other} (checkpoint "
            f"{path!r}). "
            f"tlm.vocabulary.convert({path!r}, target, {{{table!r}: ...}}) "
            "writes a checkpoint that matches."
        )
    return None


if TYPE_CHECKING:

    class _Trackable:  # Declares methods of the base class.
        _deferred_dependencies: dict[str, list[Any]]

        def _maybe_initialize_trackable(self) -> None: ...

        def _trackable_children(
            self, save_type: str = ..., **kwargs: Any
        ) -> dict[str, Any]: ...
else:
    _Trackable = object


class CheckpointHooks(TableRestore, _Trackable):
    """Methods of `TPUEmbedding` that TensorFlow's checkpointing calls."""

    _state: EmbeddingState
    _variables: dict[str, dict[str, Any]]

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        # Every save calls this method before it reads variables. In an
        # asynchronous save, a thread calls this method after the variables are
        # copied.
        if hasattr(self, "_state") and tf_private.in_async_save():
            self._check_copied()
        elif hasattr(self, "_state"):
            self._state.backend.before_read()
        children = super()._trackable_children(save_type, **kwargs)
        if save_type != "checkpoint":
            # An exported graph must not contain ops of this package.
            children.pop("_kept_strings", None)
        return children

    def _copy_trackable_to_cpu(self, object_map):
        # An asynchronous save calls this method before it copies the variables.
        # The first call is eager. Later calls are inside a function that the
        # save traces.
        del object_map
        backend = self._state.backend
        if tf.executing_eagerly():
            self._state.is_copied = backend.is_built
        backend.before_async_copy()

    def _check_copied(self):
        # An asynchronous save copies only variables that existed at the first
        # save. TensorFlow would write all other variables directly, possibly
        # during an update.
        if self._state.backend.is_built and not self._state.is_copied:
            raise RuntimeError(
                "A TPUEmbedding must be built before the first asynchronous "
                "save of its checkpoint, which copies only variables that "
                "exist at that time; call `build` before the save, or create "
                "another tf.train.Checkpoint."
            )

    def _checkpoint_adapter(self, path):
        # A restore calls this method before it writes variables. No other hook
        # can prevent a restore while steps are in flight. The gradients of
        # steps in flight belong to the old rows.
        backend = self._state.backend
        if not backend.is_built:
            return None
        backend.before_restore()
        if path is not None:
            check_shapes(
                path,
                "_variables",
                self._variables,
                open_tables.owners_by_name(self._state.spec),
            )
            backend.note_restore()
        return None

    def _layouts_and_slots(self):
        tables = self._state.spec.tables
        for table in tables:
            if table.vocabulary is not None or table.is_half:
                raise ValueError(
                    f"Table {table.name!r} must have float32 rows and ids that "
                    "are row indices to be restored from a checkpoint of "
                    "SparseCores. Received: a table with "
                    + (
                        f"{table.dtype} rows."
                        if table.vocabulary is None
                        else "an open vocabulary. Convert the checkpoint with "
                        "tlm.planning.convert_checkpoint and "
                        "tlm.vocabulary.convert."
                    )
                )
        return (
            {
                table.name: layouts.of_table(
                    table.name, (table.num_rows, table.dim)
                )
                for table in tables
            },
            {
                table.name: {slot.name: slot.is_per_row for slot in table.slots}
                for table in tables
            },
        )

    def _restored_variables(self):
        return self._variables if self._state.backend.is_built else None

    def _assign_tables(self, values, variables):
        for table, name, value in values:
            variables[table][name].assign(value)
        if self._state.backend.is_built:
            self._state.backend.load_variables()

    def _check_deferred_restore(self, variables: dict[str, dict[str, Any]]):
        """Checks the shapes of `variables` that a deferred restore will set."""
        self._maybe_initialize_trackable()
        waiting = self._deferred_dependencies.get("_variables", ())
        if waiting:
            latest = max(
                waiting, key=lambda restore: restore.checkpoint.restore_uid
            )
            check_shapes(
                latest.checkpoint.save_path_string,
                "_variables",
                variables,
                open_tables.owners_by_name(self._state.spec),
            )

    def _load_variables(self):
        """Copies the variables to the TPU, as in TensorFlow's class.

        TensorFlow calls this method when it restores a checkpoint that
        TensorFlow's class has written.
        """
        self._state.backend.load_variables()

    def _retrieve_variables(self):
        """Copies the tables from the TPU, as in TensorFlow's class."""
        self._state.backend.retrieve_variables()
