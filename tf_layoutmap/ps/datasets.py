"""`Datasets`, the input of `fit` and `evaluate` on parameter servers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import checks, keras_private, literals, patches
from tf_layoutmap.ps import restarts, waiting


class Datasets:
    """The datasets of all workers, for `fit` and `evaluate`.

    ```py
    def dataset_fn(context):
        files = tf.data.Dataset.list_files("/shared/train-*", shuffle=False)
        files = files.shard(context.num_input_pipelines,
                            context.input_pipeline_id)
        return files.interleave(tf.data.TFRecordDataset).map(parse).batch(512)

    model.fit(tlm.ps.Datasets(dataset_fn), epochs=3)
    ```

    If `steps_per_epoch` is None, an epoch ends when all workers have finished
    their datasets. The datasets may have different sizes. Otherwise, an epoch
    consists of `steps_per_epoch` batches, counted over all workers, and the
    next epoch continues with the next batches of the datasets.
    """

    def __init__(
        self,
        dataset_fn: Callable[..., tf.data.Dataset],
        *,
        step_deadline: str | float = "10min",
        on_server_loss: literals.OnServerLoss = "raise",
        steps_per_closure: int | None = None,
    ):
        """Creates the datasets from a function that runs on each worker.

        Args:
          dataset_fn: Function that returns a `tf.data.Dataset` of batches, as
            for `fit`. The function is traced once and runs on each worker. If
            the function has a required argument, it is called with a
            `tf.distribute.InputContext`: `num_input_pipelines` is the number of
            workers, and `input_pipeline_id`, a scalar tensor, is the index of
            the worker. If the function has no argument, all workers read the
            same data. By default, autotuning of the dataset is off; the options
            of the dataset may enable it.
          step_deadline: Maximum time without a finished batch, such as
            `"10min"`, or in seconds.
          on_server_loss: How `fit` handles the loss of a server. `"raise"`
            raises `ServerLostError`. `"restart"` restarts this program with the
            same arguments, in the same process. The restarted program waits in
            `connect` until the server is available again. Then `fit` in the
            restarted program continues from the state that the BackupAndRestore
            callback has saved. The program restarts at most three times without
            a newer backup. If the callback has `delete_checkpoint=False` and
            `fit` had already finished, `fit` does not train again in the
            restarted program. `evaluate` always raises.
          steps_per_closure: Number of steps that a worker runs per call of the
            coordinator, from 1 to 512, as for `tlm.ps.Run`. None: the
            `steps_per_execution` of `compile` if it is greater than 1.
            Otherwise, the number is 1 at first, and increases once to at most
            16 after some time, if a closure then takes at most 0.25 s and 1/40
            of `step_deadline`.

        Raises:
          TypeError: If `dataset_fn` is not callable, or `steps_per_closure` is
            not an int.
          ValueError: If `step_deadline` is not a duration, `on_server_loss` is
            neither `"raise"` nor `"restart"`, or `steps_per_closure` is out of
            range.
        """
        if not callable(dataset_fn):
            raise TypeError(
                "Argument `dataset_fn` must be callable. "
                f"Received: {dataset_fn!r}."
            )
        self._dataset_fn = dataset_fn
        checks.check_one_of(
            "on_server_loss", on_server_loss, restarts.ON_SERVER_LOSS
        )
        self.on_server_loss = on_server_loss
        self.deadline = waiting.read_seconds(step_deadline, "step_deadline")
        if steps_per_closure is not None:
            checks.check_int(
                "steps_per_closure", steps_per_closure, lowest=1, highest=512
            )
        self.steps_per_closure = steps_per_closure
        patch_fit()

    def _function(self, num_workers: int) -> Callable[[], Any]:
        """Returns the function that a coordinator runs on each worker."""
        create_dataset = worker_dataset_function(self._dataset_fn, num_workers)
        return lambda: _check_dataset(create_dataset())


def worker_dataset_function(
    dataset_fn: Callable[..., Any],
    num_workers: int,
) -> Callable[[], Any]:
    """Returns the function that creates the dataset on each worker.

    Args:
      dataset_fn: As for `Datasets`.
      num_workers: Number of workers of the cluster.
    """
    if not _requires_argument(dataset_fn):
        return dataset_fn

    def with_context() -> Any:
        index = (
            tf.distribute.coordinator.experimental_get_current_worker_index()
        )
        return dataset_fn(
            tf.distribute.InputContext(num_workers, tf.cast(index, tf.int64))
        )

    return with_context


def check_worker_dataset_function(traced: Any) -> None:
    """Checks that workers can run a dataset function.

    Args:
      traced: The dataset function, as a concrete function.

    Raises:
      ValueError: If the function uses a dataset of this process.
    """
    if any(tensor.dtype == tf.variant for tensor in traced.inputs):
        raise ValueError(
            "Argument `dataset_fn` must not use a tf.data.Dataset that was "
            "created outside of it: that dataset is in this process, and "
            "workers have no access to it. Create all datasets inside the "
            "function. Received: a function that captures one."
        )


def patch_fit() -> None:
    """Patches `fit` and `evaluate` of Keras to support `Datasets`.

    `connect` also calls this function. For the expression
    `model.fit(Datasets(...))`, Python looks up `fit` before it creates the
    `Datasets`, so a patch in the constructor of `Datasets` would be too late.
    """
    patches.ensure("keras3_ps")
    if keras_private.imported_tf_keras() is not None:
        patches.ensure("tf_keras_ps")


def _requires_argument(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # C functions may have no signature.
        return False
    return any(
        parameter.default is parameter.empty
        and parameter.kind
        in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        for parameter in parameters
    )


def _check_dataset(dataset: Any) -> Any:
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            "Argument `dataset_fn` must return a tf.data.Dataset. "
            f"Received: {type(dataset).__name__}."
        )
    return dataset
