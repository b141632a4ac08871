"""Runtimes on which the programs of the contract run.

A program creates its embedding or model in `runtime.scope()`, and trains it
with `runtime.train` or `runtime.fit`. Both methods receive global batches and
split them over the replicas. All other calls are calls of a user program.
"""

import contextlib
import os
import pathlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm

Array = np.ndarray[Any, Any]
# Ids and gradients of a global batch, each by feature.
Batch = tuple[dict[str, Array], dict[str, Array]]

BATCH = 8  # Samples of a global batch; divisible by all numbers of replicas.
NUM_REPLICAS = 2


class Runtime:
    """One process with the default strategy.

    Attributes:
      name: Key of `states.RUNTIMES`.
      folder: Folder of the current program, which all processes share.
      strategy: Strategy of the models and embeddings.
      options: Arguments of `tlm.TPUEmbedding` and of its layers that select the
        runtime.
      is_first: Whether this process writes shared files and compares numbers.
    """

    name = "host"
    is_first = True

    def __init__(self) -> None:
        self.folder = pathlib.Path()
        self.strategy = tf.distribute.get_strategy()
        self.options: dict[str, Any] = {}

    def start(self, folder: pathlib.Path) -> None:
        """Prepares the runtime for the next program."""
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    @contextlib.contextmanager
    def scope(self, by_columns: bool = False) -> Iterator[None]:
        """Scope in which a program creates its embedding or model.

        Args:
          by_columns: Whether a mesh shards the columns of the table "words"
            instead of its rows.
        """
        del by_columns
        with self.strategy.scope():
            yield

    def path(self, name: str) -> str:
        """Returns a path in the folder of this process."""
        return str(self.folder / name)

    def restart(self) -> None:
        """Removes the tables of earlier embeddings from the runtime."""

    def wait_for_all(self) -> None:
        """Waits until all processes call this method."""

    def write(self, objects: Any, name: str = "checkpoint") -> str:
        """Writes a checkpoint of an object in all processes.

        Returns:
          The path of the checkpoint that the first process has written.
        """
        return tf.train.Checkpoint(it=objects).write(self.path(name))

    def values(self, embedding: Any, name: str = "values") -> dict[str, Array]:
        """Returns tables and slot variables, read from a checkpoint.

        Returns:
          Values by name; an empty dict in other processes than the first.
        """
        path = self.write(embedding, name)
        return tensors_in(path) if self.is_first else {}

    def train(self, embedding: Any, batches: Sequence[Batch]) -> None:
        """Runs one training step of a `tlm.TPUEmbedding` per global batch."""

        def replica(ids: Any, gradients: Any) -> Any:
            embedding.enqueue(ids)
            activations = embedding.dequeue()
            embedding.apply_gradients(gradients)
            return activations

        step = tf.function(
            lambda ids, gradients: self.strategy.run(replica, (ids, gradients))
        )
        for ids, gradients in batches:
            step(self._parts(ids), self._parts(gradients))

    def _parts(self, values: dict[str, Array]) -> Any:
        """Returns the part of each replica as distributed values."""
        num_replicas = self.strategy.num_replicas_in_sync
        if num_replicas == 1:
            return {name: tf.constant(one) for name, one in values.items()}
        size = BATCH // num_replicas

        def part_of(value: Array) -> Callable[[Any], tf.Tensor]:
            def part(context: Any) -> tf.Tensor:
                first = context.replica_id_in_sync_group * size
                return tf.constant(value[first : first + size])

            return part

        distribute = self.strategy.experimental_distribute_values_from_function
        return {name: distribute(part_of(one)) for name, one in values.items()}

    def fit(self, model: Any, x: Any, y: Any, **options: Any) -> Any:
        """Calls `fit` of a compiled Keras model with global batches."""
        return model.fit(dataset(x, y), verbose=0, **options)


def dataset(x: Any, y: Any) -> tf.data.Dataset:
    """Returns the global batches of arrays."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    return (
        tf.data.Dataset.from_tensor_slices((x, y))
        .batch(BATCH, drop_remainder=True)
        .with_options(options)
    )


def tensors_in(path: str) -> dict[str, Array]:
    """Returns the tensors of the object `it` in a checkpoint, by name.

    An embedding has two paths to each variable, and a checkpoint contains one
    of them: `items.Smomenta` or `_variables/items/momenta`. The names in the
    result do not depend on the path.
    """
    reader = tf.train.load_checkpoint(path)
    end = "/.ATTRIBUTES/VARIABLE_VALUE"
    return {
        key.removeprefix("it/")
        .removesuffix(end)
        .replace(".S", "/")
        .removeprefix("_variables/")
        .removesuffix("/parameters"): reader.get_tensor(key)
        for key in reader.get_variable_to_shape_map()
        if key.startswith("it/") and key.endswith(end)
    }


class Mirrored(Runtime):
    """Two replicas of a `MirroredStrategy` in one process."""

    name = "mirrored"

    def __init__(self) -> None:
        super().__init__()
        self.strategy = tf.distribute.MirroredStrategy(
            [f"CPU:{one}" for one in range(NUM_REPLICAS)],
            cross_device_ops=tf.distribute.ReductionToOneDevice(),
        )


class Mesh(Runtime):
    """A mesh of two by two logical CPUs."""

    name = "mesh"

    def __init__(self) -> None:
        super().__init__()
        from tests.layout import meshes

        self.mesh = meshes.mesh_of(batch=2, model=2)
        self._rows = meshes.layout_of(self.mesh, "model", None)
        self._columns = meshes.layout_of(self.mesh, None, "model")

    @contextlib.contextmanager
    def scope(self, by_columns: bool = False) -> Iterator[None]:
        layout_map = tlm.LayoutMap(self.mesh)
        layout_map["words.embeddings"] = (
            self._columns if by_columns else self._rows
        )
        with tlm.layout_map_scope(layout_map):
            yield


class Replicated(Runtime):
    """One of two processes of a `MultiWorkerMirroredStrategy`."""

    name = "replicated"

    def __init__(self, strategy: tf.distribute.Strategy, worker: int) -> None:
        super().__init__()
        self.strategy = strategy
        self.worker = worker
        self.is_first = worker == 0

    def start(self, folder: pathlib.Path) -> None:
        super().start(folder)
        self._num_waits = 0

    def wait_for_all(self) -> None:
        self._num_waits += 1
        name = f"waiting_{self._num_waits}_"
        (self.folder / f"{name}{self.worker}").touch()
        deadline = time.monotonic() + 60
        while len(list(self.folder.glob(f"{name}*"))) < NUM_REPLICAS:
            if time.monotonic() > deadline:
                raise RuntimeError("The other process did not arrive.")
            time.sleep(0.02)

    def path(self, name: str) -> str:
        # Other processes than the first write temporary files.
        own = self.folder / (f"worker_{self.worker}" if self.worker else "")
        own.mkdir(parents=True, exist_ok=True)
        return str(own / name)


class Sharded(Replicated):
    """The same processes, whose tables are sharded over the processes."""

    name = "sharded"

    def __init__(self, strategy: tf.distribute.Strategy, worker: int) -> None:
        super().__init__(strategy, worker)
        self.options = {"over_processes": "sharded"}


class Servers(Runtime):
    """The coordinator of two parameter servers and one worker."""

    name = "servers"

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__()
        self.strategy = strategy
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(
            strategy
        )
        # Creating a `Datasets` object installs the patches of `fit`, as
        # `tlm.ps.connect` does.
        tlm.ps.Datasets(lambda: tf.data.Dataset.range(1))

    def train(self, embedding: Any, batches: Sequence[Batch]) -> None:
        @tf.function
        def step(ids: Any, gradients: Any) -> None:
            embedding.enqueue(ids)
            embedding.dequeue()
            embedding.apply_gradients(gradients)

        for batch in batches:
            ids, gradients = tf.nest.map_structure(tf.constant, batch)
            self._coordinator.schedule(step, args=(ids, gradients))
            self._coordinator.join()

    def fit(self, model: Any, x: Any, y: Any, **options: Any) -> Any:
        return model.fit(
            tlm.ps.Datasets(lambda: dataset(x, y)), verbose=0, **options
        )


class TPU(Runtime):
    """Two cores of an emulated TPU."""

    name = "tpu"

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__()
        self.strategy = strategy

    def start(self, folder: pathlib.Path) -> None:
        super().start(folder)
        self.restart()

    def restart(self) -> None:
        tlm.emulation.initialize_tpu_system()


def create(group: str) -> tuple[list[Runtime], Any]:
    """Creates the runtimes of a group in this process.

    Returns:
      The runtimes, and an object that the caller must keep.
    """
    if group == "local":
        import tests.strategies  # noqa: F401 - The import creates logical CPUs.

        return [Runtime(), Mirrored(), Mesh()], None
    if group == "workers":
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        worker = int(os.environ["CONTRACT_WORKER"])
        return [Replicated(strategy, worker), Sharded(strategy, worker)], None
    if group == "servers":
        from tests.embedding.servers import cluster

        servers, strategy = cluster.start(2)
        return [Servers(strategy)], servers
    strategy = tlm.emulation.enable(num_cores=NUM_REPLICAS, deadline=20.0)
    return [TPU(strategy)], None
