"""What saving and restoring ask of an embedding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tf_layoutmap import _tf_private
from tf_layoutmap.embedding.api import restore_checks
from tf_layoutmap.embedding.api.state import EmbeddingState

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
        if hasattr(self, "_state") and _tf_private.in_async_save():
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
            restore_checks.check_shapes(path, "_variables", self._variables)
            backend.note_restore()
        return None

    def _check_deferred_restore(self, variables: dict[str, dict[str, Any]]):
        """Refuses the checkpoint whose restore waits for `variables`."""
        self._maybe_initialize_trackable()
        waiting = self._deferred_dependencies.get("_variables", ())
        if waiting:
            latest = max(waiting, key=lambda one: one.checkpoint.restore_uid)
            restore_checks.check_shapes(
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
