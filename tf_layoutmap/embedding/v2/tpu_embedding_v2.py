"""`TPUEmbeddingV2` on machines without SparseCores.

The steps run on the backends of `TPUEmbedding`. A lookup is identified by a
token of the engine, so that a step can contain several lookups. If the backend
identifies the steps by their order, each lookup is a step of its queue.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Mapping
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    NamedTuple,
    Self,
    Unpack,
    cast,
)

import tensorflow as tf

from tf_layoutmap._core import placeholders, tf_private
from tf_layoutmap._core.strategies import HOST
from tf_layoutmap.embedding import backend as embedding_backend
from tf_layoutmap.embedding import inputs, packing, steps
from tf_layoutmap.embedding.tpu_embedding import EmbeddingBase, EmbeddingOptions
from tf_layoutmap.embedding.v2 import samples

if TYPE_CHECKING:
    from tf_layoutmap._core.types import FeatureConfigs, Features
    from tf_layoutmap.embedding.configs import optimizer_specs

# Without this decorator, each trace would run AutoGraph on the methods of this
# module and on all functions that they call.
_no_autograph = tf.autograph.experimental.do_not_convert


class Enqueued(NamedTuple):
    """A batch that `enqueue` returned, and that `dequeue` looks up."""

    features: Any
    weights: Any


class PreservedOutputs(NamedTuple):
    """The values of a lookup that `apply_gradients` requires.

    Attributes:
      lookup: The lookup, as the backend represents it: the name of a step if
        the backend identifies steps by their order.
      activations: The activations of each feature.
    """

    lookup: Any
    activations: list[tf.Tensor]


@dataclasses.dataclass
class _ProgramSteps:
    """Lookups of a TPU program.

    Attributes:
      num_lookups: Number of calls of `embedding_lookup`.
      is_trained: Whether `apply_gradients` was called.
    """

    num_lookups: int = 0
    is_trained: bool = False

    def check(self) -> None:
        """Checks that the gradients of the program belong to its only lookup.

        Raises:
          NotImplementedError: If the program has other lookups.
        """
        if self.is_trained and self.num_lookups > 1:
            raise NotImplementedError(
                "A program of a TPU without SparseCores must call "
                "`embedding_lookup` only once if it calls `apply_gradients`, "
                "because the TPU finds the lookup of gradients by its order. "
                "Look up all features in one call, or call `strategy.run` for "
                f"each lookup. Received: {self.num_lookups} lookups."
            )


class TPUEmbeddingV2(EmbeddingBase):
    """Embedding tables for TPUs with SparseCores, and for all other machines.

    The interface is the same as in
    `tf.tpu.experimental.embedding.TPUEmbeddingV2`, which requires a TPU v5p or
    v6e. Under `TPUStrategy` with SparseCores, an object of this class behaves
    like an object of TensorFlow's class, and runs the same operations. Ids that
    are not rows of their table raise an error, and settings that TensorFlow's
    class ignores raise an error. On all other machines, the steps run as in
    `tlm.TPUEmbedding`, under the same strategies and with bitwise identical
    results: on the host engine, on parameter servers, or on a TPU v2 to v4.

    In a step, each replica calls `embedding_lookup`, and then `apply_gradients`
    with the preserved outputs of the lookup. Each call of `apply_gradients` is
    one update, which sums the gradients of all replicas. A step may contain
    several lookups, except under `TPUStrategy` without SparseCores, where a
    program that applies gradients contains one lookup. A lookup does not
    require gradients. Gradients can be applied to the 64 newest lookups, and an
    update of a lookup discards lookups that are more than 8 lookups older.

    >>> import tensorflow as tf
    >>> import tf_layoutmap as tlm
    >>> tpu = tf.tpu.experimental.embedding
    >>> words = tpu.TableConfig(4, 2, tf.ones, combiner="sum", name="words")
    >>> embedding = tlm.TPUEmbeddingV2(
    ...     {"title": tpu.FeatureConfig(words, output_shape=[2])},
    ...     tpu.SGD(learning_rate=0.5))
    >>> activations, preserved = embedding.embedding_lookup(
    ...     {"title": tf.ragged.constant([[0, 2], [2]])})
    >>> activations["title"].numpy().tolist()
    [[2.0, 2.0], [1.0, 1.0]]
    >>> embedding.apply_gradients({"title": tf.ones([2, 2])}, preserved)
    >>> embedding.embedding_tables[words].numpy()[:, 0].tolist()
    [0.5, 1.0, 0.0, 1.0]

    `tf.train.Checkpoint(embedding=embedding)` saves tables and slot variables.
    """

    # Limits of a stack without limits in a `SparseCoreEmbeddingConfig`, as in
    # TensorFlow's class.
    DEFAULT_MAX_IDS_PER_TABLE: ClassVar[int] = 256
    DEFAULT_MAX_UNIQUE_IDS_PER_TABLE: ClassVar[int] = 256

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Selects the class for SparseCores if the strategy has SparseCores."""
        if cls is TPUEmbeddingV2 and _selects_sparse_cores(kwargs):
            cls = cast("type[Self]", _class_on_sparse_cores())
        return super().__new__(cls)

    def __init__(
        self,
        feature_config: FeatureConfigs,
        optimizer: optimizer_specs.TableOptimizer | None = None,
        pipeline_execution_with_tensor_core: bool = False,
        sparse_core_embedding_config: (
            tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig | None
        ) = None,
        **options: Unpack[EmbeddingOptions],
    ):
        """Reads and checks the configuration.

        Args:
          feature_config: Nested structure of
            `tf.tpu.experimental.embedding.FeatureConfig`. SparseCores require
            the `output_shape` of each feature, which contains the number of
            samples of a replica. If a feature has an `output_shape`, each id of
            a dense input is a sample. Otherwise, the last dimension of a dense
            input contains the ids of a sample, as in `tlm.TPUEmbedding`.
          optimizer: Optimizer of all tables whose `TableConfig` has no
            optimizer. Pass None if the tables are only used for serving.
          pipeline_execution_with_tensor_core: Whether a lookup runs before the
            update of the previous step. Without SparseCores, a program must
            then apply the gradients of a lookup before the next lookup, except
            in functions that only look up.
          sparse_core_embedding_config: A
            `tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig`. It has no
            effect without SparseCores.
          **options: The keyword arguments of `tlm.TPUEmbedding`. SparseCores
            support only the default values, and `engine="host"`, which selects
            tables on the host.

        Raises:
          TypeError, ValueError, NotImplementedError: As for `tlm.TPUEmbedding`.
            With SparseCores, also if TensorFlow's class ignores a setting.
        """
        if _selects_sparse_cores(options):
            raise NotImplementedError(
                "A subclass of TPUEmbeddingV2 does not support SparseCores. "
                'Pass engine="host" for tables on the host. Received: '
                f"{type(self)}."
            )
        del sparse_core_embedding_config
        super().__init__(
            feature_config,
            optimizer,
            pipeline_execution_with_tensor_core,
            **options,
        )
        # Steps of a queue are identified by names, which are unique.
        self._has_queue = (
            pipeline_execution_with_tensor_core
            or self._state.backend.has_ordered_steps
        )
        self._num_lookups = 0
        # Lookups of the TPU programs that are being traced.
        self._of_programs: weakref.WeakKeyDictionary[object, _ProgramSteps] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def variables(self) -> dict[str, dict[str, Any]]:  # pyright: ignore[reportIncompatibleMethodOverride] As in TensorFlow's class.
        """Dict from the name of each table to its variables by name.

        The variable `"parameters"` contains the rows. All other variables are
        slot variables.

        Raises:
          RuntimeError: See `embedding_tables`.
        """
        self._update_variables("variables")
        return {
            spec.name: dict(self._variables[spec.name])
            for spec in self._state.spec.tables
        }

    def get_embedding_tables(self) -> dict[str, tf.Tensor]:
        """Returns the rows by table name, with and without SparseCores.

        Each value is a copy of the full table as one tensor `[num_rows, dim]`.
        If the tables are sharded over processes, all processes must call this
        method together.

        Raises:
          RuntimeError: See `embedding_tables`.
        """
        is_sharded = self._state.backend.is_sharded
        return {
            spec.name: tf.convert_to_tensor(
                rows.numpy() if is_sharded else rows
            )
            for spec, rows in zip(
                self._state.spec.tables, self.embedding_tables.values()
            )
        }

    @staticmethod
    def compute_sparse_core_stats(
        features: Features,
        feature_config: FeatureConfigs,
        num_tpu_chips: int,
        num_sc_per_chip: int = 4,
        optimizer: optimizer_specs.TableOptimizer | None = None,
        sparse_core_embedding_config: (
            tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig | None
        ) = None,
    ) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
        """Returns the id limits that a batch of one replica requires.

        The numbers are computed without a TPU. `tlm.inspect_ids` computes the
        limits of a dataset.

        >>> import tensorflow as tf
        >>> import tf_layoutmap as tlm
        >>> tpu = tf.tpu.experimental.embedding
        >>> words = tpu.TableConfig(64, 8, name="words")
        >>> max_ids, max_unique_ids = (
        ...     tlm.TPUEmbeddingV2.compute_sparse_core_stats(
        ...         tf.constant([4, 4, 0, 4, 5, 5, 6, 6]),
        ...         tpu.FeatureConfig(words, output_shape=[8]),
        ...         num_tpu_chips=1))
        >>> int(max_ids["words"]), int(max_unique_ids["words"])
        (2, 2)

        Args:
          features: Ids of a replica, outside of a `tf.function`; as for
            `embedding_lookup`.
          feature_config: As for the constructor.
          num_tpu_chips: Number of chips, which is the number of replicas.
          num_sc_per_chip: Number of SparseCores of each chip.
          optimizer: As for the constructor.
          sparse_core_embedding_config: None, or the config that determines
            whether tables are stacked.

        Returns:
          `max_ids_per_table` and `max_unique_ids_per_table` of a
          `SparseCoreEmbeddingConfig`: int32 scalars by the names of the stacks.

        Raises:
          TypeError, ValueError: As for `tlm.inspect_ids`.
        """
        # This module is imported here, because only this method requires it.
        from tf_layoutmap.embedding.inspection import inspect_ids

        report = inspect_ids.inspect_ids(
            [features],
            feature_config,
            optimizer=optimizer,
            sparse_cores=inspect_ids.SparseCores(
                num_tpu_chips * num_sc_per_chip,
                num_sc_per_chip,
                replicas_per_batch=1,
                table_stacking=(
                    sparse_core_embedding_config is None
                    or not sparse_core_embedding_config.disable_table_stacking
                ),
            ),
        )
        limits = report.sparse_core_limits()
        max_ids, max_unique_ids = (
            {name: tf.constant(limit) for name, limit in by_stack.items()}
            for by_stack in (
                limits.max_ids_per_table,
                limits.max_unique_ids_per_table,
            )
        )
        return max_ids, max_unique_ids

    @_no_autograph
    def embedding_lookup(
        self, features: Features, weights: Features | None = None
    ) -> tuple[Any, Any]:
        """Looks up the ids in `features`.

        Args:
          features: Integer ids in the structure of `feature_config`: a
            `tf.Tensor`, a row-major `tf.SparseTensor` or a `tf.RaggedTensor`
            for each feature.
          weights: None, or the same structure in which each leaf is None or the
            weights of the ids, in the form of the ids.

        Returns:
          A tuple of activations and preserved outputs. The activations are
          float32 tensors `[*output_shape, dim]` in the structure of
          `feature_config`. The preserved outputs are an argument of
          `apply_gradients`.

        Raises:
          TypeError: If the structure of `features` or `weights` has other types
            than `feature_config`, or if ids are not integers.
          ValueError: If a structure, size or rank does not match
            `feature_config`, or if weights do not match their ids.
          RuntimeError: If there are several replicas, and the call is outside
            `strategy.run`.
          NotImplementedError: If a program of a TPU without SparseCores calls
            `apply_gradients`, and contains several lookups.
          tf.errors.InvalidArgumentError: If ids, splits or weights are invalid.
            The message names the feature, the sample, the id and the table.
        """
        state = self._state
        state.check_can_step("embedding_lookup")
        backend = state.backend
        features, weights = self._with_samples(features, weights)
        if self._has_queue:
            program_steps = self._steps_of_program()
            program_steps.num_lookups += 1
            program_steps.check()
            self._num_lookups += 1
            lookup: Any = f"lookup_{self._num_lookups}"
            batch = backend.read(features, weights, None)
            if not backend.is_built:
                self._create()
            is_trained = all(
                table.optimizer is not None for table in state.spec.tables
            )
            backend.enqueue(batch, is_trained, lookup)
            activations = backend.dequeue(lookup)
        else:
            if not backend.is_built:
                self._create()
            lookup, activations = cast(
                embedding_backend.EngineBackend, backend
            ).open(features, weights)
        return (
            tf.nest.pack_sequence_as(state.feature_config, activations),
            PreservedOutputs(lookup, activations),
        )

    def _steps_of_program(self) -> _ProgramSteps:
        """Returns the lookups of the TPU program that is being traced."""
        # Each replica has a new context in each call of `strategy.run`.
        program = tf.distribute.get_replica_context()
        if program is None or not self._state.backend.has_ordered_steps:
            return _ProgramSteps()
        return self._of_programs.setdefault(program, _ProgramSteps())

    def _with_samples(self, features: Any, weights: Any) -> tuple[Any, Any]:
        """Returns inputs that are valid inputs of `TPUEmbedding`."""
        config = self._state.feature_config
        # The inputs of a TPU program must be unchanged arguments.
        if self._state.backend.is_on_tpu or packing.is_packed(features, config):
            return features, weights
        flat_weights = steps.check_structures(features, weights, config)
        # A program of a TPU copies the conversion to the host.
        with (
            contextlib.nullcontext()
            if self._state.backend.has_ordered_steps
            else tf.device(HOST)
        ):
            flat, flat_weights = zip(
                *(
                    samples.with_samples(*arguments)
                    for arguments in zip(
                        self._state.spec.features,
                        tf.nest.flatten(features),
                        flat_weights,
                    )
                )
            )
        return (
            tf.nest.pack_sequence_as(config, flat),
            None
            if weights is None
            else tf.nest.pack_sequence_as(config, flat_weights),
        )

    @_no_autograph
    def __call__(
        self, features: Features, weights: Features | None = None
    ) -> Any:
        """Looks up the ids in `features`; see `embedding_lookup`."""
        stand_in = placeholders.placeholder_of(self)
        if stand_in is not None:
            return stand_in(features, weights)
        return self.embedding_lookup(features, weights)

    def enqueue(
        self,
        features: Features,
        weights: Features | None = None,
        device: str | None = None,
    ) -> Any:
        """Returns a batch that `dequeue` looks up.

        Args:
          features: As for `embedding_lookup`.
          weights: As for `embedding_lookup`.
          device: None, or the device of the replica that calls `dequeue`.

        Raises:
          TypeError, ValueError: If the structure of `features` or `weights`
            differs from `feature_config`, or if `device` is not a device of the
            strategy.
        """
        config = self._state.feature_config
        if not packing.is_packed(features, config):
            steps.check_structures(features, weights, config)
        if device is not None:
            self._state.replicas.of_device(device)
        return Enqueued(features, weights)

    def dequeue(self, partitioned_tensors: Any) -> tuple[Any, Any]:
        """Looks up a batch; see `embedding_lookup`.

        Args:
          partitioned_tensors: Return value of `enqueue`.

        Raises:
          TypeError: If the argument is not a return value of `enqueue`.
        """
        if not isinstance(partitioned_tensors, Enqueued):
            raise TypeError(
                "Argument `partitioned_tensors` must be a return value of "
                f"`enqueue`. Received: {type(partitioned_tensors)}."
            )
        return self.embedding_lookup(*partitioned_tensors)

    @_no_autograph
    def apply_gradients(
        self, gradients: Features, preserved_outputs: Any
    ) -> None:
        """Updates the tables with the gradients of a lookup.

        The update is applied after all replicas have called `apply_gradients`.

        Args:
          gradients: Float32 gradients of the activations, in the structure of
            `feature_config`. A gradient of None is replaced by zeros, and a
            warning is logged.
          preserved_outputs: Second return value of `embedding_lookup`.

        Raises:
          TypeError: If `gradients` has other types than `feature_config`, or if
            `preserved_outputs` is not a return value of `embedding_lookup`.
          ValueError: If `gradients` has another size than `feature_config`, or
            if a gradient is not a tensor or has another dtype or shape.
          RuntimeError: If the embedding is not built, if a table has no
            optimizer, or if there are several replicas and the call is outside
            `strategy.run`, or in a loop or a `tf.function` in a replica.
          NotImplementedError: See `embedding_lookup`.
          tf.errors.FailedPreconditionError: If the lookup was discarded.
          tf.errors.InvalidArgumentError: If a learning rate is negative or not
            finite. The message names the table.
        """
        state = self._state
        state.check_built("apply_gradients")
        state.check_optimizers(
            "`apply_gradients`", "only call `embedding_lookup`"
        )
        inputs.check_same_structure(
            gradients, "gradients", state.feature_config, "feature_config"
        )
        if not isinstance(preserved_outputs, PreservedOutputs):
            raise TypeError(
                "Argument `preserved_outputs` must be the second return value "
                "of `embedding_lookup`. Received: "
                f"{type(preserved_outputs)}."
            )
        state.check_not_in_loop_of_replica()
        lookup, activations = preserved_outputs
        flat = tf.nest.flatten(gradients)
        if self._has_queue:
            program_steps = self._steps_of_program()
            program_steps.is_trained = True
            program_steps.check()
            state.backend.apply(flat, lookup)
            return
        flat = [
            steps.zero_gradient(feature, _shape_of(activation))
            if gradient is None
            else gradient
            for feature, gradient, activation in zip(
                state.spec.features, flat, activations
            )
        ]
        backend = cast(embedding_backend.EngineBackend, state.backend)
        backend.apply_followed(backend.follow(lookup, flat))
        if state.replicas.num_local > 1:
            # A later lookup or update of a replica must not run before the
            # update of all replicas.
            context: Any = tf.distribute.get_replica_context()
            context.merge_call(lambda strategy: None)


@functools.cache
def _class_on_sparse_cores() -> type[TPUEmbeddingV2]:
    from tf_layoutmap.embedding.checkpoints.restoring import SparseCoreRestore
    from tf_layoutmap.embedding.v2.sparse_core import SparseCoreMethods

    class SparseCoreEmbedding(
        SparseCoreMethods,
        SparseCoreRestore,
        tf_private.TPUEmbeddingV2,
        TPUEmbeddingV2,
    ):
        """Embedding tables on the SparseCores of a TPU."""

        # TensorFlow's method has no placeholder for `tlm.export`.
        __call__ = TPUEmbeddingV2.__call__
        # TensorFlow's method counts only the samples of the first feature.
        compute_sparse_core_stats = staticmethod(
            TPUEmbeddingV2.compute_sparse_core_stats
        )

    return SparseCoreEmbedding


def _selects_sparse_cores(options: Mapping[str, Any]) -> bool:
    """Returns whether the tables are on the SparseCores of a TPU."""
    strategy = tf.distribute.get_strategy()
    return (
        options.get("engine", "auto") != "host"
        and embedding_backend.has_sparse_cores(strategy) is not False
    )


def _shape_of(activation: tf.Tensor) -> list[Any]:
    """Returns the shape of activations as ints and scalar tensors."""
    shape: list[Any] = activation.shape.as_list()
    if shape[0] is None:
        shape[0] = tf.shape(activation)[0]
    return shape
