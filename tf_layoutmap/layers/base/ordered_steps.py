"""Steps of a layer that belong together by the order of their calls.

A TPU program contains the steps of a layer if the layer is called in
`strategy.run` of a `TPUStrategy`. A token of a lookup cannot leave the program
and return to it. A training step therefore has exactly one call: `enqueue` and
`dequeue` in the call of the layer, and `apply_gradients` when the model's
optimizer is applied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tf_layoutmap.embedding import tpu_program
from tf_layoutmap.embedding.table_access import LayerAccess
from tf_layoutmap.embedding.tpu_embedding import TPUEmbedding

# Function that stores the gradients of the activations, and returns their mark.
RecordGradients = Callable[[Sequence[tf.Tensor]], tf.Tensor]


class OrderedSteps:
    """The steps of one embedding in the programs of a TPU."""

    def __init__(self, embedding: TPUEmbedding, layer: str):
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
        # Maps each replica to the gradients of its latest call.
        self._gradients: dict[int, Sequence[tf.Tensor]] = {}

    def look_up(self, inputs: Any, weights: Any) -> Any:
        """Returns the activations of a forward-only step.

        Raises:
          RuntimeError: If the method is called outside of `strategy.run`.
        """
        self._access.require_replica("call")
        self._embedding.enqueue(
            inputs, weights, training=False, name=self._layer
        )
        return self._embedding.dequeue(name=self._layer)

    def start(
        self, inputs: Any, weights: Any
    ) -> tuple[RecordGradients, list[tf.Tensor]]:
        """Starts a training step.

        Returns:
          A function that stores the gradients of the activations, and the
          activations of each feature.
        """
        replica = self._access.require_replica("call")
        self._embedding.enqueue(inputs, weights, name=self._layer)
        activations = tf.nest.flatten(self._embedding.dequeue(name=self._layer))
        this_call = self._latest_call[replica] = object()

        def record_gradients(gradients):
            if this_call is not self._latest_call[replica]:
                raise RuntimeError(
                    f"Layer {self._layer!r} must be called once in a "
                    "training step on a TPU; pass the features of both calls "
                    "to one call, under separate names."
                )
            self._gradients[replica] = gradients
            return tf.ones([])

        return record_gradients, activations

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
        gradients = self._gradients.pop(
            self._access.require_replica("apply"), None
        )
        if gradients is None:
            raise RuntimeError(
                f"Layer {self._layer!r} has no gradients to apply; call it "
                "inside the tape, once per step."
            )
        self._embedding.apply_gradients(
            tf.nest.pack_sequence_as(
                self._access.feature_config,
                [gradient * factor for gradient in gradients],
            ),
            name=self._layer,
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
