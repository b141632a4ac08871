"""Steps of a layer that belong together by the order of their calls.

A TPU program contains the steps of a layer if the layer is called in
`strategy.run` of a `TPUStrategy`. A token of a lookup cannot leave the program
and return to it. A training step therefore has exactly one call: `enqueue` and
`dequeue` in the call of the layer, and `apply_gradients` when the model's
optimizer is applied. On SparseCores, `embedding_lookup` replaces `enqueue` and
`dequeue`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap.embedding import tpu_program
from tf_layoutmap.embedding.table_access import LayerAccess
from tf_layoutmap.embedding.tpu_embedding import EmbeddingBase, TPUEmbedding
from tf_layoutmap.embedding.v2.tpu_embedding_v2 import TPUEmbeddingV2

# Function that stores the gradients of the activations, and returns their mark.
RecordGradients = Callable[[Sequence[tf.Tensor]], tf.Tensor]


class OrderedSteps:
    """The steps of one embedding in the programs of a TPU."""

    def __init__(self, embedding: EmbeddingBase, layer: str):
        """Creates the record of a layer's calls.

        Args:
          embedding: Embedding of the layer.
          layer: Name of the layer, for messages and step names.
        """
        self._embedding = embedding
        self._access = LayerAccess(embedding)
        self._layer = layer
        # Maps each replica to its latest call.
        self._latest_call: dict[int, object] = {}
        # Maps each replica to the gradients of its latest call, and to the
        # function that applies them.
        self._gradients: dict[
            int, tuple[Sequence[tf.Tensor], Callable[[Any], None]]
        ] = {}

    def _begin(
        self, inputs: Any, weights: Any, *, training: bool
    ) -> tuple[Any, Callable[[Any], None]]:
        """Returns the activations, and a function that applies gradients."""
        embedding = self._embedding
        if isinstance(embedding, TPUEmbeddingV2):
            activations, preserved = embedding.embedding_lookup(inputs, weights)
            return activations, functools.partial(
                embedding.apply_gradients, preserved_outputs=preserved
            )
        assert isinstance(embedding, TPUEmbedding)
        embedding.enqueue(inputs, weights, training=training, name=self._layer)
        return embedding.dequeue(name=self._layer), functools.partial(
            embedding.apply_gradients, name=self._layer
        )

    def look_up(self, inputs: Any, weights: Any) -> Any:
        """Returns the activations of a forward-only step.

        Raises:
          RuntimeError: If the method is called outside of `strategy.run`.
        """
        self._access.require_replica("call")
        return self._begin(inputs, weights, training=False)[0]

    def start(
        self, inputs: Any, weights: Any
    ) -> tuple[RecordGradients, list[tf.Tensor]]:
        """Starts a training step.

        Returns:
          A function that stores the gradients of the activations, and the
          activations of each feature.
        """
        replica = self._access.require_replica("call")
        activations, apply = self._begin(inputs, weights, training=True)
        this_call = self._latest_call[replica] = object()

        def record_gradients(gradients):
            if this_call is not self._latest_call[replica]:
                raise RuntimeError(
                    f"Layer {self._layer!r} must be called once in a "
                    "training step on a TPU; pass the features of both calls "
                    "to one call, under separate names."
                )
            self._gradients[replica] = gradients, apply
            return tf.ones([])

        return record_gradients, tf.nest.flatten(activations)

    def apply(self, factor: tf.Tensor) -> None:
        """Applies the gradients of the last call, multiplied by `factor`.

        Raises:
          RuntimeError: If no gradients were stored.
          ValueError: If the method is called in a branch that is not executed
            in every step.
        """
        if not self._access.is_in_program():
            raise ValueError(
                "The model's optimizer must be applied in every step on a "
                "TPU, which waits for the gradients. A loss scale, which may "
                "skip a step, is not supported; use the policy "
                f'"mixed_bfloat16" (layer {self._layer!r}).'
            )
        recorded = self._gradients.pop(
            self._access.require_replica("apply"), None
        )
        if recorded is None:
            raise RuntimeError(
                f"Layer {self._layer!r} has no gradients to apply; call it "
                "inside the tape, once per step."
            )
        gradients, apply = recorded
        apply(
            tf.nest.pack_sequence_as(
                self._access.feature_config,
                [gradient * factor for gradient in gradients],
            )
        )


def is_in_program() -> bool:
    """Returns whether a layer is called in a TPU program.

    Raises:
      RuntimeError: If the caller is in control flow or in a separate
        `tf.function` inside the TPU program.
    """
    return not tf.executing_eagerly() and tpu_program.is_in_tpu_program("call")


def on_host() -> contextlib.AbstractContextManager[None]:
    """Returns a scope whose ops are not part of a TPU program."""
    return tpu_program.on_host()
