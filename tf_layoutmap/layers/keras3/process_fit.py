"""`fit`, `evaluate` and `predict` of Keras 3 in several processes.

Under `MultiWorkerMirroredStrategy`, two functions of Keras 3.15 raise an error.
Before the first step, Keras computes the mean of the batches of all replicas
outside of a `tf.function`, and after each step, Keras reduces axis 0 of the
metrics, which are scalars. A third function shuffles arrays in a different
order in each process, so that the processes do not train on all samples. A
fourth function runs several steps per execution in a loop, in which TensorFlow
does not support the collectives of tables. The functions of this module replace
these functions. All other strategies use the functions of Keras.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

from tf_layoutmap._core import (
    keras_private,
    patches,
    strategies,
    tf_private,
    user_warnings,
)
from tf_layoutmap.embedding import processes


def enable_in_processes() -> None:
    """Installs the patches if the current strategy has several processes."""
    if strategies.has_processes(tf.distribute.get_strategy()):
        patches.ensure("keras3_processes")


def build_from_specs(
    original: Any, model: Any, iterator: Any = None, data_batch: Any = None
) -> None:
    """Builds a model with the shapes and the dtypes of a batch.

    The function replaces `_maybe_symbolic_build` of Keras' trainer. Keras reads
    a batch. A Python generator would not yield this batch again.

    Args:
      original: The function of Keras.
      model: The model.
      iterator: Epoch iterator of Keras, or None.
      data_batch: Batch with which the model is built if `iterator` is None.
    """
    strategy = model.distribute_strategy
    if iterator is not None and strategies.has_processes(strategy):
        specs = tf.nest.map_structure(
            tf_private.spec_of_first_replica,
            keras_private.distributed_dataset(iterator).element_spec,
        )
        if all(map(_has_known_shape, tf.nest.flatten(specs))):
            iterator, data_batch = None, specs
        else:
            iterator = _local_batches(iterator, strategy)
    original(model, iterator=iterator, data_batch=data_batch)


def _has_known_shape(spec: Any) -> bool:
    """Returns whether all sizes except the number of samples are known."""
    return (
        isinstance(spec, tf.TensorSpec)
        and spec.shape.rank is not None
        and spec.shape[1:].is_fully_defined()
    )


def _local_batches(
    epoch: Any, strategy: tf.distribute.Strategy
) -> Iterator[tuple[Any, Any, Iterator[Any]]]:
    """Yields the steps of an epoch with the batches of one local replica."""

    def first(value: Any) -> Any:
        return strategy.experimental_local_results(value)[0]

    for begin, end, batches in epoch:
        yield (
            begin,
            end,
            (tf.nest.map_structure(first, batch) for batch in batches),
        )


def reduce_metrics(
    original: Any, values: Any, strategy: Any, reduction: Any
) -> Any:
    """Returns the mean of the metrics over the replicas of all processes.

    The function replaces `reduce_per_replica` of Keras' trainer. Keras averages
    axis 0 of each metric in addition to the replicas.

    Args:
      original: The function of Keras.
      values: Nested structure of tensors or values per replica.
      strategy: Strategy of the model.
      reduction: Reduction of Keras. `"auto"` and `"mean"` are means over the
        replicas; other reductions call `original`.
    """
    if reduction not in ("auto", "mean") or (
        not strategies.has_processes(strategy)
    ):
        return original(values, strategy, reduction)
    return keras.tree.map_structure(
        lambda value: strategy.reduce("MEAN", value, axis=None), values
    )


class _OneStepModel:
    """A model whose executions have one step, for Keras' `_make_function`."""

    steps_per_execution = 1

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def make_function(original: Any, model: Any, step_function: Any) -> Any:
    """Returns a function that runs the steps of one execution.

    The function replaces `_make_function` of Keras' trainer. Keras runs the
    steps of an execution in a TensorFlow loop. In a loop, TensorFlow uses the
    same key for the collectives of all steps, but these collectives can have
    different shapes. This function calls a `tf.function` for each step.

    Args:
      original: The function of Keras.
      model: The model.
      step_function: Function that runs a step of one replica.
    """
    num_steps = model.steps_per_execution
    if num_steps == 1 or not strategies.has_processes(
        model.distribute_strategy
    ):
        return original(model, step_function)

    def step_of_batch(data: Any) -> Any:
        # At the end of an epoch, the last call has no batch and fails. Without
        # this dependency, ops that do not use the batch would run, for example
        # the increment of the optimizer's `iterations`.
        batch = [
            tensor
            for tensor in tf.nest.flatten(data, expand_composites=True)
            if tf.is_tensor(tensor)
        ]
        with tf.control_dependencies(batch):
            return step_function(data)

    one_step = original(_OneStepModel(model), step_of_batch)

    def run_steps(iterator: Any) -> Any:
        outputs = one_step(iterator)
        for _ in range(num_steps - 1):
            try:
                outputs = one_step(iterator)
            except (StopIteration, tf.errors.OutOfRangeError):
                # The last execution of an epoch can have fewer steps.
                break
        return outputs

    return run_steps


def create_epochs(
    original: Any,
    epochs: Any,
    distribute_strategy: Any = None,
    *args: Any,
    **options: Any,
) -> None:
    """Creates batches that have the same order in all processes.

    The function replaces the constructor of Keras' epoch iterator. Each process
    selects its part of each batch, so all processes must have the same batches.

    Args:
      original: The function of Keras.
      epochs: Epoch iterator of Keras.
      distribute_strategy: Strategy of the model.
      *args: Positional arguments, which Keras does not use.
      **options: Other arguments of the constructor.

    Raises:
      ValueError: If `x` is a `keras.utils.PyDataset` that `fit` shuffles.
    """
    if strategies.has_processes(distribute_strategy):
        group = processes.of_strategy(distribute_strategy)
        x, shuffle = options.get("x"), options.get("shuffle", False)
        if isinstance(x, tf.data.Dataset):
            warn_of_random_order(group, x)
        elif shuffle and isinstance(x, keras.utils.PyDataset):
            raise ValueError(
                "Argument `shuffle` must be False under "
                "MultiWorkerMirroredStrategy if `x` is a "
                "keras.utils.PyDataset, because each process would shuffle the "
                "batches in a different order, and the processes would not "
                "train on all samples. Shuffle the samples in the PyDataset, "
                "with the same seed in all processes. Received: shuffle="
                f"{shuffle!r}, x={x!r}."
            )
        elif shuffle and keras_private.can_convert_arrays(
            (x, options.get("y"), options.get("sample_weight"))
        ):
            # `keras.utils.set_random_seed` determines this number. All
            # processes use the number of the first process.
            seeds = group.gather_texts(str(random.getrandbits(31)))
            options["x"] = ShuffledArrays(
                int(seeds[0]),
                x,
                options.pop("y", None),
                sample_weight=options.pop("sample_weight", None),
                class_weight=options.pop("class_weight", None),
                batch_size=options.get("batch_size"),
                steps=options.get("steps_per_epoch"),
                shuffle=shuffle,
            )
    original(epochs, distribute_strategy, *args, **options)


def warn_of_random_order(
    group: processes.Processes, dataset: tf.data.Dataset
) -> None:
    """Warns if each process shuffles the samples in a different order.

    Args:
      group: The processes.
      dataset: Dataset that TensorFlow distributes over the processes.
    """
    policies = tf.data.experimental.AutoShardPolicy
    policy = dataset.options().experimental_distribute.auto_shard_policy
    seeds = (
        tf_private.shuffle_seeds(dataset)
        if policy in (policies.AUTO, policies.DATA)
        else []
    )
    # The global seed is a part of these seeds.
    first, *others = group.gather_texts(repr(seeds))
    if (0, 0) in seeds or any(other != first for other in others):
        user_warnings.warn(
            "A dataset must be shuffled in the same order in all processes of "
            "a MultiWorkerMirroredStrategy, because each process uses a part "
            "of each batch. This dataset has a different order in each "
            "process, so the processes use some samples of an epoch twice and "
            "others not at all. Pass `seed` to `Dataset.shuffle`, and call "
            "`tf.random.set_seed` with the same seed in all processes."
        )


class ShuffledArrays(keras_private.ArrayDataAdapter):
    """Arrays whose samples have an order that depends only on a seed.

    Keras' class uses random numbers of the process.
    """

    def __init__(
        self, seed: int, *args: Any, shuffle: Any, **options: Any
    ) -> None:
        """Creates the object.

        Args:
          seed: Seed of the orders of all epochs.
          *args: Arguments of Keras' class.
          shuffle: True, or "batch" to shuffle only within each batch.
          **options: Arguments of Keras' class.
        """
        super().__init__(*args, shuffle=shuffle, **options)
        self._seed = seed
        self._within_batches = shuffle == "batch"

    def get_tf_dataset(self) -> tf.data.Dataset:
        """Returns the batches. Each iterator has another order."""
        batches = keras_private.batches_at(self, self._indices())
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy.DATA
        )
        options.experimental_optimization.apply_default_optimizations = False
        return batches.with_options(options).prefetch(tf.data.AUTOTUNE)

    def _indices(self) -> tf.data.Dataset:
        """Returns the indices of the samples of each batch."""
        # `Dataset.random` also uses the global seed, which can differ between
        # processes.
        numbers = tf.raw_ops.RandomDatasetV2(
            seed=self._seed,
            seed2=1,  # Two zeros would be a random seed.
            seed_generator=tf.raw_ops.DummySeedGenerator(),
            rerandomize_each_iteration=True,
            output_types=[tf.int64],
            output_shapes=[[]],
        )
        seeds = tf.data.experimental.from_variant(
            numbers, tf.TensorSpec([], tf.int64)
        ).batch(2, drop_remainder=True)
        shuffle = tf.random.experimental.stateless_shuffle  # pyright: ignore[reportAttributeAccessIssue] No stub has it.
        if self._within_batches:
            return tf.data.Dataset.zip(self._in_batches(None), seeds).map(
                shuffle
            )
        return seeds.take(1).flat_map(
            lambda seed: self._in_batches(
                lambda indices: shuffle(indices, seed)
            )
        )

    def _in_batches(self, order: Any) -> tf.data.Dataset:
        """Returns the indices of all samples, in batches.

        Args:
          order: Function that changes the order of the indices, or None.
        """
        num_samples, size = keras_private.sizes_of_arrays(self)
        indices = tf.range(num_samples, dtype=tf.int64)
        if order is not None:
            indices = order(indices)
        num_full = num_samples // size
        # Reshaping is faster than `Dataset.batch`, which copies single indices.
        batches = tf.data.Dataset.from_tensor_slices(
            tf.reshape(indices[: num_full * size], [num_full, size])
        )
        if num_samples % size:
            batches = batches.concatenate(
                tf.data.Dataset.from_tensors(indices[num_full * size :])
            )
        return batches
