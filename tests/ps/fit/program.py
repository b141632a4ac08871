"""Runs `fit` on parameter servers; test_fit.py starts this program.

python -m tests.ps.fit.program keras|tf_keras FOLDER CASE...

Runs two servers and one worker in this process. Prints a line of JSON with the
result or the error of each case.
"""

import contextlib
import importlib
import json
import os
import pathlib
import sys
from unittest import mock

from tests.embedding.servers import cluster  # isort: skip

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tf_layoutmap.ps import rounds, step_closure

tpu = tf.tpu.experimental.embedding
# `sys.argv` has other arguments if pytest imports this file.
KERAS = "tf_keras" if "tf_keras" in sys.argv[1:] else "keras"
# Folder of all files that the cases write. `main` assigns it.
FOLDER: pathlib.Path
keras = importlib.import_module(KERAS)
layers = tlm.layers if KERAS == "keras" else tlm.layers.tf_keras

RANDOM = np.random.default_rng(0)
IDS = {
    "a": RANDOM.integers(0, 50, [24, 2]),
    "b": RANDOM.integers(0, 20, [24, 3]),
}
LABELS = RANDOM.normal(size=[24, 1]).astype(np.float32)
STEPS = 3


def batches():
    return tf.data.Dataset.from_tensor_slices((IDS, LABELS)).batch(8)


def datasets():
    return tlm.ps.Datasets(batches)


def model(strategy=None, twice=False, wire_dtype="float32", **options):
    rows = np.random.default_rng(3).normal(size=[50, 4]).astype(np.float32)

    def initializer(shape, shard_info=None, dtype=None):
        del dtype
        if shard_info is None:
            return rows[: shape[0]]
        first = shard_info.offset[0]
        return rows[first : first + shard_info.shape[0]]

    tables = [
        tpu.TableConfig(
            size, 4, initializer=initializer, combiner="mean", name=name
        )
        for name, size in [("t", 50), ("u", 20)]
    ]
    with strategy.scope() if strategy else contextlib.nullcontext():
        inputs = {
            "a": keras.Input([2], dtype="int64", name="a"),
            "b": keras.Input([3], dtype="int64", name="b"),
        }
        layer = layers.TPUEmbedding(
            {
                name: tpu.FeatureConfig(table, name=name)
                for name, table in zip("ab", tables)
            },
            tpu.Adagrad(0.3),
            wire_dtype=wire_dtype,
        )
        found = layer(inputs)
        both = [found["a"], found["b"]]
        if twice:
            # The second call has other numbers of ids per sample.
            again = layer({"a": inputs["b"], "b": inputs["a"] % 20})
            both += [again["a"], again["b"]]
        built = keras.Model(
            inputs,
            keras.layers.Dense(1, kernel_initializer="ones")(
                keras.layers.Concatenate()(both)
            ),
        )
        built.compile(
            keras.optimizers.SGD(0.1), "mse", **{"metrics": ["mae"], **options}
        )
    built.embedding_layer = layer
    return built


def calling_in_a_function(strategy):
    """Returns a model whose `call` is wrapped in a `tf.function`."""
    built = model(strategy)
    built.call = tf.function(built.call)
    return built


def values(built):
    return [
        *(
            one.numpy()
            for one in built.embedding_layer.embedding_tables.values()
        ),
        *(one.numpy() for one in built.trainable_variables),
    ]


def same(found, expected):
    return [np.array_equal(*both) for both in zip(found, expected)]


def numbers(history):
    return {
        name: found
        for name, found in history.history.items()
        if name != "examples/s"
    }


def one_process():
    """Returns the results of training in this process without servers.

    The last results are None if their case does not run.
    """
    built = model()
    history = built.fit(
        batches(), epochs=2, verbose=0, validation_data=batches()
    )
    built.save_weights(FOLDER / "host.weights.h5")
    return (
        numbers(history),
        values(built),
        built.predict(IDS, verbose=0),
        *(
            run() if name in sys.argv[3:] else None
            for name, run in {
                "tables_in_layers": one_process_with_tables,
                "keys_in_layers": one_process_with_keys,
                "called_twice": one_process_called_twice,
                "accumulated_gradients": one_process_with_accumulation,
                "regularizers_and_constraints": one_process_regularized,
            }.items()
        ),
    )


HOST: tuple = ()


def trains_bitwise_equal(strategy):
    built = model(strategy)
    history = built.fit(
        datasets(), epochs=2, verbose=0, validation_data=datasets()
    )
    stats = built.embedding_layer.embedding.stats()
    return [
        numbers(history) == HOST[0],
        same(values(built), HOST[1]),
        stats["num_updates"],
        int(built.optimizer.iterations.numpy()),
    ]


def one_process_called_twice():
    built = model(twice=True)
    history = built.fit(batches(), epochs=2, verbose=0)
    return numbers(history), values(built)


def called_twice(strategy):
    built = model(strategy, twice=True)
    history = built.fit(datasets(), epochs=2, verbose=0)
    stats = built.embedding_layer.embedding.stats()
    return [
        numbers(history) == HOST[5][0],
        same(values(built), HOST[5][1]),
        stats["num_updates"],
        stats["staleness"]["max"],
    ]


REGULARIZED = {
    "l2": lambda: {"embeddings_regularizer": keras.regularizers.L2(0.1)},
    "l1": lambda: {"embeddings_regularizer": keras.regularizers.L1(0.1)},
    "max_norm": lambda: {
        "embeddings_constraint": keras.constraints.MaxNorm(0.05, axis=1)
    },
    "unit_norm": lambda: {
        "embeddings_constraint": keras.constraints.UnitNorm(axis=1)
    },
    "non_negative": lambda: {
        "embeddings_constraint": keras.constraints.NonNeg()
    },
    "some_norm": lambda: {
        "embeddings_constraint": keras.constraints.MinMaxNorm(
            0.04, 0.06, rate=0.5, axis=1
        )
    },
}


def one_process_regularized():
    found = {}
    for name, options in REGULARIZED.items():
        built = table_model(**options())
        history = built.fit(batches(), epochs=2, verbose=0)
        found[name] = numbers(history), parts(built)
    return found


def regularizers_and_constraints(strategy):
    """Trains tables with an optimizer, and by the model's optimizer."""
    found = {}
    for name, options in REGULARIZED.items():
        built = table_model(strategy, **options())
        history = built.fit(datasets(), epochs=2, verbose=0)
        logs, expected = HOST[7][name]
        found[name] = [numbers(history) == logs, *same(parts(built), expected)]
    return found


def accumulating():
    """Returns an optimizer that applies every second step of a run."""
    return keras.optimizers.SGD(
        0.1, momentum=0.5, gradient_accumulation_steps=2
    )


def one_process_with_accumulation():
    if KERAS != "keras":
        return None  # Optimizers of tf_keras do not accumulate gradients.
    built = table_model(optimizer=accumulating())
    history = built.fit(batches(), epochs=2, verbose=0)
    return numbers(history), parts(built)


def accumulated_gradients(strategy):
    """Accumulates the gradients of 3 batches per epoch, in pairs."""
    if KERAS != "keras":
        return None  # Optimizers of tf_keras do not accumulate gradients.
    found = []
    for steps in (1, 4):
        with strategy.scope():
            optimizer = accumulating()
        built = table_model(strategy, optimizer=optimizer)
        built.compile(optimizer, "mse", steps_per_execution=steps)
        history = built.fit(datasets(), epochs=2, verbose=0)
        found.append(
            [
                numbers(history) == HOST[6][0],
                all(same(parts(built), HOST[6][1])),
                int(built.get_layer("table_a").optimizer.iterations),
            ]
        )
    return found


def several_steps_per_execution(strategy):
    """Trains with executions that are shorter and longer than an epoch."""
    found = []
    for steps in (2, 4):
        built = model(strategy, steps_per_execution=steps)
        history = built.fit(
            datasets(), epochs=2, verbose=0, validation_data=datasets()
        )
        found.append(
            [
                numbers(history) == HOST[0],
                all(same(values(built), HOST[1])),
                built.embedding_layer.embedding.stats()["num_updates"],
            ]
        )
    return found


def automatic_steps(strategy):
    """Trains with closures whose number of steps increases automatically."""
    chosen = set()
    choose = rounds.AutomaticSteps.choose

    def recording(steps, max_steps):
        chosen.add(choose(steps, max_steps))
        return max(chosen)

    with (
        mock.patch.multiple(rounds, AUTOMATIC_STEPS=3, _CLOSURE_SECONDS=60.0),
        mock.patch.object(step_closure.StepClosure, "num_copies", lambda *_: 0),
        mock.patch.object(rounds.AutomaticSteps, "choose", recording),
    ):
        built = model(strategy)
        history = built.fit(
            datasets(), epochs=2, verbose=0, validation_data=datasets()
        )
    return [
        sorted(chosen),
        numbers(history) == HOST[0],
        all(same(values(built), HOST[1])),
        built.embedding_layer.embedding.stats()["num_updates"],
    ]


def callbacks_of_executions(strategy):
    """Returns the numbers of steps after which callbacks are called."""
    built = model(strategy, steps_per_execution=4)
    counts = Ends()
    built.fit(
        tlm.ps.Datasets(lambda: batches().repeat()),
        steps_per_epoch=42,
        verbose=0,
        callbacks=[counts],
    )
    return [
        [one + 1 for one in counts.batches],
        int(built.optimizer.iterations.numpy()),
        built.embedding_layer.embedding.stats()["num_updates"],
    ]


def bfloat16_on_the_wire(strategy):
    built = model(strategy, wire_dtype="bfloat16")
    built.fit(datasets(), epochs=2, verbose=0)
    # The relative error of each of the 6 steps is at most 2^-8, and values are
    # at most 3.
    return [
        built.embedding_layer.embedding.stats()["wire_dtype"],
        same(values(built), HOST[1]),
        bool(
            all(
                np.allclose(*both, atol=6 * 3 * 2**-8)
                for both in zip(values(built), HOST[1])
            )
        ),
    ]


def files_are_exchanged(strategy):
    built = model(strategy)
    built.load_weights(FOLDER / "host.weights.h5")
    read = same(values(built), HOST[1])
    built.save_weights(FOLDER / "servers.weights.h5")
    built.save(FOLDER / "servers.keras")
    alone = model()
    alone.load_weights(FOLDER / "servers.weights.h5")
    loaded_model = keras.models.load_model(FOLDER / "servers.keras")
    return [
        read,
        same(values(alone), HOST[1]),
        bool(
            np.allclose(
                loaded_model.predict(IDS, verbose=0), HOST[2], rtol=1e-5
            )
        ),
    ]


def predicts_evaluates_and_exports(strategy):
    built = model(strategy)
    built.load_weights(FOLDER / "host.weights.h5")
    close = [np.allclose(built.predict(IDS, verbose=0), HOST[2], rtol=1e-5)]
    last = [HOST[0]["val_loss"][-1], HOST[0]["val_mae"][-1]]
    close.append(np.allclose(built.evaluate(datasets(), verbose=0), last))
    if KERAS == "keras":
        close.append(
            np.allclose(
                built.evaluate(IDS, LABELS, verbose=0, batch_size=8), last
            )
        )
        built.export(FOLDER / "served", verbose=False)
        loaded = tf.saved_model.load(FOLDER / "served")
        close.append(
            np.allclose(
                loaded.serve(
                    {name: tf.constant(ids) for name, ids in IDS.items()}
                ),
                HOST[2],
                rtol=1e-5,
            )
        )
    return all(map(bool, close))


def table_model(
    strategy=None, optimizer=None, steps_per_execution=1, **options
):
    """Returns a model with three tables, two of them with an optimizer."""
    with strategy.scope() if strategy else contextlib.nullcontext():
        inputs = {
            "a": keras.Input([2], dtype="int64", name="a"),
            "b": keras.Input([3], dtype="int64", name="b"),
        }
        rows = [
            layers.ShardedEmbedding(
                size,
                4,
                num_shards=3,
                name=f"table_{name}",
                optimizer=table_optimizer,
                embeddings_initializer=keras.initializers.RandomUniform(
                    seed=size
                ),
                **options,
            )(inputs[feature])
            for name, feature, size, table_optimizer in [
                ("a", "a", 50, tpu.Adagrad(0.3)),
                ("b", "b", 20, None),
                ("c", "b", 20, tpu.SGD(0.2)),
            ]
        ]
        built = keras.Model(
            inputs,
            keras.layers.Dense(1, kernel_initializer="ones")(
                keras.layers.Flatten()(keras.layers.Concatenate(axis=1)(rows))
            ),
        )
        built.compile(
            optimizer or keras.optimizers.SGD(0.1),
            "mse",
            steps_per_execution=steps_per_execution,
        )
    return built


def parts(built):
    """Returns tables, slot variables, step counts and dense weights."""
    layer = built.get_layer("table_a")
    return [
        layer.embeddings.numpy(),
        layer.optimizer.slots["accumulators"].numpy(),
        np.asarray(layer.optimizer.iterations),
        built.get_layer("table_b").embeddings.numpy(),
        built.get_layer("table_c").embeddings.numpy(),
        *(one.numpy() for one in built.layers[-1].trainable_weights),
    ]


def one_process_with_tables():
    built = table_model()
    built.fit(batches(), epochs=2, verbose=0)
    built.save_weights(FOLDER / "tables.weights.h5")
    return parts(built)


def tables_in_layers(strategy):
    built = table_model(strategy)
    built.fit(datasets(), epochs=2, verbose=0)
    in_one = table_model(strategy, steps_per_execution=4)
    in_one.fit(datasets(), epochs=2, verbose=0)
    trained = same(parts(built), HOST[3]) + same(parts(in_one), HOST[3])
    devices = {
        one.device.split("/")[1]
        for one in built.get_layer("table_a").embeddings.variables
    }
    built.save_weights(FOLDER / "from_servers.weights.h5")
    alone, again = table_model(), table_model(strategy)
    alone.load_weights(FOLDER / "from_servers.weights.h5")
    again.load_weights(FOLDER / "tables.weights.h5")
    return [
        trained,
        same(parts(alone), HOST[3]),
        same(parts(again), HOST[3]),
        sorted(devices),
    ]


def key_model(strategy=None, steps_per_execution=1):
    """Returns a model in which both types of layers have open vocabularies.

    Two tables of the `TPUEmbedding` layer share a vocabulary.
    """
    with strategy.scope() if strategy else contextlib.nullcontext():
        inputs = {
            "a": keras.Input([2], dtype="int64", name="a"),
            "b": keras.Input([3], dtype="int64", name="b"),
        }
        features = {
            feature: tpu.FeatureConfig(
                tpu.TableConfig(
                    64,
                    dim,
                    combiner="mean",
                    name=table,
                    initializer=tf.random_uniform_initializer(-1.0, 1.0),
                ),
                name=feature,
            )
            for feature, table, dim in [("wide", "w", 1), ("a", "t", 4)]
        }
        layer = layers.TPUEmbedding(
            features,
            tpu.Adagrad(0.3),
            vocabularies={
                "t": tlm.vocabulary.OpenVocabulary(
                    64, oov_embedding="trainable"
                ),
                "w": "t",
            },
        )
        found = layer({"a": inputs["a"], "wide": inputs["a"][:, :1]})
        words = layers.ShardedEmbedding(
            tlm.vocabulary.OpenVocabulary(64, min_count=2, admission="count"),
            4,
            num_shards=2,
            name="words",
            optimizer=tpu.Adagrad(0.3),
        )
        rows = keras.layers.Flatten()(words(inputs["b"]))
        built = keras.Model(
            inputs,
            keras.layers.Dense(1, kernel_initializer="ones")(
                keras.layers.Concatenate()([found["a"], found["wide"], rows])
            ),
        )
        built.compile(
            keras.optimizers.SGD(0.1),
            "mse",
            metrics=["mae"],
            steps_per_execution=steps_per_execution,
        )
    built.key_layers = layer, words
    return built


def key_parts(built):
    """Returns the keys and rows of both layers, and the dense weights."""
    found = []
    tables = {
        config.name: rows
        for config, rows in built.key_layers[0].embedding_tables.items()
    }
    for vocabulary, rows in [
        *(
            (built.key_layers[0].embedding.vocabularies[name], rows)
            for name, rows in tables.items()
        ),
        (built.key_layers[1].vocabulary, built.key_layers[1].embeddings),
    ]:
        keys = np.sort(vocabulary.keys().numpy())
        found += [
            keys,
            tf.convert_to_tensor(rows).numpy()[vocabulary.lookup(keys).numpy()],
            np.array(list(vocabulary.stats().values())[:-1]),
        ]
    return [
        *found,
        *(one.numpy() for one in built.layers[-1].trainable_weights),
    ]


def one_process_with_keys():
    built = key_model()
    history = built.fit(
        batches(), epochs=2, verbose=0, validation_data=batches()
    )
    built.save_weights(FOLDER / "keys.weights.h5")
    return (key_parts(built), numbers(history), built.predict(IDS, verbose=0))


def keys_in_layers(strategy):
    built = key_model(strategy)
    history = built.fit(
        datasets(), epochs=2, verbose=0, validation_data=datasets()
    )
    expected, logs, predicted = HOST[4]
    trained = same(key_parts(built), expected)
    in_one = key_model(strategy, steps_per_execution=3)
    in_one.fit(datasets(), epochs=2, verbose=0)
    trained += same(key_parts(in_one), expected)
    built.save_weights(FOLDER / "keys_of_servers.weights.h5")
    alone, again = key_model(), key_model(strategy)
    alone.load_weights(FOLDER / "keys_of_servers.weights.h5")
    again.load_weights(FOLDER / "keys.weights.h5")
    close = [
        np.allclose(one.predict(IDS, verbose=0), predicted, rtol=1e-5)
        for one in (built, alone, again)
    ]
    if KERAS == "keras":
        built.export(FOLDER / "served_keys", verbose=False)
        loaded = tf.saved_model.load(FOLDER / "served_keys")
        close.append(
            np.allclose(
                loaded.serve(
                    {name: tf.constant(ids) for name, ids in IDS.items()}
                ),
                predicted,
                rtol=1e-5,
            )
        )
    return [
        all(trained),
        all(same(key_parts(alone), expected)),
        all(same(key_parts(again), expected)),
        numbers(history) == logs,
        all(map(bool, close)),
    ]


class Ends(keras.callbacks.Callback):
    """Callback that counts batches and interrupts `fit` after an epoch."""

    def __init__(self, after=None):
        super().__init__()
        self.after = after
        self.batches = []

    def on_train_batch_end(self, batch, logs=None):
        self.batches.append(batch)
        assert logs["examples/s"] > 0

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == self.after:
            raise KeyboardInterrupt


def callbacks_work(strategy):
    folder = FOLDER / "backup"
    built = model(strategy)
    best = FOLDER / "best.weights.h5"
    interrupted = False
    try:
        built.fit(
            datasets(),
            epochs=3,
            verbose=0,
            callbacks=[
                Ends(1),
                keras.callbacks.BackupAndRestore(folder),
                keras.callbacks.ModelCheckpoint(best, save_weights_only=True),
            ],
        )
    except KeyboardInterrupt:
        interrupted = True
    again = model(strategy)
    counts = Ends()
    history = again.fit(
        datasets(),
        epochs=2,
        verbose=0,
        validation_data=(IDS, LABELS) if KERAS == "keras" else datasets(),
        callbacks=[counts, keras.callbacks.BackupAndRestore(folder)],
    )
    right = same(values(again), HOST[1])
    stopped = again.fit(
        datasets(),
        epochs=9,
        verbose=0,
        callbacks=[keras.callbacks.EarlyStopping("loss", min_delta=1e9)],
    )
    return [
        interrupted,
        best.exists(),
        history.epoch,
        counts.batches[-1],
        right,
        "val_loss" in history.history,
        len(stopped.epoch),
    ]


def steps_of_an_epoch(strategy):
    built = model(strategy)
    counts = Ends()
    built.fit(
        tlm.ps.Datasets(lambda: batches().repeat()),
        epochs=2,
        steps_per_epoch=5,
        verbose=0,
        callbacks=[counts],
    )
    after = int(built.optimizer.iterations.numpy())
    short = built.fit(datasets(), epochs=2, steps_per_epoch=5, verbose=0)
    return [
        after,
        counts.batches[-1],
        int(built.optimizer.iterations.numpy()) - after,
        len(short.epoch),
    ]


def refused(call):
    def case(strategy):
        call(strategy)
        return "nothing"

    return case


class OtherLogs(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def call(self, inputs):
        return self.dense(tf.cast(inputs["a"], tf.float32))

    def train_step(self, data):
        return {"other": tf.reduce_sum(self(data[0]))}


def other_logs(strategy):
    with strategy.scope():
        built = OtherLogs()
        built.compile("sgd", "mse")
    built.fit(datasets(), verbose=0)


def bad_id(strategy):
    wrong = {**IDS, "b": IDS["b"] + 19}
    model(strategy).fit(
        tlm.ps.Datasets(lambda: tf.data.Dataset.from_tensors((wrong, LABELS))),
        verbose=0,
    )


CASES = {
    case.__name__: case
    for case in [
        trains_bitwise_equal,
        bfloat16_on_the_wire,
        files_are_exchanged,
        predicts_evaluates_and_exports,
        tables_in_layers,
        keys_in_layers,
        callbacks_work,
        steps_of_an_epoch,
        called_twice,
        several_steps_per_execution,
        automatic_steps,
        callbacks_of_executions,
        accumulated_gradients,
        regularizers_and_constraints,
    ]
}
ERRORS = {
    name: refused(call)
    for name, call in {
        "bad_id": bad_id,
        "other_logs": other_logs,
        "too_many_steps": lambda strategy: model(
            strategy, steps_per_execution=513
        ).fit(datasets(), verbose=0),
        "other_steps": lambda strategy: model(
            strategy, steps_per_execution=2
        ).fit(tlm.ps.Datasets(batches, steps_per_closure=3), verbose=0),
        "with_labels": lambda strategy: model(strategy).fit(
            datasets(), LABELS, verbose=0
        ),
        "with_weights_of_classes": lambda strategy: model(strategy).fit(
            datasets(), class_weight={0: 2.0}, verbose=0
        ),
        "no_steps": lambda strategy: model(strategy).fit(
            datasets(), steps_per_epoch=0, verbose=0
        ),
        "call_in_a_function": lambda strategy: calling_in_a_function(
            strategy
        ).fit(datasets(), verbose=0),
        "without_servers": lambda strategy: model().fit(datasets()),
        "eager": lambda strategy: model(strategy, run_eagerly=True).fit(
            datasets()
        ),
        "predicted": lambda strategy: model(strategy).predict(datasets()),
        "no_function": lambda strategy: tlm.ps.Datasets(3),
        "no_time": lambda strategy: tlm.ps.Datasets(
            batches, step_deadline="soon"
        ),
        "no_such_answer": lambda strategy: tlm.ps.Datasets(
            batches, on_server_loss="wait"
        ),
        "no_cluster": lambda strategy: model(strategy).fit(
            tlm.ps.Datasets(batches, on_server_loss="restart"), verbose=0
        ),
        "no_dataset": lambda strategy: model(strategy).fit(
            tlm.ps.Datasets(lambda: 3), verbose=0
        ),
        "no_batches": lambda strategy: model(strategy).fit(
            tlm.ps.Datasets(lambda: batches().take(0)), verbose=0
        ),
        **(
            {"arrays": lambda strategy: model(strategy).fit(IDS, LABELS)}
            if KERAS == "keras"
            else {
                "backups_of_batches": lambda strategy: model(strategy).fit(
                    datasets(),
                    callbacks=keras.callbacks.BackupAndRestore(
                        FOLDER, save_freq=3
                    ),
                )
            }
        ),
    }.items()
}


def main():
    global FOLDER, HOST
    if len(sys.argv) < 3 or not os.path.isdir(sys.argv[2]):
        sys.exit(__doc__)
    FOLDER = pathlib.Path(sys.argv[2])
    # This must run before the cluster renames the devices.
    HOST = one_process()
    servers, strategy = cluster.start(2)
    datasets()  # Creating these datasets patches `fit`, as `connect` does.
    found = {}
    for name in sys.argv[3:]:
        try:
            found[name] = (CASES | ERRORS)[name](strategy)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[-3000:]
    print("FOUND " + json.dumps(found), flush=True)
    # The servers run in threads that never end, so the process exits here.
    del servers
    os._exit(0)


if __name__ == "__main__":
    main()
