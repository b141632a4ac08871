"""Random programs that train tables and make all other calls between steps.

The family and the seed of a program determine its tables and its calls. The
program makes the same calls on each runtime, and returns the results of all
calls, and all variables after each call. `trial` compares them bitwise.
"""

import pathlib
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tests.contract import setups
from tests.contract.families import FAMILIES, Family
from tests.contract.runtimes import NUM_REPLICAS, Array, Runtime, tensors_in
from tests.contract.setups import OWNERS
from tf_layoutmap.vocabulary.stored_keys import StoredKeys

CAPACITIES = (1, 9, 30, 100, 700)
_CALLS_PER_PROGRAM = 7


def program_of(family: str, seed: int) -> Callable[[Runtime], dict[str, Array]]:
    """Returns a program that runs on all runtimes of a family."""
    return lambda runtime: Program(runtime, family, seed).run()


def draw(
    family: Family, seed: int
) -> tuple[setups.Setup, bool, list[tuple[str, int]]]:
    """Returns the tables, whether steps are pipelined, and the calls."""
    rng = random.Random(seed)
    names = rng.choice(setups.NAMES)

    def by_name(values: Any) -> dict[str, str]:
        return {name: rng.choice(sorted(values)) for name in names}

    setup = setups.Setup(
        names,
        rng.choice([1, 20, 60, 200]),
        rng.choice(sorted(setups.POLICIES)),
        by_name(setups.OPTIMIZERS),
        by_name(["sum"] if family.has_exact_sums else setups.COMBINERS),
        by_name(setups.DTYPES),
        tuple(name for name in names if rng.random() < 0.5),
        rng.choice(["error", "drop", "clip"]),
        rng.random() < 0.3,
    )
    is_pipelined = family.is_pipelined and seed % 2 == 1
    # Programs with consecutive seeds make all calls.
    first = _CALLS_PER_PROGRAM * seed
    others = [
        family.calls[(first + number) % len(family.calls)]
        for number in range(_CALLS_PER_PROGRAM)
    ]
    rng.shuffle(others)
    calls = []
    for call in others:
        # A step gives the next call other tables.
        if not calls or rng.random() < 0.6:
            calls.append(("train", rng.randrange(10**6)))
        calls.append((call, rng.randrange(10**6)))
    return setup, is_pipelined, calls


class Program:
    """The calls of a random program in one process.

    Args:
      runtime: Runtime of the embeddings.
      family: Key of `FAMILIES`.
      seed: Seed of the program.
    """

    def __init__(self, runtime: Runtime, family: str, seed: int):
        self._runtime = runtime
        self._seed = seed
        self._setup, is_pipelined, self._calls = draw(FAMILIES[family], seed)
        self._has_exact_sums = FAMILIES[family].has_exact_sums
        self._options = dict(runtime.options)
        if is_pipelined:
            self._options["pipeline_execution_with_tensor_core"] = True
        self._batches = setups.Batches(self._setup)
        self._open_tables = [one for one in self._setup.names if one in OWNERS]
        # Capacities that differ from the setup, by owner of the vocabulary.
        self._capacities: dict[str, int] = {}
        self._evicted: list[Any] = []
        self._num_paths = 0
        self._base, self._deltas = "", ""
        self._results: dict[str, Any] = {}
        # Activations of the samples of this process, by call.
        self._activations: dict[str, dict[str, Array]] = {}
        self._create()

    def _create(self) -> None:
        """Replaces the embedding by an untrained one."""
        with self._runtime.scope():
            self._one = self._setup.create(
                self._evicted.append,
                self._runtime.draw_num_shards(self._seed),
                **self._options,
            )
        for owner, capacity in self._capacities.items():
            self._one.vocabularies[owner].resize(capacity)
        self._steps: dict[Any, Any] = {}
        self._writer: tlm.deltas.DeltaWriter | None = None

    def run(self) -> dict[str, Array]:
        """Makes all calls, and returns the results in the first process."""
        for number, (call, seed) in enumerate(self._calls):
            name = f"{number} {call}"
            print(self._seed, name, seed, flush=True)
            try:
                found = getattr(self, f"_{call}")(seed, name)
            except (
                ValueError,
                RuntimeError,
                tf.errors.FailedPreconditionError,
            ) as error:
                print("error", error)
                found = f"error: {type(error).__name__}"
            self._results[name] = found
            self._results[f"{name} variables"] = self._variables()
        self._one.flush()
        self._results["variables"] = self._variables()
        for name in self._open_tables[:1]:
            self._one.vocabularies[name].report_evicted()
        return self._joined()

    def _joined(self) -> dict[str, Array]:
        """Checks and joins the results of all processes."""
        results = dict(setups.flat(self._results))
        found = self._runtime.gather(
            (results, self._activations, len(self._evicted))
        )
        if not found:
            return {}
        activations = {}
        for other, _, num_evicted in found[1:]:
            assert results.keys() == other.keys()
            for name, value in results.items():
                assert setups.bits(value) == setups.bits(other[name]), name
            assert not num_evicted, "Only the first process calls `on_evict`."
        for call, by_feature in self._activations.items():
            for feature in by_feature:
                activations[f"{call} {feature}"] = np.concatenate(
                    [local[call][feature] for _, local, _ in found]
                )
        return {
            **results,
            **activations,
            **dict(setups.flat(_by_table(self._evicted), "evicted ")),
        }

    def _variables(self) -> dict[str, Any]:
        """Returns all variables, except for rows without a key, and counts."""
        found: dict[str, Any] = dict(setups.variables(self._one))
        for name in self._open_tables:
            found[f"stats {name}"] = self._one.vocabularies[name].stats()
        return found

    # Steps.

    def _step(self, call: str, seed: int, name: str, replica: Any) -> None:
        """Runs a step in all replicas.

        Args:
          call: Name of the step.
          seed: Seed of the batch. Batches whose seeds are both even or both odd
            have the same classes of inputs.
          name: Name of the results.
          replica: Function of one replica that returns activations by feature.
        """
        parts = [
            self._batches.read([seed, part], self._seed + seed % 2)
            for part in range(NUM_REPLICAS)
        ]
        key = call, seed % 2
        if key not in self._steps:
            self._steps[key] = self._runtime.step(
                replica, is_eager=call == "abandon" or bool(self._seed % 2)
            )
        found = self._steps[key](parts)
        self._activations[name] = {
            feature: np.asarray(one) for feature, one in found.items()
        }

    def _gradients(self, activations: Any) -> Any:
        """Returns gradients that depend on the activations."""

        def gradient(one: tf.Tensor) -> tf.Tensor:
            found = tf.sin(7 * one) + 0.1
            return tf.round(8 * found) / 8 if self._has_exact_sums else found

        return tf.nest.map_structure(gradient, activations)

    def _train(self, seed: int, name: str) -> None:
        def replica(inputs: Any, weights: Any) -> Any:
            if seed % 5 == 0:
                inputs, weights = tlm.pack(inputs, weights)
            self._one.enqueue(inputs, weights)
            found = self._one.dequeue()
            self._one.apply_gradients(self._gradients(found))
            return found

        self._step("pack" if seed % 5 == 0 else "train", seed, name, replica)

    def _forward(self, seed: int, name: str) -> None:
        def replica(inputs: Any, weights: Any) -> Any:
            self._one.enqueue(inputs, weights, training=False)
            return self._one.dequeue()

        self._step("forward", seed, name, replica)

    def _abandon(self, seed: int, name: str) -> None:
        def replica(inputs: Any, weights: Any) -> Any:
            self._one.enqueue(inputs, weights)
            return self._one.dequeue()

        self._step("abandon", seed, name, replica)
        self._one.reset()

    def _lookup(self, seed: int, name: str) -> None:
        """Runs a step with the calls that a layer makes."""

        def replica(inputs: Any, weights: Any) -> Any:
            backend = self._one._state.backend
            lookup, found = backend.open(inputs, weights)
            backend.apply_followed(
                backend.follow(lookup, self._gradients(found))
            )
            return {str(number): one for number, one in enumerate(found)}

        self._step("lookup", seed, name, replica)

    def _lookups(self, seed: int, name: str) -> None:
        """Runs a step with three lookups, some of which have gradients."""
        rng = np.random.default_rng(seed)
        used = np.flatnonzero([*rng.integers(0, 2, 2), 1]).tolist()

        def replica(inputs: Any, weights: Any) -> Any:
            backend = self._one._state.backend
            opened = [backend.open(inputs, weights) for _ in range(3)]
            marks = [
                backend.follow(opened[one][0], self._gradients(opened[one][1]))
                for one in used
            ]
            backend.apply_followed(tf.add_n(marks))
            return {
                f"{number}/{feature}": one
                for number, (_, found) in enumerate(opened)
                for feature, one in enumerate(found)
            }

        self._steps.pop(("lookups", seed % 2), None)
        self._step("lookups", seed, name, replica)
        # The host engine keeps lookups without gradients for some calls.
        self._one.reset()

    def _two_steps(self, seed: int, name: str) -> None:
        def replica(inputs: Any, weights: Any) -> Any:
            found = {}
            for number in range(2):
                self._one.enqueue(inputs, weights)
                one = self._one.dequeue()
                self._one.apply_gradients(self._gradients(one))
                found |= {f"{number}/{key}": part for key, part in one.items()}
            return found

        self._step("two_steps", seed, name, replica)

    def _flush(self, seed: int, name: str) -> None:
        del seed, name
        self._one.flush()

    # Calls of vocabularies.

    def _vocabulary(self, seed: int) -> Any:
        """Returns one of the vocabularies, or None."""
        names = self._open_tables
        if not names:
            return None
        return self._one.vocabularies[names[seed % len(names)]]

    def _keys(self, vocabulary: Any, seed: int) -> Array:
        """Returns some keys of a vocabulary, and two other keys."""
        rng = np.random.default_rng(seed)
        keys = np.sort(vocabulary.keys().numpy())[:: int(rng.integers(1, 4))]
        return np.concatenate([keys, [10**14 + seed, -(10**13)]])

    def _evict(self, seed: int, name: str) -> Any:
        del name
        vocabulary = self._vocabulary(seed)
        if vocabulary is None:
            return None
        if seed % 3:
            self._one.flush()
        keys = _stored(self._keys(vocabulary, seed))
        return np.sort(vocabulary.evict(keys).numpy())

    def _expire(self, seed: int, name: str) -> Any:
        del name
        vocabulary = self._vocabulary(seed)
        return None if vocabulary is None else vocabulary.evict_expired()

    def _resize(self, seed: int, name: str) -> Any:
        del name
        vocabulary = self._vocabulary(seed)
        if vocabulary is None or self._writer is not None:
            return None
        capacity = CAPACITIES[seed % len(CAPACITIES)]
        kept = vocabulary.resize(capacity)
        self._capacities[OWNERS[vocabulary.name]] = capacity
        self._steps = {}
        return [kept.num_kept, kept.num_dropped]

    def _write(self, seed: int, name: str) -> Any:
        del name
        vocabulary = self._vocabulary(seed)
        if vocabulary is None:
            return None
        dim = setups.DIMS[vocabulary.name]
        rng = np.random.default_rng(seed)
        keys = setups.keys_to_write(rng, self._keys(vocabulary, seed))
        options: dict[str, Any] = {}
        if rng.integers(4):
            options["rows"] = rng.normal(size=[len(keys), dim])
        if rng.integers(2):
            options["counts"] = rng.integers(0, 99, len(keys))
        if rng.integers(2):
            step = vocabulary.stats()["step"]
            options["last_steps"] = rng.integers(0, step + 1, len(keys))
        if rng.integers(2):
            slots = next(
                by_name
                for config, by_name in self._one.slot_variables.items()
                if config.name == vocabulary.name
            )
            options["slots"] = {
                slot: rng.uniform(0, 1, size=[len(keys), dim])
                for slot in sorted(slots)
            }
        given = keys
        if self._setup.strings:
            strings = tf.constant(self._batches.keys(keys), tf.string)
            given = strings if seed % 2 else _stored(keys)
        found = vocabulary.write(given, **options)
        return [
            found.num_written,
            found.num_new,
            np.asarray(found.without_row).tolist(),
        ]

    def _read(self, seed: int, name: str) -> Any:
        del name
        closed = {
            config.name: table.numpy()
            for config, table in self._one.embedding_tables.items()
            if config.name not in OWNERS
        }
        vocabulary = self._vocabulary(seed)
        if vocabulary is None:
            return closed
        keys = _stored(self._keys(vocabulary, seed))
        return {
            **closed,
            "lookup": vocabulary.lookup(keys),
            "contains": vocabulary.contains(keys),
            "keys": vocabulary.keys(),
            **_concatenated(vocabulary.blocks(8 + seed % 50)),
        }

    # Files.

    def _path(self, name: str) -> str:
        """Returns a new path that is the same in all processes."""
        self._num_paths += 1
        return str(self._runtime.folder / f"{self._num_paths}_{name}")

    def _save(self) -> str:
        """Returns the path of a new checkpoint."""
        path = self._path("saved")
        self._runtime.write(self._one, pathlib.Path(path).name)
        self._runtime.wait_for_all()
        return path

    def _restore(self, path: str) -> Any:
        return tf.train.Checkpoint(it=self._one).read(path)

    def _export(self, seed: int, name: str) -> Any:
        """Imports the files of all tables into a new embedding."""
        del name
        path = self._path("rows")
        names = self._open_tables[:: 1 if seed % 2 else -1]
        if not names:
            return None
        found = [
            self._one.vocabularies[name].export(
                f"{path}_{name}", block_size=8 + seed % 50
            )
            for name in names
        ]
        self._runtime.wait_for_all()
        self._create()
        for name in names:
            tlm.vocabulary.import_rows(
                f"{path}_{name}", self._one.vocabularies[name]
            )
        return found

    def _checkpoint(self, seed: int, name: str) -> Any:
        """Restores a checkpoint into the same or into a new embedding."""
        del name
        path = self._save()
        if seed % 2:
            self._create()
        self._restore(path).assert_existing_objects_matched()
        return tensors_in(path)

    def _convert(self, seed: int, name: str) -> Any:
        """Converts a checkpoint to another capacity, and restores it."""
        del name
        if not self._open_tables:
            return None
        capacity = CAPACITIES[seed % len(CAPACITIES)]
        path, new = self._save(), self._path("new")
        settings = setups.POLICIES[self._setup.policy]
        if self._runtime.is_first:
            tlm.vocabulary.convert(
                path,
                new,
                {
                    name: tlm.vocabulary.OpenVocabulary(capacity, **settings)
                    if OWNERS[name] == name
                    else OWNERS[name]
                    for name in self._open_tables
                },
            )
        self._runtime.wait_for_all()
        self._capacities = {OWNERS[one]: capacity for one in self._open_tables}
        self._create()
        self._restore(new)
        return tensors_in(new)

    def _delta(self, seed: int, name: str) -> Any:
        del name
        is_new = self._writer is None
        if is_new:
            self._base, self._deltas = self._save(), self._path("deltas")
        if is_new or seed % 5 == 0:
            # A writer that continues a chain compares all rows with it.
            self._writer = tlm.deltas.DeltaWriter(
                self._one, self._deltas, base=self._base
            )
        delta = self._writer.write(compare=seed % 7 == 0)
        self._runtime.wait_for_all()
        found = [delta.meta.tables, tensors_in(str(delta.tensors), "")]
        # Without lazy updates, a step also changes rows that belong to no key.
        # Deltas do not contain such rows.
        if seed % 2 and all(
            self._setup.optimizers[one] != "adam_lazy_off"
            for one in self._open_tables
        ):
            self._check_applied_deltas()
        return found

    def _check_applied_deltas(self) -> None:
        """Checks that base and deltas equal a new checkpoint."""
        end, full = self._save(), self._path("full")
        if not self._runtime.is_first:
            return
        tlm.deltas.apply(self._base, self._deltas, full)
        found, expected = tensors_in(full), tensors_in(end)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert setups.bits(found[name]) == setups.bits(value), name


def _stored(keys: Array) -> StoredKeys:
    return StoredKeys(tf.constant(keys, tf.int64))


def _concatenated(blocks: Any) -> dict[str, Array]:
    """Returns the arrays of some blocks of rows, concatenated."""
    parts = [
        {
            "keys": one.keys,
            "rows": one.rows,
            "counts": one.counts,
            "last_steps": one.last_steps,
            **one.slots,
        }
        for one in blocks
    ]
    return {
        f"blocks {name}": np.concatenate([one[name] for one in parts])
        for name in (parts[0] if parts else ())
    }


def _by_table(reports: list[Any]) -> dict[str, dict[str, Array]]:
    """Returns the evicted keys, rows and slots of each table, by key."""
    found = {}
    for table in sorted({one.table for one in reports}):
        own = [one for one in reports if one.table == table]
        keys = np.concatenate([one.keys for one in own])
        order = np.argsort(keys, kind="stable")
        arrays = {
            "keys": keys,
            "rows": np.concatenate([one.rows for one in own]),
        }
        for name in own[0].slots:
            arrays[name] = np.concatenate([one.slots[name] for one in own])
        found[table] = {name: one[order] for name, one in arrays.items()}
    return found
