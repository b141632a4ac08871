"""The model with its dense tower sharded over a mesh.

The tables stay in the host engine. The activations are copied to the mesh, and
the outputs of the tower are copied back to the host, where they are scored. The
gradients are copied along the same path in reverse.
"""

from __future__ import annotations

import keras
import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from completion.data.corpus import DataError
from completion.data.features import ECHOES, RECENT
from completion.model import (
    FEATURE_SPECS,
    Completer,
    optimizer_of,
    ranks_of,
    tower_of,
)
from completion.plan import Plan
from completion.scoring import (
    dense_ids,
    sampled_loss,
    score_all,
    split_input,
    tower_input,
)

dtensor = tf.experimental.dtensor

# Hidden units and their incoming and outgoing weights are sharded over "model".
# Both outputs of the tower are summed over the shards.
_LAYOUTS = {
    "hidden.kernel": (None, "model"),
    "hidden.bias": ("model",),
    "query.kernel": ("model", None),
    "gates.kernel": ("model", None),
}


class MeshCompleter(Completer):
    """A `Completer` whose tower is on a mesh.

    Attributes:
      layout_map: Layout map of the tower.
    """

    def __init__(self, plan: Plan, log_shares: np.ndarray, mesh):
        """Creates the tables and the tower.

        Args:
          plan: Tables and features.
          log_shares: `[num_rows]` log of each row's share of training.
          mesh: `dtensor.Mesh` with the axes "batch" and "model".

        Raises:
          DataError: The mesh does not divide the hidden layer evenly.
        """
        parts = mesh.dim_size("model")
        if plan.settings.hidden % parts:
            raise DataError(
                "The size of --mesh's axis model must divide the tower's "
                f"hidden layer of {plan.settings.hidden} units. Received: "
                f"{parts}."
            )
        self.layout_map = tlm.LayoutMap(mesh)
        for key, axes in _LAYOUTS.items():
            self.layout_map[key] = dtensor.Layout(
                [axis or dtensor.UNSHARDED for axis in axes], mesh
            )
        super().__init__(plan, log_shares)
        # Checkpoints contain a copy of the tower on the host, so that the
        # program can resume on another mesh or without a mesh.
        self._saved_tower = tower_of(plan)
        self._saved_optimizer = optimizer_of(plan, self._saved_tower)

    def saved_parts(self) -> dict[str, object]:
        """Returns the objects that a checkpoint contains, by name."""
        return {
            **super().saved_parts(),
            "tower": self._saved_tower,
            "optimizer": self._saved_optimizer,
        }

    def before_save(self) -> None:
        """Copies the weights from the mesh to the objects that are saved."""
        self._copy(self._on_mesh(), self._off_mesh())

    def after_restore(self) -> None:
        """Copies the restored weights to the mesh."""
        self._copy(self._off_mesh(), self._on_mesh())

    def _on_mesh(self):
        return [*self.tower.variables, *self.optimizer.variables]

    def _off_mesh(self):
        return [*self._saved_tower.variables, *self._saved_optimizer.variables]

    @staticmethod
    def _copy(sources, targets):
        for source, target in zip(sources, targets, strict=True):
            target.assign(source.numpy())

    def make_tower(self, plan: Plan) -> keras.Model:
        """Returns a tower on the mesh with the host's initial weights."""
        with tlm.layout_map_scope(self.layout_map):
            return tower_of(plan)

    def train_step(self, features, target, negatives, log_expected):
        """Trains the tables and the tower on one batch; returns the loss."""
        self._enqueue(features, target, negatives)
        activations = self._dequeue()
        seen = self._to_mesh(tower_input(activations, self.widths))
        # This tape records only the tower, whose activations stay on the mesh.
        with tf.GradientTape() as tape:
            tape.watch(seen)
            outputs = self._forward(seen)
        loss, gradients, table_gradients = self._score_and_differentiate(
            [tlm.layout.to_host(output) for output in outputs],
            activations,
            features,
            target,
            negatives,
            log_expected,
        )
        weights = self.tower.trainable_variables
        seen_gradient, tower_gradients = tape.gradient(
            outputs,
            (seen, [weight.value for weight in weights]),
            output_gradients=[self._to_mesh(g) for g in gradients],
        )
        self._apply_to_tower(tower_gradients)
        self._apply_to_tables(
            tlm.layout.to_host(seen_gradient), activations, table_gradients
        )
        self.step.assign_add(1)
        return loss

    @tf.function(
        input_signature=[FEATURE_SPECS, *[tf.TensorSpec([None], tf.int32)] * 2]
    )
    def _enqueue(self, features, target, negatives):
        # `enqueue` and `dequeue` are called in separate functions. A function
        # that called both, but not `apply_gradients`, would be a forward-only
        # step.
        self.embedding.enqueue(
            {**features, "target": target, "negatives": negatives}
        )

    @tf.function
    def _dequeue(self):
        return self.embedding.dequeue()

    @tf.function
    def _forward(self, seen):
        outputs = self.tower(seen, training=True)
        return [outputs["query"], outputs["gates"]]

    @tf.function(reduce_retracing=True)
    def _score_and_differentiate(
        self, outputs, activations, features, target, negatives, log_expected
    ):
        ids = {
            "target": target,
            "negatives": negatives,
            "recent": dense_ids(features["recent"], RECENT),
            "echo": dense_ids(features["echo"], ECHOES),
        }
        scored = {
            name: activations[name]
            for name in ("target", "recent", "negatives")
        }
        query, gates = outputs
        with tf.GradientTape() as tape:
            tape.watch([outputs, scored])
            loss = sampled_loss(
                {"query": query, "gates": gates},
                scored,
                ids,
                log_expected,
                self._log_shares,
            )
        return loss, *tape.gradient(loss, (outputs, scored))

    @tf.function(reduce_retracing=True)
    def _apply_to_tables(self, seen_gradient, activations, gradients):
        self.embedding.apply_gradients(
            {
                **gradients,
                **split_input(seen_gradient, activations, self.widths),
            }
        )

    @tf.function
    def _apply_to_tower(self, gradients):
        self.optimizer.apply(gradients, self.tower.trainable_variables)

    def scores(self, features):
        """Returns `[num_samples, num_rows]` scores of all rows."""
        outputs = self.tower.predict_on_batch(self._look_up_only(features))
        return self._score_all(outputs, features)

    @tf.function(input_signature=[FEATURE_SPECS])
    def _look_up_only(self, features):
        return tower_input(self.look_up_only(features), self.widths)

    @tf.function(reduce_retracing=True)
    def _score_all(self, outputs, features):
        return score_all(
            outputs,
            dense_ids(features["recent"], RECENT),
            dense_ids(features["echo"], ECHOES),
            self.candidates(),
            self._log_shares,
        )

    def ranks(self, features, target):
        """Returns the rank of each target in the format of `ranks_of`."""
        return ranks_of(self.scores(features), target)

    def complete(self, features, num_offers):
        """Returns the highest scores and their rows, in descending order."""
        return tf.math.top_k(self.scores(features), num_offers)

    def _to_mesh(self, value):
        mesh = self.layout_map.get_default_mesh()
        rank = value.shape.rank
        layout = (
            dtensor.Layout.replicated(mesh, rank)
            if value.shape[0] % mesh.dim_size("batch")
            else dtensor.Layout.batch_sharded(mesh, "batch", rank)
        )
        return tlm.layout.to_mesh(value, layout)
