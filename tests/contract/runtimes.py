"""Runtimes on which the programs of the contract run.

A program creates its embedding or model in `runtime.scope()`, and trains it
with `runtime.train` or `runtime.fit`. Both methods receive global batches and
split them over the replicas. All other calls are calls of a user program.
"""

import contextlib
import os
import pathlib
import pickle
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm

Array = np.ndarray[Any, Any]
# Inputs and weights of one part of a global batch.
Part = tuple[dict[str, Any], dict[str, Any]]
# Ids and gradients of a global batch, each by feature.
Batch = tuple[dict[str, Array], dict[str, Array]]
# Step of one replica with its ids and gradients.
Replica = Callable[[Any, Any], Any]

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

    def train(
        self,
        embedding: Any,
        batches: Sequence[Batch],
        replica: Replica | None = None,
    ) -> None:
        """Runs one training step of an embedding per global batch.

        Args:
          embedding: The embedding.
          batches: Ids and gradients of the steps.
          replica: Function of the ids and gradients of one replica. Default:
            one lookup and one update.
        """
        self._train(replica or step_of(embedding), batches)

    def _train(self, replica: Replica, batches: Sequence[Batch]) -> None:
        step = tf.function(
            lambda ids, gradients: self.strategy.run(replica, (ids, gradients))
        )
        for ids, gradients in batches:
            step(self._parts(ids), self._parts(gradients))

    def step(
        self, replica: Callable[..., Any], is_eager: bool
    ) -> Callable[[list[Part]], Any]:
        """Returns a function that runs a step in all replicas.

        Args:
          replica: Function of the inputs and the weights of one replica, which
            returns activations by feature.
          is_eager: Whether a runtime with one replica calls `replica` eagerly.

        Returns:
          Function of the `NUM_REPLICAS` parts of a global batch. It returns the
          activations of all samples of this process.
        """
        function = (
            replica if is_eager else tf.function(replica, reduce_retracing=True)
        )
        return lambda parts: function(*joined(parts))

    def gather(self, value: Any) -> list[Any]:
        """Returns the values of all processes in the first process.

        Other processes receive an empty list.
        """
        return [value]

    def draw_num_shards(self, seed: int) -> int | None:
        """Returns the number of shards of all tables of a random program."""
        del seed
        return None

    def _parts(self, values: dict[str, Array], axis: int = 0) -> Any:
        """Returns the part of each replica as distributed values.

        Args:
          values: Values by feature.
          axis: Dimension of the samples.
        """
        num_replicas = self.strategy.num_replicas_in_sync
        if num_replicas == 1:
            return {name: tf.constant(one) for name, one in values.items()}
        size = BATCH // num_replicas

        def part_of(value: Array) -> Callable[[Any], tf.Tensor]:
            def part(context: Any) -> tf.Tensor:
                first = context.replica_id_in_sync_group * size
                samples = range(first, first + size)
                return tf.constant(np.take(value, samples, axis))

            return part

        distribute = self.strategy.experimental_distribute_values_from_function
        return {name: distribute(part_of(one)) for name, one in values.items()}

    def fit(self, model: Any, x: Any, y: Any, **options: Any) -> Any:
        """Calls `fit` of a compiled Keras model with global batches."""
        return model.fit(dataset(x, y), verbose=0, **options)


def step_of(embedding: Any) -> Replica:
    """Returns a step with one lookup and one update of all tables."""

    def step(ids: Any, gradients: Any) -> None:
        embedding.enqueue(ids)
        embedding.dequeue()
        embedding.apply_gradients(gradients)

    def step_of_v2(ids: Any, gradients: Any) -> None:
        _, preserved = embedding(ids)
        embedding.apply_gradients(gradients, preserved)

    return step_of_v2 if isinstance(embedding, tlm.TPUEmbeddingV2) else step


def joined(parts: list[Part]) -> Part:
    """Returns a global batch."""

    def join(*values: Any) -> Any:
        if values[0] is None:
            return None
        if isinstance(values[0], tf.SparseTensor):
            return tf.sparse.concat(0, [*values], expand_nonconcat_dims=True)
        return tf.concat([*values], 0)

    inputs, weights = (
        {name: join(*[one[name] for one in by_part]) for name in by_part[0]}
        for by_part in zip(*parts, strict=True)
    )
    return inputs, weights


def spec_of(value: Any) -> Any:
    """Returns the type of ids or weights of any number of samples."""
    if isinstance(value, tf.RaggedTensor):
        return tf.RaggedTensorSpec([None, None], value.dtype, 1)
    if isinstance(value, tf.SparseTensor):
        return tf.SparseTensorSpec([None, None], value.dtype)
    return None if value is None else tf.TensorSpec([None], value.dtype)


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


def tensors_in(path: str, prefix: str = "it/") -> dict[str, Array]:
    """Returns the tensors of the object `it` in a checkpoint, by name.

    An embedding has two paths to each variable, and a checkpoint contains one
    of them: `items.Smomenta` or `_variables/items/momenta`. The names in the
    result do not depend on the path.
    """
    reader = tf.train.load_checkpoint(path)
    end = "/.ATTRIBUTES/VARIABLE_VALUE"
    return {
        key.removeprefix(prefix)
        .removesuffix(end)
        .replace(".S", "/")
        .removeprefix("_variables/")
        .removesuffix("/parameters"): reader.get_tensor(key)
        for key in reader.get_variable_to_shape_map()
        if key.startswith(prefix) and (not prefix or key.endswith(end))
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

    def step(
        self, replica: Callable[..., Any], is_eager: bool
    ) -> Callable[[list[Part]], Any]:
        del is_eager
        run = distributed(self.strategy, replica)
        results = self.strategy.experimental_local_results

        def step(parts: list[Part]) -> Any:
            return {
                name: tf.concat(results(one), 0)
                for name, one in run(self._distribute(parts)).items()
            }

        return step

    def _distribute(self, parts: list[Part]) -> Any:
        """Returns distributed values whose values are the parts."""
        distribute = self.strategy.experimental_distribute_values_from_function
        return tf.nest.map_structure(
            lambda *values: (
                None
                if values[0] is None
                else distribute(
                    lambda context: values[context.replica_id_in_sync_group]
                )
            ),
            *parts,
        )


def distributed(
    strategy: tf.distribute.Strategy, replica: Callable[..., Any]
) -> Callable[[Any], Any]:
    """Returns a traced function that runs `replica` in all replicas."""
    run = tf.function(
        lambda *inputs: strategy.run(replica, inputs), reduce_retracing=True
    )
    return lambda inputs: run(*inputs)


class LocalServers(Runtime):
    """Logical CPUs of this process that act as servers.

    The number of servers and shards is random. The page does not contain this
    runtime.
    """

    name = "local_servers"

    def start(self, folder: pathlib.Path) -> None:
        super().start(folder)
        self._random = random.Random(0)

    @contextlib.contextmanager
    def scope(self, by_columns: bool = False) -> Iterator[None]:
        from tests.embedding.servers import local

        del by_columns
        with local.servers(self._random.randint(1, 3)):
            yield

    def draw_num_shards(self, seed: int) -> int | None:
        return random.Random(seed).randint(1, 4)


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
        deadline = time.monotonic() + 200
        while len(list(self.folder.glob(f"{name}*"))) < NUM_REPLICAS:
            if time.monotonic() > deadline:
                raise RuntimeError("The other process did not arrive.")
            time.sleep(0.02)

    def step(
        self, replica: Callable[..., Any], is_eager: bool
    ) -> Callable[[list[Part]], Any]:
        del is_eager
        function = tf.function(
            lambda *inputs: self.strategy.run(replica, inputs)
        )
        traced = []

        def step(parts: list[Part]) -> Any:
            own = parts[self.worker]
            if not traced:
                # The function is traced once, for all shapes. All processes
                # must trace their functions in the same order, because the
                # order determines which collectives exchange data.
                specs = tf.nest.map_structure(spec_of, own)
                traced.append(function.get_concrete_function(*specs))
            return traced[0](*own)

        return step

    def gather(self, value: Any) -> list[Any]:
        self._num_waits += 1
        path = self.folder / f"gathered_{self._num_waits}"
        own = path.with_suffix(f".{self.worker}")
        own.write_bytes(pickle.dumps(value))
        self.wait_for_all()
        if not self.is_first:
            return []
        return [
            pickle.loads(path.with_suffix(f".{worker}").read_bytes())
            for worker in range(NUM_REPLICAS)
        ]

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

    def _train(self, replica: Replica, batches: Sequence[Batch]) -> None:
        step = tf.function(replica)
        for batch in batches:
            ids, gradients = tf.nest.map_structure(tf.constant, batch)
            self._coordinator.schedule(step, args=(ids, gradients))
            self._coordinator.join()

    def step(
        self, replica: Callable[..., Any], is_eager: bool
    ) -> Callable[[list[Part]], Any]:
        if is_eager:  # The coordinator itself runs the step.
            return super().step(replica, is_eager)
        function = tf.function(replica, reduce_retracing=True)

        def step(parts: list[Part]) -> Any:
            future = self._coordinator.schedule(function, args=joined(parts))
            self._coordinator.join()
            return future.fetch()

        return step

    def draw_num_shards(self, seed: int) -> int | None:
        return random.Random(seed).randint(1, 4)

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


class TPUWithHostTables(TPU):
    """The same cores, with all tables on the host."""

    name = "tpu_host"

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        super().__init__(strategy)
        self.options = {"engine": "host"}


class SparseCores(TPU):
    """Two chips of an emulated TPU v5p, whose tables are on SparseCores."""

    name = "sparse_cores"

    def _train(self, replica: Replica, batches: Sequence[Batch]) -> None:
        """Runs the steps in a loop, because TensorFlow pipelines only loops."""
        stacked = tf.nest.map_structure(
            lambda *parts: np.stack(parts), *batches
        )

        def step_of_loop(number: Any, ids: Any, gradients: Any) -> None:
            replica(
                *(
                    {k: v[number] for k, v in part.items()}
                    for part in (ids, gradients)
                )
            )

        @tf.function
        def loop(ids: Any, gradients: Any) -> None:
            for number in tf.range(len(batches)):
                self.strategy.run(step_of_loop, (number, ids, gradients))

        loop(*(self._parts(part, axis=1) for part in stacked))

    def values(self, embedding: Any, name: str = "values") -> dict[str, Array]:
        """Returns tables and slot variables under their names on the host.

        A checkpoint contains stacks of tables.
        """
        del name
        found = {
            name: rows.numpy()
            for name, rows in embedding.get_embedding_tables().items()
        }
        for table, variables in embedding.slot_variables.items():
            for name, variable in variables.items():
                found[f"{table.name}/{name}"] = variable.numpy()
        return found


def create(group: str) -> tuple[list[Runtime], Any]:
    """Creates the runtimes of a group in this process.

    Returns:
      The runtimes, and an object that the caller must keep.
    """
    if group == "local":
        import tests.strategies  # noqa: F401 - The import creates logical CPUs.

        return [Runtime(), Mirrored(), LocalServers(), Mesh()], None
    if group == "workers":
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        worker = int(os.environ["CONTRACT_WORKER"])
        return [Replicated(strategy, worker), Sharded(strategy, worker)], None
    if group == "servers":
        from tests.embedding.servers import cluster

        servers, strategy = cluster.start(2)
        return [Servers(strategy)], servers
    if group == "sparse_cores":
        strategy = tlm.emulation.enable(
            num_cores=NUM_REPLICAS, deadline=20.0, tpu="v5p"
        )
        return [SparseCores(strategy)], None
    strategy = tlm.emulation.enable(num_cores=NUM_REPLICAS, deadline=20.0)
    return [TPU(strategy), TPUWithHostTables(strategy)], None
