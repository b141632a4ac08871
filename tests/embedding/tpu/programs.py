"""Traces a program with TensorFlow's class or with tf_layoutmap's class."""

import dataclasses
from typing import Any

import tensorflow as tf

from tests.embedding.tpu import cases, traced_tpu

tpu = tf.tpu.experimental.embedding


@dataclasses.dataclass
class Traced:
    """An embedding, and the graph of a program that uses the embedding."""

    embedding: Any
    graph: Any


def _rates(kind):
    created = {}

    def rate(which):
        if which is None:
            return None
        if which not in created:
            if isinstance(which, str):
                variable = tf.Variable(0.5, trainable=False, name=which)
                created[which] = lambda: variable * 2.0
            else:
                created[which] = lambda: tf.constant(0.25 + which)
        return created[which]

    return [rate(which) for which in cases.RATES[kind]]


def _optimizer(name, rate):
    optimizer = cases.OPTIMIZERS[name]()
    if rate is not None:
        optimizer.learning_rate = rate
    return optimizer


def feature_config_of(case):
    rates = _rates(case.rates)
    quantization = (
        tpu.QuantizationConfig(4, -1.0, 0.5) if case.quantized else None
    )
    tables = [
        # The first table uses the default optimizer.
        tpu.TableConfig(
            case.num_rows[i],
            dim,
            tf.ones,
            combiner=case.combiners[i],
            optimizer=_optimizer(case.optimizers[i], rates[i]) if i else None,
            name=f"table{i}" if i else None,
            quantization_config=quantization if i else None,
        )
        for i, dim in enumerate((2, 3))
    ]
    flat = [
        tpu.FeatureConfig(
            tables[i % 2],
            **cases.INPUTS[name].settings,
            name=f"feature{i}" if case.structure == "named" else None,
        )
        for i, name in enumerate(case.inputs)
    ]
    return structured(case, flat), _optimizer(case.optimizers[0], rates[0])


def structured(case, flat):
    if case.structure == "list":
        return list(flat)
    if case.structure == "nested":
        return (
            {"b": {"x": flat[0]}, "a": tuple(flat[1:])}
            if len(flat) > 1
            else {"b": {"x": flat[0]}, "a": ()}
        )
    if case.structure == "single":
        return flat[0]
    return dict(zip("abcdef", flat))


def trace(case, cls):
    """Traces the program of `case` with the class `cls`, without a TPU."""
    strategy = traced_tpu.strategy_of(
        case.num_cores, case.num_hosts, case.num_cores_per_replica
    )
    # Learning rate variables are created outside of the scope, because the
    # cores to which the strategy would copy them do not exist.
    feature_config, optimizer = feature_config_of(case)
    with traced_tpu.replaced(), strategy.scope():
        embedding = cls(feature_config, optimizer, case.is_pipelined)
        _build(case, embedding)

        def program(*values):
            return _program(case, strategy, embedding, values)

        traced = tf.function(program, autograph=False)
        graph = traced.get_concrete_function(*_signature(case)).graph
    return Traced(embedding, graph)


def _build(case, embedding):
    inputs = [cases.INPUTS[name] for name in case.inputs]
    if case.build == "batch":
        embedding.build(per_replica_batch_size=6)
    elif case.build == "shapes":
        embedding.build(
            structured(case, [tf.TensorShape(one.spec.shape) for one in inputs])
        )
    elif case.build == "shapes_of_core":
        embedding.build(
            structured(
                case,
                [
                    tf.TensorShape(
                        [one.spec.shape[0] // 2, *one.spec.shape[1:]]
                    )
                    for one in inputs
                ],
            )
        )


def _signature(case):
    inputs = [cases.INPUTS[name] for name in case.inputs]
    specs = [one.spec for one in inputs]
    if case.weights is not None:
        specs += [
            _weight_spec(one.spec, case.weights)
            for one in inputs
            if one.takes_weights
        ]
    if case.training == "tensor":
        specs.append(tf.TensorSpec([], tf.bool))
    return specs


def _weight_spec(spec, dtype):
    if isinstance(spec, tf.SparseTensorSpec):
        return tf.SparseTensorSpec(spec.shape, dtype)
    return tf.RaggedTensorSpec(
        spec.shape, dtype, row_splits_dtype=spec.row_splits_dtype
    )


def _program(case, strategy, embedding, values):
    values = list(values)
    training = values.pop() if case.training == "tensor" else case.training
    num_inputs = len(case.inputs)
    features = structured(case, values[:num_inputs])
    weights = None
    if case.weights is not None:
        given = iter(values[num_inputs:])
        weights = structured(
            case,
            [
                next(given) if cases.INPUTS[name].takes_weights else None
                for name in case.inputs
            ],
        )
    arguments = case, strategy, embedding, features, weights, training
    if case.flow == "twice":
        return [_step(*arguments, "first"), _step(*arguments, "second")]
    if case.flow == "loop" and case.place == "outside":

        def body(i):
            return [_then(i + 1, _step(*arguments, case.name))]

        return tf.while_loop(lambda i: i < 3, body, [0])
    if case.flow == "cond" and case.place == "outside":

        def branch():
            return _then(1, _step(*arguments, case.name))

        first = tf.nest.flatten(values, expand_composites=True)[0]
        return tf.cond(tf.size(first) > 3, branch, lambda: 2)
    return _step(*arguments, case.name)


def _then(value, done):
    del done
    return value


def _step(case, strategy, embedding, features, weights, training, name):
    def run(features, weights):
        if case.place == "inside":
            embedding.enqueue(features, weights, training, name)
        return _forward_and_back(case, embedding, name)

    if case.place == "outside":
        embedding.enqueue(
            _for_replicas(strategy, features),
            _for_replicas(strategy, weights),
            training,
            name,
        )
    elif case.place == "device":
        for device in strategy.extended._tpu_devices.flatten():
            embedding.enqueue(features, weights, training, name, device)
    return strategy.run(run, args=(features, weights))


def _for_replicas(strategy, values):
    def distributed(value):
        if value is None:
            return None
        return strategy.experimental_distribute_values_from_function(
            lambda _: value
        )

    return (
        None if values is None else tf.nest.map_structure(distributed, values)
    )


def _forward_and_back(case, embedding, name):
    found = embedding.dequeue(name)
    if case.training is False:
        return found
    gradients = [
        tf.reshape(one * 2.0, (*cases.INPUTS[given].output_shape, 2 + i % 2))
        for i, (given, one) in enumerate(
            zip(case.inputs, _in_order(case, found))
        )
    ]
    if case.gradients == "none":
        gradients[0] = None
    embedding.apply_gradients(structured(case, gradients), name)
    return found


def _in_order(case, found):
    """Sorts activations from the order of tf.nest to `case.inputs`."""
    places = structured(case, list(range(len(case.inputs))))
    by_place = dict(zip(tf.nest.flatten(places), tf.nest.flatten(found)))
    return [by_place[i] for i in sorted(by_place)]
