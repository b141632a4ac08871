"""One process of a group that runs random programs with sharded tables.

    python random_program.py FOLDER FIRST_SEED NUM_SEEDS

Writes the results of all calls of this process to FOLDER.
"""

import json
import os
import pathlib
import pickle
import random
import sys

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tests.contract import setups
from tests.embedding.deltas.cases import tensors
from tests.embedding.divided import checkpoints
from tests.embedding.servers import random_pairs as pairs
from tf_layoutmap.vocabulary.stored_keys import StoredKeys

KINDS = (
    *["train"] * 4,
    *["by_token", "forward", "abandon", "evict", "expire", "resize", "write"],
    *["read", "export", "checkpoint", "convert", "delta", "delta", "flush"],
)


def setup_of(seed):
    """Returns the setup, whether it is pipelined, and the calls."""
    rng = random.Random(seed)
    names = rng.choice(setups.NAMES)

    def by_name(values):
        return {name: rng.choice(sorted(values)) for name in names}

    setup = setups.Setup(
        names,
        rng.choice([1, 20, 60, 200]),
        rng.choice(sorted(setups.POLICIES)),
        by_name(setups.OPTIMIZERS),
        by_name(setups.COMBINERS),
        by_name(setups.DTYPES),
        tuple(name for name in names if rng.random() < 0.5),
        rng.choice(["error", "drop", "clip"]),
        rng.random() < 0.3,
    )
    calls = [
        (rng.choice(KINDS), rng.randrange(10**6))
        for _ in range(rng.randint(3, 12))
    ]
    return setup, rng.random() < 0.3, calls


def plain(value):
    """Returns nested results as dicts, lists and NumPy arrays."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if isinstance(value, tf.Tensor | np.generic):
        return np.asarray(value)
    return value


def outcome(call):
    """Returns the result of a call, or the class of its error."""
    try:
        return call()
    except (
        ValueError,
        RuntimeError,
        tf.errors.FailedPreconditionError,
    ) as error:
        print("error", error)
        return f"error: {type(error).__name__}"


def full_value(variable):
    if hasattr(variable, "block"):
        return np.asarray(variable.numpy())
    return pairs.full_value(variable)


class Program:
    """The calls of a program in one process.

    Attributes:
      results: Results that are equal in all processes, by call.
      activations: Results of each local replica, by call.
      evicted: All arguments of `on_evict`.
    """

    def __init__(self, seed, strategy, replicas, folder, rank, **options):
        self.setup, is_pipelined, self.calls = setup_of(seed)
        self.strategy, self.replicas, self.rank = strategy, replicas, rank
        self.options = {
            "pipeline_execution_with_tensor_core": is_pipelined,
            **options,
        }
        self.folder = pathlib.Path(folder) / str(seed)
        self.folder.mkdir(exist_ok=True)
        self.seed = seed
        self.batches = pairs.Batches(self.setup)
        self.capacities = {}
        self.evicted = []
        self.writer = self.base = None
        self.num_paths = 0
        self.results, self.activations = [], []
        self.one = self.create()

    def create(self):
        with self.strategy.scope():
            one = self.setup.create(self.evicted.append, **self.options)
        for owner, capacity in self.capacities.items():
            one.vocabularies[owner].resize(capacity)
        self.steps = {}
        return one

    def run(self):
        for kind, seed in self.calls:
            print(self.seed, kind, seed, flush=True)
            self.results.append(
                (
                    kind,
                    plain(outcome(lambda: getattr(self, f"do_{kind}")(seed))),
                )
            )
            self.results.append((kind, self.contents()))
        self.one.flush()
        self.results.append(("end", self.contents()))

    def contents(self):
        """Returns all variables, except for rows without a key."""
        found = {}
        values = {
            (table, name): full_value(variable)
            for table, by_name in self.one._variables.items()
            for name, variable in by_name.items()
        }
        for (table, name), value in values.items():
            owner = setups.OWNERS.get(table)
            if owner is not None:
                keys = values[owner, "vocabulary_keys"]
                has_key = np.append(keys.ravel() != setups.EMPTY, True)
                if value.ndim == 2 and len(value) == len(has_key):
                    value = value[has_key]
            found[f"{table}/{name}"] = np.asarray(
                value, np.float64 if value.dtype.kind not in "iu" else None
            )
        for name in self.open_tables():
            found[f"stats {name}"] = self.one.vocabularies[name].stats()
        return found

    def open_tables(self):
        return [name for name in self.setup.names if name in setups.OWNERS]

    def inputs(self, seed):
        """Returns the inputs of all local replicas."""
        form_seed = self.seed + seed % 2
        parts = [
            self.batches.read([seed, replica], form_seed)
            for replica in self.replicas
        ]
        if len(parts) == 1:
            return parts[0]
        distribute = self.strategy.experimental_distribute_values_from_function
        return [
            tf.nest.map_structure(
                lambda *values: (
                    None
                    if values[0] is None
                    else distribute(
                        lambda context: values[context.replica_id_in_sync_group]
                    )
                ),
                *[one[part] for one in parts],
            )
            for part in range(2)
        ]

    def step(self, kind, seed):
        """Runs a step in all replicas."""

        def train(inputs, weights):
            self.one.enqueue(inputs, weights)
            found = self.one.dequeue()
            self.one.apply_gradients(setups.gradients(found))
            return found

        def forward(inputs, weights):
            self.one.enqueue(inputs, weights, training=False)
            return self.one.dequeue()

        def abandon(inputs, weights):
            self.one.enqueue(inputs, weights)
            return self.one.dequeue()

        def by_token(inputs, weights):
            # With several lookups, the processes look up keys in another order
            # than the replicas of one process.
            backend = self.one._state.backend
            lookup, found = backend.open(inputs, weights)
            backend.apply_followed(
                backend.follow(lookup, [tf.sin(7 * one) + 0.1 for one in found])
            )
            return dict(enumerate(found))

        function = {
            "train": train,
            "forward": forward,
            "abandon": abandon,
            "by_token": by_token,
        }[kind]
        key = kind, seed % 2
        if key not in self.steps:
            self.steps[key] = tf.function(
                lambda *inputs: self.strategy.run(function, inputs),
                reduce_retracing=True,
            )
        found = self.steps[key](*self.inputs(seed))
        self.activations.append(
            [
                {
                    name: np.asarray(
                        self.strategy.experimental_local_results(one)[place]
                    )
                    for name, one in found.items()
                }
                for place in range(len(self.replicas))
            ]
        )

    def do_train(self, seed):
        self.step("train", seed)

    def do_by_token(self, seed):
        self.step("by_token", seed)

    def do_forward(self, seed):
        self.step("forward", seed)

    def do_abandon(self, seed):
        self.step("abandon", seed)
        self.one.reset()

    def do_flush(self, seed):
        del seed
        self.one.flush()

    def some_vocabulary(self, seed):
        names = self.open_tables()
        return self.one.vocabularies[names[seed % len(names)]]

    def keys(self, vocabulary, seed):
        """Returns some keys of a vocabulary, and some other keys."""
        rng = np.random.default_rng(seed)
        keys = np.sort(vocabulary.keys().numpy())[:: int(rng.integers(1, 4))]
        return np.concatenate([keys, [10**14 + seed, -(10**13)]])

    def stored(self, keys):
        return StoredKeys(tf.constant(keys, tf.int64))

    def do_evict(self, seed):
        if not self.open_tables():
            return None
        if seed % 3:
            self.one.flush()
        vocabulary = self.some_vocabulary(seed)
        keys = self.stored(self.keys(vocabulary, seed))
        return vocabulary.evict(keys)

    def do_expire(self, seed):
        if not self.open_tables():
            return None
        return self.some_vocabulary(seed).evict_expired()

    def do_resize(self, seed):
        if not self.open_tables() or self.writer is not None:
            return None
        vocabulary = self.some_vocabulary(seed)
        capacity = (1, 9, 30, 100, 700)[seed % 5]
        kept = vocabulary.resize(capacity)
        self.capacities[setups.OWNERS[vocabulary.name]] = capacity
        self.steps = {}
        return [kept.num_kept, kept.num_dropped]

    def do_write(self, seed):
        if not self.open_tables():
            return None
        vocabulary = self.some_vocabulary(seed)
        dim = setups.DIMS[vocabulary.name]
        rng = np.random.default_rng(seed)
        keys = setups.keys_to_write(rng, self.keys(vocabulary, seed))
        options = {}
        if rng.integers(4):
            options["rows"] = rng.normal(size=[len(keys), dim])
        if rng.integers(2):
            options["counts"] = rng.integers(0, 99, len(keys))
        if rng.integers(2):
            step = vocabulary.stats()["step"]
            options["last_steps"] = rng.integers(0, step + 1, len(keys))
        if rng.integers(2):
            options["slots"] = {
                slot: rng.uniform(0, 1, size=[len(keys), dim])
                for slot in sorted(pairs.slots_of(self.one, vocabulary.name))
            }
        if self.setup.strings:
            argument = tf.constant(self.batches.keys(keys), tf.string)
        else:
            argument = keys
        found = vocabulary.write(argument, **options)
        return [
            found.num_written,
            found.num_new,
            np.asarray(found.without_row).tolist(),
        ]

    def do_read(self, seed):
        closed = {
            config.name: np.asarray(table.numpy(), np.float64)
            for config, table in self.one.embedding_tables.items()
            if config.name not in setups.OWNERS
        }
        if not self.open_tables():
            return closed
        vocabulary = self.some_vocabulary(seed)
        keys = self.stored(self.keys(vocabulary, seed))
        return {
            **closed,
            "lookup": vocabulary.lookup(keys),
            "contains": vocabulary.contains(keys),
            "keys": vocabulary.keys(),
            **pairs.joined(vocabulary.blocks(8 + seed % 50)),
        }

    def path(self, name):
        self.num_paths += 1
        return self.folder / f"{self.num_paths}_{name}"

    def save(self):
        """Returns the path of a new checkpoint."""
        path = self.path("saved")
        tf.train.Checkpoint(embedding=self.one).write(
            checkpoints.path_of(path.parent, path.name, self.rank)
        )
        self.contents()  # The processes wait for the first process.
        return str(path)

    def do_export(self, seed):
        if not self.open_tables():
            return None
        path, names = self.path("rows"), self.open_tables()
        names = names[:: 1 if seed % 2 else -1]
        found = [
            self.one.vocabularies[name].export(
                f"{path}_{name}", block_size=8 + seed % 50
            )
            for name in names
        ]
        self.contents()
        self.one, self.writer = self.create(), None
        for name in names:
            tlm.import_rows(f"{path}_{name}", self.one.vocabularies[name])
        return found

    def do_checkpoint(self, seed):
        path = self.save()
        if seed % 2:
            self.one, self.writer = self.create(), None
        tf.train.Checkpoint(embedding=self.one).read(path).assert_consumed()
        return tensors(path)

    def do_convert(self, seed):
        if not self.open_tables():
            return None
        capacity = (1, 9, 30, 100, 700)[seed % 5]
        path, new = self.save(), self.path("new")
        if self.rank == 0:
            tlm.convert_vocabularies(
                path,
                str(new),
                {
                    name: tlm.OpenVocabulary(
                        capacity, **setups.POLICIES[self.setup.policy]
                    )
                    if setups.OWNERS[name] == name
                    else setups.OWNERS[name]
                    for name in self.open_tables()
                },
            )
        self.contents()
        self.capacities = {
            setups.OWNERS[name]: capacity for name in self.open_tables()
        }
        self.one, self.writer = self.create(), None
        tf.train.Checkpoint(embedding=self.one).read(str(new))
        return None

    def do_delta(self, seed):
        if self.writer is None:
            self.base, self.deltas = self.save(), self.path("deltas")
        if self.writer is None or seed % 5 == 0:
            self.writer = tlm.DeltaWriter(self.one, self.deltas, base=self.base)
        delta = self.writer.write(compare=seed % 7 == 0)
        self.contents()
        return [delta.meta.tables, tensors(delta.tensors)]


def main(folder, first, count):
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank = json.loads(os.environ["TF_CONFIG"])["task"]["index"]
    for seed in range(int(first), int(first) + int(count)):
        program = Program(
            seed, strategy, [rank], folder, rank, over_processes="sharded"
        )
        program.run()
        found = {
            "results": program.results,
            "activations": program.activations,
            "evicted": pairs.by_table(program.evicted),
        }
        path = pathlib.Path(folder) / f"{seed}_{rank}.pickle"
        with open(path.with_suffix(".part"), "wb") as file:
            pickle.dump(found, file)
        path.with_suffix(".part").rename(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
