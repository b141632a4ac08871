"""What saving and restoring ask of an embedding."""

from __future__ import annotations

from typing import Any

from tf_layoutmap.embedding import restore_check
from tf_layoutmap.embedding.embedding_state import EmbeddingState


class CheckpointHooks:
    """Methods of `TPUEmbedding` that TensorFlow calls by their names."""

    _state: EmbeddingState
    _variables: dict[str, dict[str, Any]]

    def _trackable_children(self, save_type="checkpoint", **kwargs):
        # Whatever is saved asks for this first.
        if hasattr(self, "_state"):
            if self._state.backend.is_on_tpu:
                self._state.backend.sync.note_walk()
            else:
                self._state.flush_eagerly()
        return super()._trackable_children(save_type, **kwargs)

    def _checkpoint_adapter(self, path):
        # A restore asks this before it writes anything: the one moment to
        # refuse to change rows under a step whose gradients belong to the
        # old ones.
        backend = self._state.backend
        if not backend.is_built:
            return None
        if backend.is_on_tpu:
            backend.sync.note_restore()
        else:
            self._state.flush_eagerly()
            backend.check_idle()
        if path is not None:
            restore_check.check_shapes(path, "_variables", self._variables)
        return None

    def _load_variables(self):
        """Sends the variables to the TPU, as of TensorFlow's class.

        Its restore calls this, of a checkpoint that it has written.
        """
        if self._state.backend.is_on_tpu:
            self._state.backend.sync.load()

    def _retrieve_variables(self):
        """Brings the variables up to date, as of TensorFlow's class."""
        if self._state.backend.is_on_tpu:
            self._state.backend.sync.retrieve()
