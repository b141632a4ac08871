"""Tables on the host beside a TPU: the functions that TPUStrategy traces.

The strategy is TensorFlow's own. `replicated_graph.runner` runs the traced
functions, whose TPU programs XLA compiles for the CPU. The results are compared
with a `MirroredStrategy`. tests/contract compares the results of an emulated
TPU.
"""

import collections
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
from tensorflow.python.distribute import values

import tf_layoutmap as tlm
from tests import strategies
from tests.accelerators import kernel_lists
from tests.embedding.tpu import replicated_graph, traced_tpu
from tf_layoutmap._core import tf_private
from tf_layoutmap.embedding import backend
from tf_layoutmap.embedding.host.tpu_backend import HostBackendOfTPU
from tf_layoutmap.embedding.tpu.backend import TPUBackend

tpu = tf.tpu.experimental.embedding
NUM_ROWS, DIM, BATCH, NUM_REPLICAS = 12, 2, 4, 2


@pytest.fixture(autouse=True)
def no_tpu():
    with traced_tpu.replaced():
        yield


def initializer(shape, dtype=tf.float32):
    return tf.cast(tf.reshape(tf.range(shape[0] * shape[1]), shape), dtype)


def embedding_of(strategy, optimizer=None, *, is_open=False, **options):
    """Returns an embedding with one table and two features."""
    if is_open:
        options["vocabularies"] = {"words": tlm.vocabulary.OpenVocabulary(80)}
    table = tpu.TableConfig(
        80 if is_open else NUM_ROWS,
        DIM,
        tf.constant_initializer(1.0) if is_open else initializer,
        combiner="sum",
        name="words",
    )
    with strategy.scope():
        return tlm.TPUEmbedding(
            {
                "a": tpu.FeatureConfig(table),
                "b": tpu.FeatureConfig(table, max_sequence_length=3),
            },
            optimizer or tpu.Adagrad(0.5),
            engine="host",
            **options,
        )


def spec_of(kind):
    return {
        "dense": tf.TensorSpec([BATCH, 3], tf.int64),
        "ragged": tf.RaggedTensorSpec([BATCH, None], tf.int64, 1),
        "sparse": tf.SparseTensorSpec([BATCH, 3], tf.int64),
        "strings": tf.TensorSpec([BATCH, 3], tf.string),
    }[kind]


def batch_of(kind, seed):
    """Returns ids of one replica."""
    ids = np.random.default_rng(seed).integers(0, NUM_ROWS, [BATCH, 3])
    if kind == "ragged":
        return tf.RaggedTensor.from_row_lengths(ids.ravel(), [3, 0, 5, 4])
    if kind == "sparse":
        return tf.sparse.from_dense(tf.constant(ids))
    if kind == "strings":
        return tf.strings.as_string(ids)
    return tf.constant(ids)


def in_replicas(strategy, replica):
    """Returns a function that runs `replica` with the ids of each replica."""

    # The name of a lambda is not a valid scope name for a TPU program.
    def program(*ids):
        return strategy.run(replica, (values.PerReplica(ids),)).values

    return tf.function(program, autograph=False)


def step_of(strategy, embedding, *, inside=True, training=True):
    """Returns a function that runs one step with the ids of both replicas."""

    def replica(ids):
        if inside:
            embedding.enqueue({"a": ids, "b": ids}, training=training)
        found = embedding.dequeue()
        if training:
            embedding.apply_gradients(
                {"a": found["a"] * 0.5 - 1.0, "b": found["b"] * 0.25}
            )
        return found["a"]

    def step(*ids):
        ids = values.PerReplica(ids)
        if not inside:
            embedding.enqueue({"a": ids, "b": ids}, training=training)
        return strategy.run(replica, (ids,)).values

    return tf.function(step, autograph=False)


def traced(step, kind="dense"):
    return step.get_concrete_function(*[spec_of(kind)] * NUM_REPLICAS)


def missing_kernels(graph):
    """Returns the ops of the TPU program that have no kernel on a TPU."""
    return kernel_lists.missing_in_nodes(
        one.node_def
        for one in replicated_graph.program_ops(graph)
        # The compiler removes this op.
        if one.type != "TPUReplicateMetadata"
    )


def run_on_tpu(step, kind, seeds):
    """Runs a step of the TPUStrategy for each pair of seeds."""
    concrete = traced(step, kind)
    assert not missing_kernels(concrete.graph)
    run = replicated_graph.runner(concrete, NUM_REPLICAS)
    return [
        run(*tf.nest.flatten([batch_of(kind, s) for s in pair], True))
        for pair in seeds
    ]


SEEDS = [(0, 1), (2, 3), (4, 5)]


def assert_same_tables(one, other):
    for ours, expected in (
        (one.embedding_tables, other.embedding_tables),
        *zip(one.slot_variables.values(), other.slot_variables.values()),
    ):
        for a, b in zip(ours.values(), expected.values()):
            np.testing.assert_array_equal(a.numpy(), b.numpy())


_CASES = list(
    itertools.product(
        ["dense", "ragged", "sparse", "strings"], [True, False], [False, True]
    )
)


@pytest.mark.parametrize(
    "kind, inside, pipelined",
    [
        pytest.param(
            *case,
            # These cases contain each value of each parameter.
            marks=[pytest.mark.exhaustive] * (number % 5 != 0),
        )
        for number, case in enumerate(_CASES)
    ],
)
def test_steps_match_a_mirrored_strategy_bitwise(kind, inside, pipelined):
    options = {
        "is_open": kind == "strings",
        "pipeline_execution_with_tensor_core": pipelined,
    }
    mirrored = strategies.mirrored(NUM_REPLICAS)
    reference = embedding_of(mirrored, **options)
    expected_step = step_of(mirrored, reference, inside=inside)
    expected = [
        expected_step(*[batch_of(kind, one) for one in pair]) for pair in SEEDS
    ]
    strategy = traced_tpu.strategy_of(NUM_REPLICAS)
    embedding = embedding_of(strategy, **options)
    found = run_on_tpu(step_of(strategy, embedding, inside=inside), kind, SEEDS)
    for ours, theirs in zip(found, expected):
        for a, b in zip(ours, theirs):
            np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert (
        embedding.stats()["num_updates"] == (reference.stats()["num_updates"])
    )
    assert_same_tables(embedding, reference)


def test_the_program_contains_only_ops_with_kernels_of_a_tpu():
    strategy = traced_tpu.strategy_of(NUM_REPLICAS)
    rate = tf.Variable(0.5)
    embedding = embedding_of(strategy, tpu.Adagrad(lambda: rate * 0.5))
    graph = traced(step_of(strategy, embedding)).graph
    program = {one.type for one in replicated_graph.program_ops(graph)}
    assert {"Mul", "Sub"} <= program
    assert not missing_kernels(graph)
    ours = [
        one
        for one in graph.get_operations()
        if one.type.startswith("LayoutMap>")
    ]
    assert {one.type for one in ours} >= {
        f"LayoutMap>{name}" for name in ("EnqueueStep", "DequeueStep")
    }
    for one in ours:
        assert not replicated_graph.is_in_program(one)
        assert tf.DeviceSpec.from_string(one.device).device_type == "CPU"


def test_ops_of_the_host_do_not_depend_on_ops_of_the_program():
    strategy = traced_tpu.strategy_of(NUM_REPLICAS)
    graph = traced(step_of(strategy, embedding_of(strategy))).graph
    for op in replicated_graph.host_ops(graph):
        if op.type in ("TPUReplicatedOutput", "TPUCompilationResult"):
            continue
        if op.type in ("Identity", "NoOp"):  # Results of the function.
            continue
        for one in [*[one.op for one in op.inputs], *op.control_inputs]:
            assert not replicated_graph.is_in_program(one), (op, one)


def _depends_on_program(op, known):
    """Returns whether an op waits for results of the TPU program."""
    if op not in known:
        known[op] = op.type == "TPUReplicatedOutput" or any(
            _depends_on_program(one, known)
            for one in [*[one.op for one in op.inputs], *op.control_inputs]
        )
    return known[op]


def test_the_next_lookup_does_not_wait_for_the_program():
    strategy = traced_tpu.strategy_of(NUM_REPLICAS)
    embedding = embedding_of(strategy, pipeline_execution_with_tensor_core=True)
    graph = traced(step_of(strategy, embedding, inside=False)).graph
    waits = {}
    found = collections.defaultdict(set)
    for op in graph.get_operations():
        if op.type.startswith("LayoutMap>"):
            kind = op.type.removeprefix("LayoutMap>")
            found[kind].add(_depends_on_program(op, waits))
    assert found["ApplyStep"] == {True}
    for kind in ("LandUpdate", "PrefetchStep"):
        assert found[kind] == {False}


@pytest.mark.parametrize(
    "is_open", [False, pytest.param(True, marks=pytest.mark.exhaustive)]
)
def test_steps_that_are_enqueued_ahead_match_a_mirrored_strategy(is_open):
    kind = "strings" if is_open else "dense"

    def train(strategy, run_with):
        embedding = embedding_of(
            strategy, is_open=is_open, pipeline_execution_with_tensor_core=True
        )

        def replica(ids):
            found = embedding.dequeue()
            embedding.apply_gradients(
                {"a": found["a"] * 0.5 - 1.0, "b": found["b"] * 0.25}
            )
            return found["a"]

        def enqueue(*ids):
            embedding.enqueue(dict.fromkeys("ab", values.PerReplica(ids)))

        def program(*ids):
            enqueue(*ids)
            return strategy.run(replica, (values.PerReplica(ids),)).values

        enqueue(*[batch_of(kind, one) for one in (6, 7)])
        return embedding, run_with(tf.function(program, autograph=False))

    reference, expected = train(
        strategies.mirrored(NUM_REPLICAS),
        lambda step: [
            step(*[batch_of(kind, one) for one in pair]) for pair in SEEDS
        ],
    )
    embedding, found = train(
        traced_tpu.strategy_of(NUM_REPLICAS),
        lambda step: run_on_tpu(step, kind, SEEDS),
    )
    for ours, theirs in zip(found, expected):
        for a, b in zip(ours, theirs):
            np.testing.assert_array_equal(a.numpy(), b.numpy())
    assert_same_tables(embedding, reference)


def test_ids_that_the_function_computes_from_its_arguments():
    strategy = traced_tpu.strategy_of(NUM_REPLICAS)
    embedding = embedding_of(strategy)
    plain = embedding_of(strategy)

    def replica(one, which, change):
        ids = change(one)
        which.enqueue({"a": ids, "b": ids})
        found = which.dequeue()
        which.apply_gradients({"a": found["a"], "b": None})
        return found["a"]

    def step_with(which, change):
        return in_replicas(strategy, lambda one: replica(one, which, change))

    run_on_tpu(step_with(embedding, lambda ids: 11 - ids), "dense", SEEDS[:1])
    run = replicated_graph.runner(
        traced(step_with(plain, lambda ids: ids)), NUM_REPLICAS
    )
    run(*[11 - batch_of("dense", one) for one in SEEDS[0]])
    assert_same_tables(embedding, plain)


def trace(strategy, function):
    return traced(in_replicas(strategy, function))


def test_unsupported_places_of_calls_raise():
    strategy = traced_tpu.strategy_of(NUM_REPLICAS)
    embedding = embedding_of(strategy)
    embedding.build()
    offset = tf.Variable(tf.constant(1, tf.int64))

    def enqueue(change):
        return lambda ids: embedding.enqueue(dict.fromkeys("ab", change(ids)))

    for change in (
        lambda ids: ids + offset,
        lambda ids: tf.function(lambda one: one + 1)(ids),
        lambda ids: ids + tf.random.uniform([], 0, 2, tf.int64),
    ):
        with pytest.raises(ValueError, match="computed from arguments without"):
            trace(strategy, enqueue(change))
    with pytest.raises(ValueError, match="`device` must be None inside"):
        trace(
            strategy,
            lambda ids: embedding.enqueue({"a": ids, "b": ids}, device="TPU:0"),
        )
    for method, call in (
        ("enqueue", lambda ids: embedding.enqueue({"a": ids, "b": ids})),
        ("dequeue", lambda ids: embedding.dequeue()),
        (
            "apply_gradients",
            lambda ids: embedding.apply_gradients({"a": None, "b": None}),
        ),
    ):

        def in_branch(ids, call=call):
            tf.cond(ids[0, 0] > 0, lambda: (call(ids), 1)[1], lambda: 1)

        with pytest.raises(RuntimeError, match=f"`{method}` must be called d"):
            trace(strategy, in_branch)
    with pytest.raises(RuntimeError, match="inside `strategy.run`"):
        embedding.dequeue()


def test_two_training_steps_in_one_program_raise():
    strategy = traced_tpu.strategy_of(NUM_REPLICAS)
    embedding = embedding_of(strategy)

    def replica(ids):
        for _ in range(2):
            embedding.enqueue({"a": ids, "b": ids})
            embedding.apply_gradients(embedding.dequeue())

    with pytest.raises(RuntimeError, match="Call `strategy.run` once per step"):
        trace(strategy, replica)


def test_a_function_without_gradients_is_forward_only():
    strategy = traced_tpu.strategy_of(NUM_REPLICAS)
    embedding = embedding_of(strategy)

    def replica(ids):
        embedding.enqueue({"a": ids, "b": ids}, name="evaluate")
        return embedding.dequeue(name="evaluate")["a"]

    step = in_replicas(strategy, replica)
    for found in run_on_tpu(step, "dense", SEEDS):
        assert found[0].shape == [BATCH, DIM]
    assert not any(embedding.stats()["awaiting"])


def test_a_missing_gradient_is_zeros_and_dynamic_rates_are_called_once():
    def train(strategy, run):
        rate = tf.Variable(0.25)
        calls = []

        def current_rate():
            calls.append(1)
            return rate * 2.0

        embedding = embedding_of(
            strategy, tpu.AdagradMomentum(current_rate, 0.5)
        )

        def replica(ids):
            embedding.enqueue({"a": ids, "b": ids})
            found = embedding.dequeue()
            embedding.apply_gradients({"a": found["a"], "b": None})
            return found["a"]

        run(in_replicas(strategy, replica))
        return embedding, len(calls)

    def run_mirrored(step):
        for pair in SEEDS:
            step(*[batch_of("dense", one) for one in pair])

    reference, _ = train(strategies.mirrored(NUM_REPLICAS), run_mirrored)
    embedding, num_calls = train(
        traced_tpu.strategy_of(NUM_REPLICAS),
        lambda step: run_on_tpu(step, "dense", SEEDS),
    )
    assert num_calls == 1  # In the only trace.
    assert_same_tables(embedding, reference)


@pytest.mark.parametrize(
    "feature, kind",
    [
        (traced_tpu.V1, TPUBackend),
        (traced_tpu.V2, HostBackendOfTPU),
        (traced_tpu.UNSUPPORTED, HostBackendOfTPU),
    ],
)
def test_auto_selects_the_host_without_an_embedding_engine(
    feature, kind, monkeypatch, caplog
):
    monkeypatch.setattr(backend, "_has_logged_host", False)
    for _ in range(2):
        strategy = traced_tpu.strategy_of(NUM_REPLICAS, embedding=feature)
        with strategy.scope():
            embedding = tlm.TPUEmbedding(
                tpu.FeatureConfig(tpu.TableConfig(4, 2, name="words")),
                tpu.SGD(0.1),
            )
        assert type(embedding._state.backend) is kind
    found = [one for one in caplog.messages if "are on the host" in one]
    assert len(found) == (kind is HostBackendOfTPU)


def _plain_variable(next_creator, **keywords):
    """Creates variables that the strategy would create on the TPU."""
    del next_creator
    return tf_private.ResourceVariable(
        keywords["initial_value"],
        trainable=keywords.get("trainable"),
        name=keywords.get("name"),
        dtype=keywords.get("dtype"),
    )


def _layer(version, kind):
    layers = tlm.layers if version is keras else tlm.layers.tf_keras
    if kind == "open":
        layer = layers.ShardedEmbedding(
            tlm.vocabulary.OpenVocabulary(80),
            DIM,
            embeddings_initializer=version.initializers.Constant(1.0),
            optimizer=tpu.Adagrad(0.5),
            mask_zero=True,
            name="layer",
        )
        return layer, layer
    if kind in ("row optimizer", "model's optimizer"):
        layer = layers.ShardedEmbedding(
            NUM_ROWS,
            DIM,
            num_shards=3,
            embeddings_initializer=version.initializers.Constant(1.0),
            optimizer=tpu.Adagrad(0.5) if kind == "row optimizer" else "model",
            name="layer",
        )
        # Two calls in one step.
        return layer, lambda ids: layer(ids) * layer(ids[:, ::-1])
    table = tpu.TableConfig(
        NUM_ROWS, DIM, initializer, combiner="sum", name="words"
    )
    layer = layers.TPUEmbedding(
        {"a": tpu.FeatureConfig(table)},
        keras.optimizers.Adagrad(
            keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
        ),
        engine="auto",
        name="layer",
    )
    return layer, lambda ids: layer({"a": ids})["a"]


def _training_of(layer, call, optimizer):
    """Returns a function that trains a layer with the ids of one replica."""

    def replica(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(call(ids))
        weights = layer.trainable_variables
        gradients = tape.gradient(loss, weights)
        optimizer.apply_gradients(zip(gradients, weights))
        return loss

    return replica


def _train_layer(strategy, version, kind, run, creators):
    with strategy.scope(), tf.variable_creator_scope(creators):
        layer, call = _layer(version, kind)
        # Keras does not compute shapes in the traced function.
        layer.build([BATCH, 3])
        optimizer = version.optimizers.SGD(0.5)
        optimizer.build(layer.trainable_variables)

        embedding = (
            layer._key_table.embedding if kind == "open" else layer.embedding
        )
        replica = _training_of(layer, call, optimizer)
        run(in_replicas(strategy, replica), embedding)
    return embedding


def _check_schedule_is_on_host(step, embedding):
    """Checks that the program does not read the counter of a schedule."""
    counter = getattr(embedding, "schedule_updates", None)
    if counter is None:
        return
    graph = traced(step).graph
    [passed] = [
        inner for outer, inner in graph.captures if outer is counter.handle
    ]
    readers = passed.consumers()
    assert readers
    assert not any(replicated_graph.is_in_program(one) for one in readers)


@pytest.mark.parametrize(
    "version, kind",
    [
        (keras, "open"),
        (tf_keras, "closed"),
        pytest.param(keras, "closed", marks=pytest.mark.exhaustive),
        pytest.param(tf_keras, "open", marks=pytest.mark.exhaustive),
    ],
)
def test_layers_train_in_the_program_of_all_replicas(version, kind):
    def run_mirrored(step, embedding):
        del embedding
        for pair in SEEDS:
            step(*[batch_of("dense", one) for one in pair])

    def run_beside_tpu(step, embedding):
        run_on_tpu(step, "dense", SEEDS)
        _check_schedule_is_on_host(step, embedding)

    reference = _train_layer(
        strategies.mirrored(NUM_REPLICAS),
        version,
        kind,
        run_mirrored,
        lambda next_creator, **keywords: next_creator(**keywords),
    )
    embedding = _train_layer(
        traced_tpu.strategy_of(NUM_REPLICAS, embedding=traced_tpu.UNSUPPORTED),
        version,
        kind,
        run_beside_tpu,
        _plain_variable,
    )
    assert embedding.stats()["num_updates"] == len(SEEDS)
    assert_same_tables(embedding, reference)


@pytest.mark.parametrize("version", [keras, tf_keras])
@pytest.mark.parametrize("kind", ["row optimizer", "model's optimizer"])
def test_a_closed_sharded_embedding_trains_beside_the_program(version, kind):
    """The rate of the model's optimizer is computed in the program."""

    def trained(strategy, creators, run):
        with strategy.scope(), tf.variable_creator_scope(creators):
            layer, call = _layer(version, kind)
            layer.build([BATCH, 3])
            optimizer = version.optimizers.SGD(0.5, momentum=0.5)
            optimizer.build(layer.trainable_variables)
            run(in_replicas(strategy, _training_of(layer, call, optimizer)))
        return layer

    def run_mirrored(step):
        for pair in SEEDS:
            step(*[batch_of("dense", one) for one in pair])

    expected = trained(
        strategies.mirrored(NUM_REPLICAS),
        lambda next_creator, **keywords: next_creator(**keywords),
        run_mirrored,
    )
    layer = trained(
        traced_tpu.strategy_of(NUM_REPLICAS, embedding=traced_tpu.UNSUPPORTED),
        _plain_variable,
        lambda step: run_on_tpu(step, "dense", SEEDS),
    )
    np.testing.assert_array_equal(
        layer.embeddings.numpy(), expected.embeddings.numpy()
    )
    assert np.any(layer.embeddings.numpy() != 1)
    for name, slot in expected.optimizer.slots.items():
        np.testing.assert_array_equal(
            layer.optimizer.slots[name].numpy(), slot.numpy()
        )


def test_unsupported_settings_of_a_closed_sharded_embedding_raise():
    with traced_tpu.strategy_of(NUM_REPLICAS).scope():
        layer = tlm.layers.ShardedEmbedding(
            4, 2, optimizer=tpu.SGD(0.1), embeddings_regularizer="l2"
        )
        with pytest.raises(ValueError, match="`activity_regularizer`"):
            layer.build([3])


def test_replicas_of_several_cores_raise():
    strategy = traced_tpu.strategy_of(4, num_cores_per_replica=2)
    with pytest.raises(NotImplementedError, match="must have one core"):
        embedding_of(strategy)


def test_a_layer_with_tables_on_the_tpu_is_traced_once_for_all_replicas():
    strategy = traced_tpu.strategy_of(NUM_REPLICAS)
    with strategy.scope(), tf.variable_creator_scope(_plain_variable):
        table = tpu.TableConfig(NUM_ROWS, DIM, initializer, name="words")
        layer = tlm.layers.TPUEmbedding(tpu.FeatureConfig(table), tpu.SGD(0.5))
        layer.build()
        optimizer = keras.optimizers.SGD(0.5)
        optimizer.build(layer.trainable_variables)

    graph = (
        in_replicas(strategy, _training_of(layer, layer, optimizer))
        .get_concrete_function(*[tf.TensorSpec([BATCH], tf.int64)] * 2)
        .graph
    )
    types = [one.type for one in graph.get_operations()]
    assert types.count("RecvTPUEmbeddingActivations") == 1
    assert types.count("SendTPUEmbeddingGradients") == 1
