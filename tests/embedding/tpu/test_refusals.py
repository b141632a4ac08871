"""Tests errors under TPUStrategy, and differences from TensorFlow."""

import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.embedding.tpu import canonical, cases, programs, traced_tpu
from tf_layoutmap.embedding.tpu import batches, config_proto, tables
from tf_layoutmap.embedding.tpu import ops as tpu_ops

tpu = tf.tpu.experimental.embedding


@pytest.fixture(autouse=True)
def no_tpu():
    with traced_tpu.replaced():
        yield


def embedding_of(
    feature=None,
    optimizer=True,
    cls=tlm.TPUEmbedding,
    *,
    num_cores=2,
    num_cores_per_replica=None,
    **options,
):
    strategy = traced_tpu.strategy_of(
        num_cores, num_cores_per_replica=num_cores_per_replica
    )
    feature = feature or tpu.FeatureConfig(
        tpu.TableConfig(10, 2, tf.ones, name="words")
    )
    with strategy.scope():
        return strategy, cls(
            {"a": feature},
            tpu.SGD(0.1) if optimizer is True else optimizer,
            **options,
        )


def feature_of(num_rows=10, table=None, **settings):
    return tpu.FeatureConfig(
        tpu.TableConfig(num_rows, 2, tf.ones, name="words", **(table or {})),
        **settings,
    )


def traced(function, *specs):
    # The name of a lambda is not a valid scope name for a TPU program.
    def program(*values):
        return function(*values)

    return (
        tf.function(program, autograph=False)
        .get_concrete_function(*specs)
        .graph
    )


def enqueue(value_or_spec, weights=None, **settings):
    """Traces a program that calls `enqueue` inside strategy.run."""
    strategy, embedding = embedding_of(feature_of(**settings))
    specs = [value_or_spec] + ([] if weights is None else [weights])

    def step(value, weight=None):
        embedding.enqueue(
            {"a": value}, None if weight is None else {"a": weight}
        )

    return traced(lambda *values: strategy.run(step, args=values), *specs)


@pytest.mark.parametrize(
    "spec, message",
    [
        (tf.TensorSpec([6, 3], tf.int32), "must have 1 as its last dimension"),
        (tf.TensorSpec([], tf.int32), "rank of 1 or more"),
        (tf.TensorSpec(None, tf.int32), "known rank"),
        (tf.TensorSpec([None], tf.int32), "drop_remainder=True"),
        (tf.SparseTensorSpec([6], tf.int64), "rank of 2 or more"),
        (tf.SparseTensorSpec([6, 2**31], tf.int64), "indices .* in 32 bits"),
        (tf.RaggedTensorSpec([6, None, None], tf.int64), "known rank of 2"),
    ],
)
def test_unsupported_inputs_raise(spec, message):
    with pytest.raises(ValueError, match=message):
        enqueue(spec)


@pytest.mark.parametrize("dtype", [tf.float32, tf.uint64, tf.string])
def test_ids_not_representable_in_int64_raise(dtype):
    # TensorFlow's class casts such ids, and large values wrap or are rounded.
    with pytest.raises(TypeError, match="must be integers .* int64 holds"):
        enqueue(tf.TensorSpec([6], dtype))


def test_weights_that_do_not_match_their_ids_raise():
    ragged = tf.RaggedTensorSpec([6, None], tf.int64)
    with pytest.raises(ValueError, match="Weight specified for dense input"):
        enqueue(tf.TensorSpec([6], tf.int32), tf.TensorSpec([6]))
    with pytest.raises(ValueError, match="does not match type input which is"):
        enqueue(ragged, tf.SparseTensorSpec([6, 4], tf.float32))
    with pytest.raises(TypeError, match="must be numbers"):
        enqueue(ragged, tf.RaggedTensorSpec([6, None], tf.string))
    # TensorFlow's class accepts such weights and sends them, but they have no
    # effect.
    with pytest.raises(ValueError, match="sequence feature 'a'"):
        enqueue(
            ragged,
            tf.RaggedTensorSpec([6, None], tf.float32),
            max_sequence_length=2,
        )


def test_a_dense_input_of_a_sequence_feature_raises():
    # TensorFlow's class ignores `max_sequence_length` for dense inputs.
    with pytest.raises(ValueError, match="must be a tf.RaggedTensor"):
        enqueue(tf.TensorSpec([6], tf.int32), max_sequence_length=2)


def test_inconsistent_shapes_raise():
    strategy, embedding = embedding_of()
    embedding.build(per_replica_batch_size=6)
    with pytest.raises(ValueError, match="Inconsistent shape found"):
        traced(
            lambda x: strategy.run(
                lambda x: embedding.enqueue({"a": x}), args=(x,)
            ),
            tf.TensorSpec([4], tf.int64),
        )
    with pytest.raises(ValueError, match="Inconsistent shape found"):
        embedding.build({"a": tf.TensorShape([4])})
    with pytest.raises(ValueError, match="divide the 6 positions"):
        enqueue(tf.RaggedTensorSpec([4, None], tf.int64), output_shape=[2, 3])
    for wrong in (0, -1, True):
        with pytest.raises(ValueError, match="batch size"):
            embedding_of()[1].build(per_replica_batch_size=wrong)
    with pytest.raises(ValueError, match="full shape of every activation"):
        embedding_of()[1].build()


def test_unverified_enqueue_requires_a_built_embedding():
    strategy, embedding = embedding_of()
    embedding._verify_output_shapes_on_enqueue = False
    with pytest.raises(ValueError, match="call `build`"):
        traced(
            lambda x: strategy.run(
                lambda x: embedding.enqueue({"a": x}), args=(x,)
            ),
            tf.TensorSpec([6], tf.int32),
        )


def test_control_flow_inside_a_program_raises():
    strategy, embedding = embedding_of()

    def step(x):
        tf.cond(x[0] > 0, lambda: embedding.enqueue({"a": x}), lambda: None)

    with pytest.raises(RuntimeError, match="not in control flow"):
        traced(
            lambda x: strategy.run(step, args=(x,)),
            tf.TensorSpec([6], tf.int32),
        )


def test_inputs_computed_inside_a_program_raise():
    strategy, embedding = embedding_of()
    with pytest.raises(ValueError, match="_tpu_input_identity"):
        traced(
            lambda x: strategy.run(
                lambda x: embedding.enqueue({"a": x + 1}), args=(x,)
            ),
            tf.TensorSpec([6], tf.int32),
        )


def test_inputs_on_a_tpu_device_raise():
    strategy, embedding = embedding_of(num_cores=1)

    def program(x):
        with tf.device("/job:localhost/replica:0/task:0/device:TPU:0"):
            x = tf.identity(x)
        embedding.enqueue({"a": x})

    with pytest.raises(ValueError, match="on a TPU input device"):
        traced(program, tf.TensorSpec([6], tf.int32))


def test_one_value_for_several_replicas_raises():
    # TensorFlow's class enqueues the same value for each replica.
    _, embedding = embedding_of()
    with pytest.raises(ValueError, match="each of the 2 replicas"):
        traced(
            lambda x: embedding.enqueue({"a": x}), tf.TensorSpec([6], tf.int32)
        )


def test_invalid_device_raises():
    strategy, embedding = embedding_of()
    spec = tf.TensorSpec([6], tf.int32)
    with pytest.raises(ValueError, match="Non-TPU device"):
        traced(
            lambda x: embedding.enqueue({"a": x}, device="/device:CPU:0"), spec
        )
    with pytest.raises(ValueError, match="None inside `strategy.run`"):
        traced(
            lambda x: strategy.run(
                lambda x: embedding.enqueue({"a": x}, device="/device:TPU:0"),
                args=(x,),
            ),
            spec,
        )


def test_calls_before_build_raise():
    _, embedding = embedding_of()
    for call in (
        embedding.dequeue,
        lambda: embedding.apply_gradients({"a": 0}),
    ):
        with pytest.raises(RuntimeError, match="requires a built TPUEmbedding"):
            call()


def test_invalid_gradients_raise():
    _, embedding = embedding_of()
    embedding.build(per_replica_batch_size=6)
    with pytest.raises(ValueError, match="Found gradient of shape"):
        traced(lambda: embedding.apply_gradients({"a": tf.ones([6, 3])}))
    with pytest.raises(ValueError, match="at path 'a'"):
        traced(lambda: embedding.apply_gradients({"a": 1.0}))
    with pytest.raises(ValueError, match="structure"):
        traced(lambda: embedding.apply_gradients({"b": tf.ones([6, 2])}))


def test_applying_after_a_forward_step_raises():
    # TensorFlow's class traces this program, and the TPU waits forever.
    _, embedding = embedding_of(num_cores=1)

    def program(x):
        embedding.enqueue({"a": x}, training=False)
        embedding.dequeue()
        embedding.apply_gradients({"a": tf.ones([6, 2])})

    with pytest.raises(RuntimeError, match="would wait forever"):
        traced(program, tf.TensorSpec([6], tf.int32))


def test_build_on_an_initialized_tpu_raises(monkeypatch):
    _, embedding = embedding_of()
    monkeypatch.setattr(tpu_ops, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match="already initialized"):
        embedding.build(per_replica_batch_size=6)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"engine": "gpu"}, "must be one of"),
        ({"out_of_range": "clip"}, "does not drop or clip"),
        ({"partitioner": lambda shape, dtype: [1, 1]}, "`partitioner` must be"),
        ({"optimizer": None}, "unsupported optimizer class"),
    ],
)
def test_options_not_supported_on_tpu_raise(options, message):
    with pytest.raises(ValueError, match=message):
        embedding_of(**options)


def test_a_table_with_more_than_32_bit_ids_raises():
    with pytest.raises(ValueError, match="ids in 32 bits"):
        embedding_of(feature_of(config_proto.MAX_NUM_ROWS + 1))
    embedding_of(feature_of(config_proto.MAX_NUM_ROWS))


def test_tables_and_host_engine_methods_raise_on_tpu():
    _, embedding = embedding_of()
    embedding.build(per_replica_batch_size=6)
    for name in ("embedding_tables", "slot_variables"):
        with pytest.raises(RuntimeError, match="outside tf.function.*the TPU"):
            tf.function(lambda name=name: getattr(embedding, name))()
    for call in (embedding.stats, embedding.reset, embedding.flush):
        with pytest.raises(RuntimeError, match="with the host engine"):
            call()


def test_the_tpu_engine_without_a_tpu_only_serves():
    table = tpu.TableConfig(10, 2, tf.ones, name="words")
    embedding = tlm.TPUEmbedding(
        {"a": tpu.FeatureConfig(table)}, tpu.SGD(0.1), engine="tpu"
    )
    assert embedding.embedding_tables[table].shape == [10, 2]
    for call in (
        lambda: embedding.enqueue({"a": tf.constant([1])}),
        embedding.dequeue,
        lambda: embedding.apply_gradients({"a": None}),
    ):
        with pytest.raises(RuntimeError, match="under a TPUStrategy"):
            call()


def test_ids_are_checked_only_outside_of_programs():
    for place, expected in (
        ("outside", True),
        ("device", True),
        ("inside", False),
    ):
        graph = programs.trace(cases.Case(place=place), tlm.TPUEmbedding).graph
        checks = [
            op
            for op in graph.get_operations()
            if op.type == "Assert" and batches.ID_CHECK_SCOPE in op.name
        ]
        assert bool(checks) == expected
        for op in graph.get_operations():
            if op.type.startswith("EnqueueTPU") and expected:
                before = [
                    *op.control_inputs,
                    *(one for t in op.inputs for one in t.op.control_inputs),
                ]
                assert {one.type for one in before} >= {"Assert"}


@pytest.mark.parametrize(
    "ids, is_fine",
    [
        ([], True),
        ([0, 9], True),
        ([3, 10], False),
        ([-1], False),
        ([2**33 + 5], False),
    ],
)
def test_out_of_range_ids_raise(ids, is_fine):
    _, embedding = embedding_of()
    ids = [tf.constant(ids, tf.int64)]
    if is_fine:
        batches.check_ids(embedding._state.spec, ids)
        return
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        batches.check_ids(embedding._state.spec, ids)
    lowest, highest = min(ids[0].numpy()), max(ids[0].numpy())
    assert str(error.value) == (
        "Feature 'a': ids must be in [0, 10), the rows of table 'words'. "
        f"Received ids from {lowest} to {highest}"
    )


def test_spmd_multiplies_only_the_batch_of_gradients():
    # TensorFlow's class multiplies all dimensions by the number of cores per
    # replica.
    _, embedding = embedding_of(
        feature_of(max_sequence_length=3), num_cores=4, num_cores_per_replica=2
    )
    embedding.build({"a": tf.TensorShape([6, None])})
    graph = traced(
        lambda: embedding.apply_gradients({"a": tf.ones([12, 3, 2])})
    )
    assert any(op.type.startswith("Send") for op in graph.get_operations())


def test_spmd_ragged_and_uneven_batches_raise():
    strategy, embedding = embedding_of(num_cores=4, num_cores_per_replica=2)
    for spec, message in (
        (tf.RaggedTensorSpec([6, None], tf.int64), "does not support "),
        (tf.TensorSpec([5], tf.int32), "a multiple of 2, the number of cores"),
    ):
        with pytest.raises(ValueError, match=message):
            traced(
                lambda x: strategy.run(
                    lambda x: embedding.enqueue({"a": x}), args=(x,)
                ),
                spec,
            )


def test_training_tensor_is_supported_outside_of_programs():
    # TensorFlow's class requires a Python bool for `training`.
    _, embedding = embedding_of(num_cores=1)
    graph = traced(
        lambda x, training: embedding.enqueue({"a": x}, training=training),
        tf.TensorSpec([6], tf.int32),
        tf.TensorSpec([], tf.bool),
    )
    [op] = [
        op for op in graph.get_operations() if op.type.startswith("EnqueueTPU")
    ]
    assert op.inputs[-1].op.type == "SelectV2"


def test_configs_are_not_modified():
    table = tpu.TableConfig(10, 2, tf.ones)
    _, embedding = embedding_of(tpu.FeatureConfig(table))
    embedding.build(per_replica_batch_size=6)
    assert table.name is None and table.optimizer is None


def test_tracing_twice_gives_the_same_graph():
    case = cases.Case(inputs=("dense", "ragged"), rates="own")
    first, second = (programs.trace(case, tlm.TPUEmbedding) for _ in range(2))
    assert canonical.operations(first.graph) == (
        canonical.operations(second.graph)
    )


def rows_of(shard_info=None, shape=None, dtype=None):
    del shape, dtype
    return tf.reshape(
        tf.range(
            shard_info.offset[0],
            shard_info.offset[0] + shard_info.shape[0],
            dtype=tf.float32,
        ),
        [-1, 1],
    )


@pytest.mark.parametrize(
    "num_rows, sizes",
    [(7, [2, 2, 2, 1]), (8, [2, 2, 2, 2]), (2, [1, 1]), (1, [1])],
)
def test_tables_are_sharded_over_hosts(num_rows, sizes):
    hosts = [f"/device:CPU:{host}" for host in range(4)]

    def initializer(shape, dtype=None, shard_info=None):
        assert tuple(shape) == (num_rows, 1)
        return rows_of(shard_info, shape, dtype)

    config = tpu.TableConfig(num_rows, 1, initializer, name="words")
    strategy = traced_tpu.strategy_of(4, 4)
    with strategy.scope():
        embedding = tlm.TPUEmbedding(
            tpu.FeatureConfig(config), tpu.Adagrad(0.1)
        )
    embedding.build(per_replica_batch_size=6)
    for name, one in embedding._variables["words"].items():
        assert [int(shard.shape[0]) for shard in one.variables] == sizes
        assert [shard.device[-5:] for shard in one.variables] == [
            host[-5:] for host in hosts[: len(sizes)]
        ]
        assert not one.trainable
        expected = [
            [i if name == "parameters" else 0.1] for i in range(num_rows)
        ]
        tf.debugging.assert_near(
            one.read_value(), tf.constant(expected, tf.float32)
        )
    assert [
        shard.name
        for shard in embedding._variables["words"]["parameters"].variables
    ] == [f"words_{i}:0" for i in range(len(sizes))]


def test_a_slot_that_is_not_a_sharded_variable_raises():
    def wrong(table, names, initializers):
        del table, initializers
        return {name: tf.zeros([10, 2]) for name in names}

    _, embedding = embedding_of(
        optimizer=tpu.Adagrad(0.1, slot_variable_creation_fn=wrong)
    )
    with pytest.raises(ValueError, match="must create each slot variable"):
        embedding.build(per_replica_batch_size=6)


@pytest.mark.parametrize("value", [1.0, tf.constant([1.0]), lambda: 1.0])
def test_creator_without_an_initial_value_callable_raises(value):
    with (
        tf.variable_creator_scope(tables.sharded_variable_creator(["/cpu:0"])),
        pytest.raises(ValueError, match="Unable to extract"),
    ):
        tf.Variable(value)
