"""The backend of `TPUEmbedding` for tables on the host beside a TPU.

`HostBackendOfTPU` runs the steps of a `TPUStrategy` on the host engine. The
engine looks up the rows of all replicas before the TPU program starts. The
activations are inputs of the program, the gradients are outputs, and the engine
applies the gradients after the program.

User programs call the methods of a step in the same places as for tables on a
TPU. Inside `strategy.run`, the methods create the ops of the engine around the
program that is being traced (see `embedding.tpu_program`). The program itself
contains no op of this package.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tf_layoutmap.embedding import inputs as embedding_inputs
from tf_layoutmap.embedding import steps as step_gradients
from tf_layoutmap.embedding import tpu_program
from tf_layoutmap.embedding.configs import config
from tf_layoutmap.embedding.host import batches
from tf_layoutmap.embedding.host.backend import HostBackend
from tf_layoutmap.embedding.tpu_program import ReplicatedProgram


class HostBackendOfTPU(HostBackend):
    """A backend whose tables are on the host, and whose replicas are a TPU's.

    On an emulated TPU, each core is traced separately, and its program may
    contain ops of the engine. Steps are then the steps of `HostBackend`.
    """

    # A token and a mark of a lookup would have to return from the host to the
    # running program. Steps are therefore identified by their order.
    has_ordered_steps: ClassVar[bool] = True

    def __init__(self, *args: Any, **kwargs: Any):
        """Stores the arguments of `HostBackend`."""
        super().__init__(*args, **kwargs)
        # Programs that have already returned gradients of this embedding.
        self._applied: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def mark_shape(self) -> tuple[int, ...]:
        """Shape `()`, because steps are identified by their order."""
        return ()

    @property
    def has_row_steps(self) -> bool:
        """Returns False, because a program cannot hold rows of the engine."""
        return False

    def is_in_program(self) -> bool:
        """Whether the caller is being traced as part of a TPU program."""
        try:
            return tpu_program.is_in_tpu_program()
        except RuntimeError:  # In control flow.
            return False

    def read(self, features: Any, weights: Any, device: str | None) -> Any:
        """Checks the input of a step; see `TPUEmbedding.enqueue`."""
        program = self._program("enqueue")
        if program is None:
            return super().read(features, weights, device)
        if device is not None:
            raise ValueError(
                "Argument `device` must be None inside `strategy.run`. "
                f"Received: device={device!r}."
            )
        by_replica = [
            self._by_replica(program, values) for values in (features, weights)
        ]
        with program.on_host():
            return batches.Batch(
                [
                    (replica, self._reader.read_features(*step))
                    for replica, step in enumerate(zip(*by_replica))
                ]
            )

    def _by_replica(self, program: ReplicatedProgram, values: Any) -> list[Any]:
        """Returns the arguments of each replica, as tensors on the host."""
        if values is None:
            return [None] * program.num_replicas
        by_leaf = []
        for path, leaf in embedding_inputs.flatten_with_paths(values):
            parts = tf.nest.flatten(leaf, expand_composites=True)
            on_host = zip(
                *(program.values_on_host(path, part) for part in parts)
            )
            with program.on_host():
                by_leaf.append(
                    [
                        tf.nest.pack_sequence_as(
                            leaf, list(tensors), expand_composites=True
                        )
                        for tensors in on_host
                    ]
                )
        return [
            tf.nest.pack_sequence_as(values, list(leaves))
            for leaves in zip(*by_leaf)
        ]

    def enqueue(self, batch: Any, training: Any, name: str | None) -> None:
        """Enqueues a batch that `read` returned."""
        program = self._program("enqueue")
        if program is None:
            super().enqueue(batch, training, name)
            return
        if tf.is_tensor(training) or isinstance(training, tf.Variable):
            training = program.values_on_host(
                "training", tf.convert_to_tensor(training)
            )[0]
        with program.on_host():
            super().enqueue(batch, training, name)

    def dequeue(self, name: str | None) -> list[tf.Tensor]:
        """Returns the activations of the oldest step, one per feature."""
        program = self._program("dequeue")
        if program is None:
            return super().dequeue(name)
        if program.context in self._applied:
            raise RuntimeError(
                "`dequeue` must not follow `apply_gradients` in the function "
                "that is passed to `strategy.run`: the activations of a TPU "
                "program are known before it starts, and its gradients after "
                "its end. Call `strategy.run` once per step. Received: "
                f"a second step of one call, with name={name!r}."
            )
        self._modes.dequeued(name)
        by_replica = []
        with program.on_host():
            for replica in range(program.num_replicas):
                activations = self._shapes.shape_all_activations(
                    self._started.dequeue(replica)
                )
                self._shapes.record_dequeued(replica, activations)
                by_replica.append(activations)
            if self._is_pipelined:
                self._work_during_program(program.num_replicas)
        return [program.to_program(values) for values in zip(*by_replica)]

    def _work_during_program(self, num_replicas: int) -> None:
        """Creates ops that run on the host while the program runs.

        The ops apply the update of the previous step, and look up the next
        step, if it is enqueued. Neither depends on the gradients of the current
        step, which the next lookup does not see.
        """
        self._started.apply_pending()
        for replica in range(num_replicas):
            self._host_engine.prefetch(replica)

    def apply(self, gradients: Sequence[Any], name: str | None) -> None:
        """Applies the gradients of the last dequeued step."""
        program = self._program("apply_gradients")
        if program is None:
            super().apply(gradients, name)
            return
        self._modes.applied(name)
        self._applied.add(program.context)
        replica_gradients = [
            None
            if gradient is None
            else program.to_host(self._shapes.flat_gradient(index, gradient))
            for index, gradient in enumerate(gradients)
        ]
        current_rate = self._rates_of(program)
        with program.on_host():
            hyperparameters = step_gradients.hyperparameters(
                self._spec.tables, current_rate
            )
            for replica in range(program.num_replicas):
                self._started.apply(
                    replica,
                    [
                        self._shapes.flat_zeros(replica, index)
                        if gradient is None
                        else gradient[replica]
                        for index, gradient in enumerate(replica_gradients)
                    ],
                    hyperparameters,
                )

    def _rates_of(
        self, program: ReplicatedProgram
    ) -> Callable[[Any, config.TableSpec], tf.Tensor]:
        """Returns a function for `steps.hyperparameters`.

        A learning rate is a part of the program, like all other code of the
        user, so that it can read variables on the TPU. Rates that read a
        variable on the host run on the host.
        """
        rates: list[tuple[Any, tf.Tensor]] = []
        for table in self._spec.tables:
            optimizer = table.optimizer
            if optimizer is None or not optimizer.has_dynamic_rate:
                continue
            rate = optimizer.learning_rate
            if any(other == rate for other, _ in rates):
                continue
            if getattr(rate, "is_on_host", False):
                with program.on_host():
                    value = step_gradients.current_learning_rate(rate, table)
            else:
                value = program.to_host(
                    step_gradients.current_learning_rate(rate, table)
                )[0]
            rates.append((rate, value))
        return lambda rate, _: next(
            value for other, value in rates if other == rate
        )

    def _program(self, method: str) -> ReplicatedProgram | None:
        return tpu_program.replicated_program(
            self._replicas.num_replicas, method
        )
