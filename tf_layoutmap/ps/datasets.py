"""`Datasets`: what `fit` and `evaluate` read over parameter servers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_layoutmap._core import checks, keras_private
from tf_layoutmap._patches import engine
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

    An epoch without `steps_per_epoch` ends when all workers are through with
    their datasets, of whatever sizes. With `steps_per_epoch` it is so many
    batches, whoever takes them, and the next one goes on where it ended.
    """

    def __init__(
        self,
        dataset_fn: Callable[..., Any],
        *,
        step_deadline: str | float = "10min",
        on_server_loss: str = "raise",
    ):
        """Takes what makes a dataset.

        Args:
          dataset_fn: Returns a `tf.data.Dataset` of batches, as `fit` takes
            them; it is traced once and runs on each worker. Where it takes an
            argument, that is a `tf.distribute.InputContext`: its
            `num_input_pipelines` is the number of workers, and its
            `input_pipeline_id`, a scalar tensor, tells which one it is.
            Without it all workers read the same. It is not autotuned unless
            its options say so.
          step_deadline: How long no batch may be through, as `"10min"` or
            seconds.
          on_server_loss: Of `fit`: `"raise"`: a `ServerLostError`.
            `"restart"`: this program starts anew, in the same process, with
            its arguments. It waits in `connect` until the server is there
            again, and its `fit` goes on from what its BackupAndRestore
            callback has saved; three times, if there is nothing new. With
            `delete_checkpoint=False` of that a `fit` that has ended trains
            nothing when it comes again. `evaluate` raises in any case.

        Raises:
          TypeError: If `dataset_fn` is not callable.
          ValueError: If `step_deadline` is no length of time, or
            `on_server_loss` is none of the two.
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
        replace_fit()

    def _function(self, num_workers: int) -> Callable[[], Any]:
        """Returns what a coordinator runs on each worker."""
        made = function_of_worker(self._dataset_fn, num_workers)
        return lambda: _checked(made())


def function_of_worker(
    dataset_fn: Callable[..., Any],
    num_workers: int,
) -> Callable[[], Any]:
    """Returns what a coordinator runs on each worker: it makes its dataset.

    Args:
      dataset_fn: As of `Datasets`.
      num_workers: Workers of the cluster.
    """
    if not _takes_argument(dataset_fn):
        return dataset_fn

    def with_context() -> Any:
        index = (
            tf.distribute.coordinator.experimental_get_current_worker_index()
        )
        return dataset_fn(
            tf.distribute.InputContext(num_workers, tf.cast(index, tf.int64))
        )

    return with_context


def check_function_of_worker(traced: Any) -> None:
    """Checks that workers can run what makes their datasets.

    Args:
      traced: The dataset function, as a concrete function.

    Raises:
      ValueError: It uses a dataset of this process.
    """
    if any(one.dtype == tf.variant for one in traced.inputs):
        raise ValueError(
            "Argument `dataset_fn` must not use a tf.data.Dataset that was "
            "created outside of it: that one is in this process, where "
            "workers cannot read it. Create all datasets inside of the "
            "function. Received: a function that captures one."
        )


def replace_fit() -> None:
    """Lets `fit` and `evaluate` of both Keras know what `Datasets` are.

    `connect` calls it, too: in `model.fit(Datasets(...))` Python looks up `fit`
    first.
    """
    engine.ensure("keras3_ps")
    if keras_private.imported_tf_keras() is not None:
        engine.ensure("tf_keras_ps")


def _takes_argument(function: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # Of C.
        return False
    return any(
        one.default is one.empty
        and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
        for one in parameters
    )


def _checked(dataset: Any) -> Any:
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            "Argument `dataset_fn` must return a tf.data.Dataset. "
            f"Received: {type(dataset).__name__}."
        )
    return dataset
