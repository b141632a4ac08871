"""Programs with Keras and tf_keras: models, optimizers, files and errors."""

import functools
import os
import tempfile

import keras
import numpy as np
import tensorflow as tf
import tf_keras

from tests.stock.outcome import attempts, exhaustive_program, program

PACKAGES = {"keras": keras, "tf_keras": tf_keras}


def numbers(*shape, seed=1):
    return np.random.default_rng(seed).normal(size=shape).astype("float32")


IDS = np.arange(24).reshape(8, 3) % 7


def dense(package):
    layers = package.layers
    return package.Sequential(
        [
            package.Input((4,)),
            layers.Dense(8, "relu", name="first"),
            layers.Dropout(0.25),
            layers.BatchNormalization(),
            layers.Dense(2, name="last"),
        ]
    )


def sequence(package):
    layers = package.layers
    ids = package.Input((3,), dtype="int64")
    x = layers.Embedding(7, 4, mask_zero=True, name="words")(ids)
    x = layers.LSTM(4, return_sequences=True)(x)
    x = layers.GRU(4)(x)
    return package.Model(ids, layers.Dense(2)(x))


def attention(package):
    layers = package.layers
    ids = package.Input((3,), dtype="int64")
    x = layers.Embedding(7, 4)(ids)
    x = layers.MultiHeadAttention(2, 2)(x, x) + x
    x = layers.LayerNormalization()(x)
    return package.Model(ids, layers.Dense(2)(layers.Flatten()(x)))


def image(package):
    layers = package.layers
    return package.Sequential(
        [
            package.Input((6, 6, 2)),
            layers.Conv2D(4, 3, padding="same"),
            layers.MaxPooling2D(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(2),
        ]
    )


def subclassed(package):
    class Own(package.Model):
        def __init__(self):
            super().__init__()
            self.one = package.layers.Dense(4)
            self.two = package.layers.Dense(2)

        def call(self, x):
            return self.two(tf.nn.relu(self.one(x)))

    return Own()


def own_step(package):
    class Own(package.Model):
        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self(x, training=True) - y) ** 2)
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply_gradients(
                zip(gradients, self.trainable_variables)
            )
            return {"own": loss}

    x = package.Input((4,))
    return Own(x, package.layers.Dense(2)(x))


MODELS = {
    "dense": (dense, numbers(8, 4)),
    "attention": (attention, IDS),
    "image": (image, numbers(8, 6, 6, 2)),
    "subclassed": (subclassed, numbers(8, 4)),
    "own step": (own_step, numbers(8, 4)),
}
# Tracing recurrent layers takes longer than all other programs together.
# `layers` calls them in `make test`.
RECURRENT_MODELS = {"sequence": (sequence, IDS)}
Y = numbers(8, 2, seed=2)


def trained(package, make, x, **options):
    model = make(package)
    model.compile(
        options.pop("optimizer", "adam"),
        package.losses.MeanSquaredError(),
        metrics=options.pop("metrics", ["mae"]),
        **options,
    )
    history = model.fit(x, Y, batch_size=3, epochs=2, verbose=0).history
    return model, {
        name: list(map(float, values)) for name, values in history.items()
    }


def in_both(run):
    return {
        name: attempts(of=lambda package=package: run(package))
        for name, package in PACKAGES.items()
    }


def in_alternate_packages(function):
    """Registers two programs for functions of a package, by name.

    The first program alternates between the packages. The second program, which
    is exhaustive, calls each function with the other package.
    """

    def outcomes(first):
        return {
            name: attempts(**{package: lambda: run(PACKAGES[package])})
            for number, (name, run) in enumerate(function().items())
            for package in [[*PACKAGES][(number + first) % 2]]
        }

    @functools.wraps(function)
    def alternating():
        return outcomes(0)

    @functools.wraps(function)
    def other():
        return outcomes(1)

    other.__name__ += "_in_the_other_package"
    program(alternating)
    exhaustive_program(other)
    return function


def runs_of_models(models):
    def run(package, make, x):
        model, history = trained(package, make, x)
        return [
            history,
            model.evaluate(x, Y, verbose=0),
            model.predict(x, verbose=0),
            model.get_weights(),
            model.optimizer.iterations,
            [weight.name for weight in model.weights],
        ]

    return {
        name: lambda package, make=make, x=x: run(package, make, x)
        for name, (make, x) in models.items()
    }


@in_alternate_packages
def models():
    return runs_of_models(MODELS)


@exhaustive_program
def recurrent_models():
    return {
        name: in_both(run)
        for name, run in runs_of_models(RECURRENT_MODELS).items()
    }


@program
def files():
    def run(package):
        model, _ = trained(package, dense, numbers(8, 4))
        x = numbers(8, 4, seed=5)
        with tempfile.TemporaryDirectory() as folder:

            def path(name):
                return os.path.join(folder, name)

            def loaded(name):
                model.save(path(name))
                again = package.models.load_model(path(name))
                history = again.fit(x, Y, verbose=0).history
                return [again.predict(x, verbose=0), float(history["loss"][0])]

            def weights():
                model.save_weights(path("w.weights.h5"))
                other = dense(package)
                other.load_weights(path("w.weights.h5"))
                return other.predict(x, verbose=0)

            def exported():
                model.export(path("served"))
                served = tf.saved_model.load(path("served"))
                return served.serve(x)

            return attempts(
                keras=lambda: loaded("m.keras"),
                h5=lambda: loaded("m.h5"),
                weights=weights,
                exported=exported,
                checkpoint=lambda: tf.train.list_variables(
                    tf.train.Checkpoint(model=model).save(path("ck"))
                ),
                wrong=lambda: image(package).load_weights(path("w.weights.h5")),
                missing=lambda: package.models.load_model(path("no.keras")),
                config=lambda: package.models.model_from_json(
                    model.to_json()
                ).count_params(),
                cloned=lambda: package.models.clone_model(model).count_params(),
            )

    return {name: run(package) for name, package in PACKAGES.items()}


OPTIMIZERS = (
    "SGD",
    "RMSprop",
    "Adam",
    "AdamW",
    "Adadelta",
    "Adagrad",
    "Adamax",
    "Nadam",
    "Ftrl",
    "Lion",
    "Adafactor",
)


def stepped(package, optimizer):
    """Applies one dense and one sparse gradient."""
    one = (
        tf.Variable(numbers(4, 2))
        if package is tf_keras
        else (keras.Variable(numbers(4, 2)))
    )
    two = (
        tf.Variable(numbers(6, 2))
        if package is tf_keras
        else (keras.Variable(numbers(6, 2)))
    )
    for _ in range(2):
        optimizer.apply_gradients(
            [
                (tf.constant(numbers(4, 2)), one),
                (
                    tf.IndexedSlices(
                        tf.constant(numbers(3, 2)),
                        tf.constant([1, 1, 4]),
                        tf.constant([6, 2]),
                    ),
                    two,
                ),
            ]
        )
    variables = optimizer.variables
    return [one, two, len(variables() if callable(variables) else variables)]


@in_alternate_packages
def optimizers():
    def run(package, name, **options):
        return stepped(
            package, getattr(package.optimizers, name)(0.1, **options)
        )

    return {
        **{
            name: lambda package, name=name: run(package, name)
            for name in OPTIMIZERS
        },
        **{
            f"{option}": lambda package, option=option, value=value: run(
                package, "Adam", **{option: value}
            )
            for option, value in (
                ("global_clipnorm", 0.1),
                ("clipvalue", 0.1),
                ("use_ema", True),
                ("weight_decay", 0.1),
                ("no_such", 1),
            )
        },
        "scaled": lambda package: trained(
            package,
            dense,
            numbers(8, 4),
            optimizer=package.mixed_precision.LossScaleOptimizer(
                package.optimizers.SGD(0.1)
            ),
        )[1],
        "no gradient": lambda package: package.optimizers.SGD().apply_gradients(
            []
        ),
    }


@program
def optimizers_of_one_package():
    legacy = tf_keras.optimizers.legacy
    return {
        "legacy": {
            name: attempts(
                of=lambda name=name: stepped(
                    tf_keras, getattr(legacy, name)(0.1)
                )
            )
            for name in ("SGD", "Adam", "Adagrad", "Ftrl", "RMSprop")
        },
        "accumulating": attempts(
            of=lambda: trained(
                keras,
                dense,
                numbers(8, 4),
                optimizer=keras.optimizers.SGD(
                    0.1, gradient_accumulation_steps=2
                ),
            )[1]
        ),
    }


@program
def metrics():
    def run(package, name, *arguments):
        metric = getattr(package.metrics, name)(*arguments)
        metric.update_state([[0], [1], [1], [0]], [[0.2], [0.9], [0.4], [0.6]])
        metric.update_state(
            [[1], [1]], [[0.7], [0.1]], sample_weight=[1.0, 0.5]
        )
        return [metric.result(), [w.shape for w in metric.variables]]

    return {
        name: in_both(
            lambda package, name=name, arguments=arguments: run(
                package, name, *arguments
            )
        )
        for name, arguments in (
            ("AUC", ()),
            ("Precision", ()),
            ("MeanSquaredError", ()),
            ("BinaryAccuracy", ()),
            ("MeanIoU", (2,)),
            ("SensitivityAtSpecificity", (0.5,)),
        )
    }


@program
def layers():
    text = ["a b", "b c"]
    x = numbers(2, 4, 4)

    def adapted(package):
        layer = package.layers.TextVectorization(max_tokens=8)
        layer.adapt(text)
        return layer(text)

    def called(make, value=x, **options):
        return lambda package: make(package.layers)(value, **options)

    return {
        name: in_both(run)
        for name, run in {
            "text": adapted,
            "lookup": called(
                lambda layers: layers.StringLookup(vocabulary=["a", "b"]),
                tf.constant(["b", "z"]),
            ),
            "hash": called(
                lambda layers: layers.Hashing(5), tf.constant(["b"])
            ),
            "einsum": called(
                lambda layers: layers.EinsumDense(
                    "abc,cd->abd", output_shape=(None, 3)
                )
            ),
            "groups": called(lambda layers: layers.GroupNormalization(2)),
            "norm": called(lambda layers: layers.LayerNormalization()),
            "lstm": called(
                lambda layers: layers.Bidirectional(
                    layers.LSTM(3, return_sequences=True)
                )
            ),
            "gru": called(lambda layers: layers.GRU(3, unroll=True)),
            "rnn": called(lambda layers: layers.RNN(layers.SimpleRNNCell(3))),
            "attention": lambda package: package.layers.MultiHeadAttention(
                2, 2
            )(x, x),
            "dropout": called(
                lambda layers: layers.Dropout(0.5, seed=1), x, training=True
            ),
            "embedding": called(
                lambda layers: layers.Embedding(5, 2), np.array([[1, 4]])
            ),
            "no such row": called(
                lambda layers: layers.Embedding(5, 2), np.array([[1, 9]])
            ),
            "conv": called(lambda layers: layers.Conv1D(3, 2)),
            "rank": called(lambda layers: layers.Conv2D(3, 2)),
            "name": lambda package: package.layers.Dense(2).name,
            "units": lambda package: package.layers.Dense(-1),
            "weight": lambda package: package.layers.Layer().add_weight(
                shape=(2,), initializer="ones", name="w"
            ),
            "symbolic": lambda package: (
                package.layers.Dense(2)(package.Input((3,))).shape
            ),
        }.items()
    }


@program
def mistakes():
    def compiled(package):
        model = dense(package)
        model.compile("sgd", "mse")
        return model

    def not_built(package):
        return subclassed(package).summary(print_fn=lambda *_, **__: None)

    class Failing(keras.layers.Layer):
        def call(self, x):
            raise KeyError("mine")

    class OldFailing(tf_keras.layers.Layer):
        def call(self, x):
            raise KeyError("mine")

    x = numbers(8, 4)
    return {
        name: in_both(run)
        for name, run in {
            "not compiled": lambda package: dense(package).fit(x, Y, verbose=0),
            "shape": lambda package: compiled(package).fit(
                numbers(8, 5), Y, verbose=0
            ),
            "target": lambda package: compiled(package).fit(
                x, numbers(8, 7), verbose=0
            ),
            "lengths": lambda package: compiled(package).fit(
                x, Y[:3], verbose=0
            ),
            "loss": lambda package: dense(package).compile("sgd", "no such"),
            "optimizer": lambda package: dense(package).compile(
                "no such", "mse"
            ),
            "not built": not_built,
            "failing": lambda package: (
                Failing if package is keras else OldFailing
            )()(x),
            "weights": lambda package: dense(package).set_weights([x]),
            "called": lambda package: dense(package)(numbers(2, 9)),
            "text": lambda package: compiled(package).predict(
                np.array([["a"] * 4]), verbose=0
            ),
            "no data": lambda package: compiled(package).fit(
                np.zeros([0, 4]), np.zeros([0, 2]), verbose=0
            ),
            "layout": lambda package: package.Model(layout_map=1),
        }.items()
    }


@program
def operations_of_keras():
    ops, x = keras.ops, numbers(3, 4)
    return attempts(
        divide=lambda: ops.divide(x, 2),
        true_divide=lambda: ops.true_divide([1, 2], [4, 0]),
        einsum=lambda: ops.einsum("ab,cb->ac", x, x),
        einsum_wrong=lambda: ops.einsum("ab,cb", x),
        add=lambda: ops.add(x, 1),
        shapes=lambda: ops.add(x, numbers(5)),
        eye=lambda: ops.eye(3, 4, k=1, dtype="int32"),
        repeat=lambda: ops.repeat(x, 2, axis=0),
        each=lambda: ops.repeat(x, [1, 2, 0], axis=0),
        flip=lambda: ops.flip(x, axis=1),
        diag=lambda: ops.diag(x[0], k=-1),
        scatter=lambda: ops.scatter([[1], [0]], x[:2], (4, 4)),
        one_hot=lambda: ops.one_hot([1, -1, 5], 3),
        sparse_hot=lambda: ops.one_hot([1, 2], 3, sparse=True),
        ctc=lambda: ops.ctc_loss([[1]], numbers(1, 4, 3), [1], [4]),
        loop=lambda: ops.while_loop(lambda i: i < 3, lambda i: (i + 1,), (0,)),
        scan=lambda: ops.scan(lambda c, v: (c + v, c), x[0], x),
        rng=lambda: keras.random.normal((3,), seed=1),
        generator=lambda: keras.random.uniform(
            (3,), seed=keras.random.SeedGenerator(2)
        ),
    )


@exhaustive_program
def fine_tuned():
    model, _ = trained(keras, dense, numbers(8, 4))
    embedding = keras.layers.Embedding(7, 4)
    embedding.build()

    def lora():
        embedding.enable_lora(2)
        return embedding(np.array([1, 2]))

    def quantized():
        model.quantize("int8")
        return model.predict(numbers(2, 4), verbose=0)

    def mixed():
        layer = keras.layers.Dense(2, dtype="mixed_float16")
        return layer(numbers(2, 4))

    return attempts(
        lora=lora,
        quantized=quantized,
        mixed=mixed,
        again=lambda: embedding.enable_lora(2),
    )


@program
def distribution():
    distribution = keras.distribution
    return attempts(
        devices=distribution.list_devices,
        mesh=lambda: repr(
            distribution.DeviceMesh((2,), ["x"], ["cpu:0", "cpu:1"]).shape
        ),
        wrong=lambda: distribution.DeviceMesh((2,), ["x"], ["cpu:0"]),
        map=lambda: list(
            distribution.LayoutMap(
                distribution.DeviceMesh((1,), ["x"], ["cpu:0"])
            )
        ),
    )


def of_dataset(package, **options):
    model = dense(package)
    model.compile("sgd", "mse", **options)
    dataset = (
        tf.data.Dataset.from_tensor_slices((numbers(8, 4), Y))
        .shuffle(8, seed=1)
        .batch(3)
        .prefetch(tf.data.AUTOTUNE)
    )
    return list(
        map(float, model.fit(dataset, epochs=2, verbose=0).history["loss"])
    )


@exhaustive_program
def compiled_by_xla():
    return in_both(lambda package: of_dataset(package, jit_compile=True))


@in_alternate_packages
def data():
    x = numbers(8, 4)

    def with_callbacks(package):
        model = dense(package)
        model.compile("sgd", "mse")
        seen = []
        model.fit(
            x,
            Y,
            verbose=0,
            epochs=3,
            validation_split=0.25,
            callbacks=[
                package.callbacks.EarlyStopping(patience=0, monitor="loss"),
                package.callbacks.LambdaCallback(
                    on_epoch_end=lambda epoch, logs: seen.append(
                        [epoch, sorted(logs)]
                    )
                ),
            ],
        )
        return seen

    def by_batches(package):
        model = dense(package)
        model.compile("sgd", "mse")
        return [
            float(np.ravel(model.train_on_batch(x, Y))[0]),
            model.predict_on_batch(x[:2]),
            model.test_on_batch(x, Y, return_dict=True),
        ]

    def endless(package):
        model = dense(package)
        model.compile("sgd", "mse")
        dataset = tf.data.Dataset.from_tensors((x, Y)).repeat()
        return list(
            map(
                float,
                model.fit(dataset, steps_per_epoch=2, verbose=0).history[
                    "loss"
                ],
            )
        )

    return {
        "dataset": of_dataset,
        "several": lambda package: of_dataset(package, steps_per_execution=2),
        "eager": lambda package: of_dataset(package, run_eagerly=True),
        "callbacks": with_callbacks,
        "batches": by_batches,
        "endless": endless,
    }
