"""What saving and restoring ask of an embedding."""

# DOC-MERGE: Refuses a checkpoint before any of its values is written.
#
# TensorFlow assigns the variables of a checkpoint one after the other, so a
# shape that does not fit would be found with half of the tables overwritten.
#
from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding.state import EmbeddingState
from tf_layoutmap.vocabulary import state


def check_shapes(
    path: str, attribute: str, variables: Mapping[str, Mapping[str, Any]]
):
    """Raises if the checkpoint holds these tables otherwise only.

    Args:
      path: The checkpoint's prefix.
      attribute: The name of the attribute that holds `variables`.
      variables: `{table name: {variable name: variable}}`.

    Raises:
      ValueError: If a variable of a table has another shape or dtype there,
        or the table has keys here and ids there, or the other way round.
    """
    found = dict(tf.train.list_variables(path))
    dtypes = tf.train.load_checkpoint(path).get_variable_to_dtype_map()
    own = {
        key_of(attribute, table, name): (
            table,
            list(variable.shape),
            tf.as_dtype(variable.dtype),
        )
        for table, by_name in variables.items()
        for name, variable in by_name.items()
    }
    # Which object of the checkpoint is ours is not known here, so any whose
    # shapes fit will do: two embeddings may have tables of equal names.
    mismatches: dict[str, str | None] = {}
    for key, shape in found.items():
        suffix = key[key.rfind(f"{attribute}/") :]
        if suffix not in own:
            continue
        prefix = key.removesuffix(suffix)
        mismatches.setdefault(prefix, None)
        table, expected, dtype = own[suffix]
        if shape != expected:
            mismatches[prefix] = (
                f"Table {table!r} must be restored from a tensor of shape "
                f"{expected}. Received: shape {shape} ({key!r} in checkpoint "
                f"{path!r})."
            )
        elif dtypes[key] != dtype:
            mismatches[prefix] = (
                f"Table {table!r} must be restored from a tensor of dtype "
                f"{dtype.name}; `table_dtypes` says how a table is stored. "
                f"Received: {dtypes[key].name} ({key!r} in checkpoint "
                f"{path!r})."
            )
    for prefix in mismatches:
        mismatches[prefix] = (
            _other_vocabulary(found, path, prefix, attribute, variables)
            or mismatches[prefix]
        )
    if mismatches and all(mismatches.values()):
        raise ValueError(next(iter(mismatches.values())))


def _other_vocabulary(
    found: Mapping[str, Any],
    path: str,
    prefix: str,
    attribute: str,
    variables: Mapping[str, Mapping[str, Any]],
) -> str | None:
    """Says which table has other keys than the checkpoint has for it.

    Where one has keys and the other ids, rows would be restored, and belong to
    others.
    """
    for table, by_name in variables.items():
        if prefix + key_of(attribute, table, "parameters") not in found:
            continue
        shapes = [
            None
            if state.KEYS not in by_name
            else list(by_name[state.KEYS].shape),
            found.get(prefix + key_of(attribute, table, state.KEYS)),
        ]
        if shapes[0] == shapes[1]:
            continue
        own, other = (
            "ids that are rows"
            if shape is None
            else "an open vocabulary"
            if None in shapes
            else f"room for {math.prod(shape)} keys"
            for shape in shapes
        )
        return (
            f"Table {table!r} with {own} must be restored from one with "
            f"{own}. Received: one with {other} (checkpoint {path!r}). "
            f"tlm.convert_vocabularies({path!r}, target, {{{table!r}: ...}}) "
            "writes a checkpoint that fits."
        )
    return None


def key_of(*path: str) -> str:
    """Returns the checkpoint's name of what these attributes reach."""
    escaped = [step.replace(".", "..").replace("/", ".S") for step in path]
    return "/".join([*escaped, ".ATTRIBUTES", tf_private.VARIABLE_VALUE_KEY])


if TYPE_CHECKING:

    class _Trackable:  # What the methods are mixed into.
        _deferred_dependencies: dict[str, list[Any]]

        def _maybe_initialize_trackable(self) -> None: ...

        def _trackable_children(
            self, save_type: str = ..., **kwargs: Any
        ) -> dict[str, Any]: ...
else:
    _Trackable = object


class CheckpointHooks(_Trackable):
    """Methods of `TPUEmbedding` that TensorFlow calls by their names."""

    _state: EmbeddingState
    _variables: dict[str, dict[str, Any]]

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        # Whatever is saved asks for this first; but an asynchronous save, on a
        # thread of its own, after it has copied the variables.
        if hasattr(self, "_state") and tf_private.in_async_save():
            self._check_copied()
        elif hasattr(self, "_state"):
            self._state.backend.before_read()
        return super()._trackable_children(save_type, **kwargs)

    def _copy_trackable_to_cpu(self, object_map):
        # An asynchronous save asks this before it copies the variables: once
        # eagerly, then in a function that it has traced.
        del object_map
        backend = self._state.backend
        if tf.executing_eagerly():
            self._state.is_copied = backend.is_built
        backend.before_async_copy()

    def _check_copied(self):
        # TensorFlow copies what there was at the first save, and would write
        # all else as it is by then, in the middle of a step.
        if self._state.backend.is_built and not self._state.is_copied:
            raise RuntimeError(
                "A TPUEmbedding must be built before the first asynchronous "
                "save of its checkpoint, which copies only the variables that "
                "there are by then; call `build` before, or make another "
                "tf.train.Checkpoint."
            )

    def _checkpoint_adapter(self, path):
        # A restore asks this before it writes anything: the one moment to
        # refuse to change rows under a step whose gradients belong to the
        # old ones.
        backend = self._state.backend
        if not backend.is_built:
            return None
        backend.before_restore()
        if path is not None:
            check_shapes(path, "_variables", self._variables)
            backend.note_restore()
        return None

    def _check_deferred_restore(self, variables: dict[str, dict[str, Any]]):
        """Refuses the checkpoint whose restore waits for `variables`."""
        self._maybe_initialize_trackable()
        waiting = self._deferred_dependencies.get("_variables", ())
        if waiting:
            latest = max(waiting, key=lambda one: one.checkpoint.restore_uid)
            check_shapes(
                latest.checkpoint.save_path_string, "_variables", variables
            )

    def _load_variables(self):
        """Sends the variables to the TPU, as of TensorFlow's class.

        Its restore calls this, of a checkpoint that it has written.
        """
        self._state.backend.load_variables()

    def _retrieve_variables(self):
        """Brings the variables up to date, as of TensorFlow's class."""
        self._state.backend.retrieve_variables()
