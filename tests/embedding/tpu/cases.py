"""Configurations whose graphs are compared with TensorFlow's."""

import dataclasses
import itertools
import random
from typing import Any

import tensorflow as tf

tpu = tf.tpu.experimental.embedding
Dense, Sparse, Ragged = tf.TensorSpec, tf.SparseTensorSpec, tf.RaggedTensorSpec


@dataclasses.dataclass(frozen=True)
class Input:
    """An input of a feature, the feature's settings and output shape."""

    spec: Any
    output_shape: tuple
    settings: dict = dataclasses.field(default_factory=dict)
    takes_weights: bool = False


INPUTS = {
    "dense": Input(Dense([6], tf.int32), (6,)),
    "dense_int64": Input(Dense([6], tf.int64), (6,)),
    "dense_int8": Input(Dense([6], tf.int8), (6,)),
    "dense_column": Input(Dense([6, 1], tf.int32), (6,)),
    "dense_3d": Input(Dense([2, 3, 1], tf.int32), (2, 3)),
    "dense_shaped": Input(
        Dense([2, 3, 1], tf.int64), (2, 3), {"output_shape": [2, 3]}
    ),
    "sparse": Input(Sparse([6, 4], tf.int64), (6,), takes_weights=True),
    "sparse_int32": Input(Sparse([6, 4], tf.int32), (6,), takes_weights=True),
    "sparse_open": Input(Sparse([6, None], tf.int64), (6,), takes_weights=True),
    "sparse_3d": Input(Sparse([2, 3, 4], tf.int64), (2, 3), takes_weights=True),
    "sparse_shaped": Input(
        Sparse([6, 4], tf.int64),
        (6,),
        {"output_shape": [6]},
        takes_weights=True,
    ),
    "sparse_sequence": Input(
        Sparse([6, 4], tf.int64), (6, 2), {"max_sequence_length": 2}
    ),
    "sparse_3d_sequence": Input(
        Sparse([2, 3, 4], tf.int64), (2, 3), {"max_sequence_length": 2}
    ),
    "ragged": Input(Ragged([6, None], tf.int64), (6,), takes_weights=True),
    "ragged_int32": Input(
        Ragged([6, None], tf.int32, row_splits_dtype=tf.int32),
        (6,),
        takes_weights=True,
    ),
    "ragged_sequence": Input(
        Ragged([6, None], tf.int64), (6, 3), {"max_sequence_length": 3}
    ),
    "ragged_shaped": Input(
        Ragged([6, None], tf.int64),
        (2, 3),
        {"output_shape": [2, 3]},
        takes_weights=True,
    ),
    "ragged_spread": Input(
        Ragged([2, None], tf.int64), (2, 3), {"output_shape": [2, 3]}
    ),
    "ragged_shaped_sequence": Input(
        Ragged([6, None], tf.int64),
        (2, 3),
        {"output_shape": [2, 3], "max_sequence_length": 5},
    ),
}

COMMON = {
    "clip_weight_min": -2.5,
    "clip_weight_max": 0.1,
    "weight_decay_factor": 1e-3,
    "clipvalue": (-0.3, None),
    "multiply_weight_decay_factor_by_learning_rate": True,
    "low_dimensional_packing_status": True,
}


def make_slots(table, names, initializers):
    return {
        name: tf.Variable(
            lambda shape, dtype, one=one: one(shape, dtype=dtype),
            shape=table.shape,
            dtype=tf.float32,
            trainable=False,
            name=name,
        )
        for name, one in zip(names, initializers)
    }


OPTIMIZERS = {
    "sgd": lambda: tpu.SGD(0.1),
    "sgd_sequential": lambda: tpu.SGD(0.1, use_gradient_accumulation=False),
    "sgd_clipped": lambda: tpu.SGD(0.1, clipvalue=0.7),
    "sgd_zero_decay": lambda: tpu.SGD(0.0, weight_decay_factor=0.0),
    "sgd_all": lambda: tpu.SGD(0.1, **COMMON),
    "adagrad": lambda: tpu.Adagrad(0.1),
    "adagrad_all": lambda: tpu.Adagrad(
        0.1, initial_accumulator_value=0.7, **COMMON
    ),
    "adagrad_limited_below": lambda: tpu.Adagrad(0.1, clip_weight_min=0.0),
    "adagrad_own_slots": lambda: tpu.Adagrad(
        0.1, slot_variable_creation_fn=make_slots
    ),
    "adagrad_momentum": lambda: tpu.AdagradMomentum(0.1),
    "adagrad_momentum_all": lambda: tpu.AdagradMomentum(
        0.1,
        momentum=0.9,
        use_nesterov=True,
        exponent=3.0,
        beta2=0.5,
        epsilon=1e-3,
        **COMMON,
    ),
    "adam": lambda: tpu.Adam(0.1),
    "adam_all": lambda: tpu.Adam(
        0.1,
        beta_1=0.5,
        beta_2=0.25,
        epsilon=1e-3,
        lazy_adam=False,
        sum_inside_sqrt=False,
        **COMMON,
    ),
    "adam_sequential": lambda: tpu.Adam(0.1, use_gradient_accumulation=False),
    "ftrl": lambda: tpu.FTRL(0.1),
    "ftrl_all": lambda: tpu.FTRL(
        0.1,
        learning_rate_power=-0.25,
        l1_regularization_strength=0.5,
        l2_regularization_strength=0.125,
        beta=0.75,
        initial_accumulator_value=0.5,
        multiply_linear_by_learning_rate=True,
        allow_zero_accumulator=True,
        **COMMON,
    ),
}

# Dynamic learning rates of the two tables. Equal numbers stand for the same
# callable, and None stands for a constant rate.
RATES = {
    "constant": (None, None),
    "first": (0, None),
    "second": (None, 0),
    "shared": (0, 0),
    "own": (0, 1),
    "variables": ("v0", "v1"),
    "shared_variable": ("v0", "v0"),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One program.

    Attributes:
      inputs: Names of `INPUTS`, one per feature. The features use two tables in
        turn.
      place: Where `enqueue` is called: `"inside"` or `"outside"` of
        strategy.run, or `"device"` for one call per device.
      build: Argument of `build`: `"shapes"` or `"batch"`. With `"inputs"`,
        `build` is not called, and sizes are inferred from the inputs.
      flow: `"once"`, `"loop"`, `"cond"`, or `"twice"` for two step names.
      training: True, False, or `"tensor"`.
      gradients: `"all"`, or `"none"` if the first gradient is missing.
    """

    inputs: tuple = ("dense", "sparse", "ragged")
    place: str = "outside"
    weights: Any = None
    combiners: tuple = ("sum", "mean")
    optimizers: tuple = ("sgd", "adagrad")
    rates: str = "constant"
    name: str | None = None
    is_pipelined: bool = False
    num_cores: int = 2
    num_hosts: int = 1
    num_cores_per_replica: int | None = None
    build: str = "inputs"
    flow: str = "once"
    training: Any = True
    gradients: str = "all"
    num_rows: tuple = (10, 3)
    quantized: bool = False
    structure: str = "dict"

    def __str__(self):
        default = Case()
        changed = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(default, field.name)
        ]
        return ",".join(changed).replace(" ", "") or "default"


def named_cases():
    """Yields each value of each setting, inside and outside of strategy.run."""
    for place in ("inside", "outside", "device"):
        for name in INPUTS:
            yield Case(inputs=(name,), place=place)
        for cores, hosts in ((1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (4, 4)):
            yield Case(
                place=place,
                num_cores=cores,
                num_hosts=hosts,
                optimizers=("adam", "sgd"),
            )
    for place in ("inside", "outside"):
        for dtype in (tf.float32, tf.float64, tf.int32):
            yield Case(
                inputs=("sparse", "ragged", "sparse_3d"),
                place=place,
                weights=dtype,
            )
        for name in (None, "step"):
            for training in (True, False):
                yield Case(place=place, name=name, training=training)
        for flow in ("loop", "cond", "twice"):
            yield Case(place=place, flow=flow)
        for rates in RATES:
            yield Case(place=place, rates=rates)
        yield Case(place=place, is_pipelined=True)
        yield Case(place=place, gradients="none")
        yield Case(place=place, build="shapes")
        yield Case(
            place=place, build="batch", inputs=("dense", "sparse_sequence")
        )
        yield Case(
            place=place,
            num_cores=4,
            num_cores_per_replica=2,
            inputs=("dense", "sparse"),
            build="shapes_of_core",
        )
    yield Case(place="inside", training="tensor")
    for combiners in itertools.product(("sum", "mean", "sqrtn"), repeat=2):
        yield Case(combiners=combiners)
    for optimizer in OPTIMIZERS:
        yield Case(inputs=("dense",), optimizers=(optimizer, "sgd"))
        yield Case(
            inputs=("dense", "dense"),
            num_cores=2,
            num_hosts=2,
            optimizers=("sgd", optimizer),
            rates="own",
        )
    for structure in ("list", "nested", "single", "named"):
        yield Case(structure=structure)
    yield Case(quantized=True)
    # The first table has fewer rows than the number of hosts. The number of
    # rows of the second table is not divisible by the number of hosts.
    yield Case(num_cores=4, num_hosts=4, num_rows=(1, 6))


def drawn_cases(number, seed=20):
    """Yields randomly combined settings."""
    source = random.Random(seed)
    optimizers = sorted(OPTIMIZERS)
    for _ in range(number):
        cores, hosts = source.choice(((1, 1), (2, 1), (2, 2), (4, 2), (4, 4)))
        place = source.choice(("inside", "outside", "device"))
        yield Case(
            inputs=tuple(
                source.choices(sorted(INPUTS), k=source.randint(1, 5))
            ),
            place=place,
            weights=source.choice((None, tf.float32)),
            combiners=tuple(source.choices(("sum", "mean", "sqrtn"), k=2)),
            optimizers=tuple(source.choices(optimizers, k=2)),
            rates=source.choice(sorted(RATES)),
            name=source.choice((None, "step")),
            is_pipelined=source.random() < 0.5,
            num_cores=cores,
            num_hosts=hosts,
            flow=source.choice(("once", "loop", "cond", "twice")),
            training=source.choice((True, True, False)),
            gradients=source.choice(("all", "none")),
            quantized=source.random() < 0.5,
            num_rows=(source.randint(1, 12), source.randint(1, 12)),
        )
