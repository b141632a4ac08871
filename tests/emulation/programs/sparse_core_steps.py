"""Tests the device ops of SparseCores on two chips, in a separate process."""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.embedding.tpu import sparse_core_batches
from tests.emulation import sparse_core_reference

SETTING = dict(num_cores=2, deadline=2.0)
tlm.emulation.enable(**SETTING)

tpu = tf.tpu.experimental.embedding
Feature = sparse_core_reference.Feature

NUM_CHIPS, DIM, NUM_ROWS = 2, 8, 64

# Optimizer, name of the op, slot variables of the op, and attributes.
OPTIMIZERS = {
    "sgd": (tpu.SGD(0.1), "Sgd", {}, {}),
    "adagrad": (
        tpu.Adagrad(0.1, initial_accumulator_value=0.3),
        "Adagrad",
        {"accumulator": 0.3},
        {},
    ),
    "clipped": (
        tpu.Adagrad(
            0.1,
            initial_accumulator_value=0.3,
            clip_weight_min=-0.2,
            clip_weight_max=0.3,
        ),
        "Adagrad",
        {"accumulator": 0.3},
        {"clip_weight_min": -0.2, "clip_weight_max": 0.3},
    ),
    "adagrad_momentum": (
        tpu.AdagradMomentum(
            0.1,
            momentum=0.9,
            use_nesterov=True,
            exponent=3,
            beta2=0.9,
            epsilon=1e-3,
        ),
        "AdagradMomentum",
        {"accumulator": 0.0, "momenta": 0.0},
        dict(
            use_nesterov=True, exponent=3.0, beta1=0.9, beta2=0.9, epsilon=1e-3
        ),
    ),
    "adam": (
        tpu.Adam(0.1, beta_1=0.8, beta_2=0.9, epsilon=1e-3, lazy_adam=True),
        "Adam",
        {"momenta": 0.0, "velocity": 0.0},
        dict(use_sum_inside_sqrt=True, beta1=0.8, beta2=0.9, epsilon=1e-3),
    ),
    "ftrl": (
        tpu.FTRL(
            0.1,
            learning_rate_power=-0.4,
            l1_regularization_strength=0.01,
            l2_regularization_strength=0.02,
            beta=0.3,
            initial_accumulator_value=0.2,
        ),
        "Ftrl",
        {"accumulator": 0.2, "linear": 0.0},
        dict(
            multiply_linear_by_learning_rate=False,
            beta=0.3,
            learning_rate_power=-0.4,
            l1_regularization_strength=0.01,
            l2_regularization_strength=0.02,
        ),
    ),
}


def samples_of(generator, num_samples, high=NUM_ROWS):
    """Different ids in each sample, in ascending order."""
    return [
        sorted(
            generator.choice(
                high, generator.integers(0, 4), replace=False
            ).tolist()
        )
        for _ in range(num_samples)
    ]


def inputs_of(buffers):
    return dict(
        row_pointers=buffers.row_pointers,
        sorted_sample_ids=buffers.sorted_sample_ids,
        sorted_token_ids=buffers.sorted_token_ids,
        sorted_gains=buffers.sorted_gains,
        num_minibatches_per_physical_sparse_core=buffers.num_minibatches_per_sc,
    )


def on_each_chip(function, *arguments):
    """Calls `function(*arguments of the chip)` in one program of both chips."""

    @tf.function
    def program(arguments):
        results = []
        for chip, of_chip in enumerate(arguments):
            with tf.device(f"CPU:{chip}"), tf.name_scope(f"replica_{chip}"):
                results.append(function(*of_chip))
        return results

    return program(list(zip(*arguments)))


def look_up(table, buffers, num_samples, cores_per_chip, **changes):
    arguments = dict(
        embedding_table=table,
        input_size=num_samples,
        quantization_config_low=0.0,
        quantization_config_high=0.0,
        quantization_config_num_buckets=0,
        max_ids_per_sparse_core=100,
        max_unique_ids_per_sparse_core=100,
        table_name="t",
        num_sparsecores_per_device=cores_per_chip,
        **inputs_of(buffers),
    )
    return tf.raw_ops.XlaSparseDenseMatmulWithStaticBufferSize(
        **{**arguments, **changes}
    )


def to_chips(table, cores_per_chip, rotation=0):
    """Returns the table of each chip: one block of rows per SparseCore."""
    num_cores = NUM_CHIPS * cores_per_chip
    shards = [table[core::num_cores] for core in range(num_cores)]
    shards = shards[-rotation:] + shards[:-rotation] if rotation else shards
    return [
        np.concatenate(shards[chip * cores_per_chip :][:cores_per_chip])
        for chip in range(NUM_CHIPS)
    ]


def from_chips(tables, cores_per_chip):
    num_cores = NUM_CHIPS * cores_per_chip
    shards = np.split(np.concatenate(tables), num_cores)
    return np.stack(shards, axis=1).reshape(-1, DIM)


def buffers_of(features, cores_per_chip):
    """Returns the buffers of each chip.

    Args:
      features: The reference features of each chip.
      cores_per_chip: Number of SparseCores of a chip.
    """
    stacks = [
        sparse_core_batches.stack_of(
            of_chip,
            num_cores=NUM_CHIPS * cores_per_chip,
            cores_per_chip=cores_per_chip,
        )
        for of_chip in features
    ]
    return [stack.buffers(stack.sort(100, 100), 64) for stack in stacks]


@pytest.mark.parametrize("cores_per_chip", [1, 2, 4])
def test_lookups_read_stacked_and_rotated_tables(cores_per_chip):
    generator = np.random.default_rng(cores_per_chip)
    tables = generator.integers(-9, 9, [2, NUM_ROWS, DIM]).astype(np.float32)
    of_chip = [
        [
            Feature(samples_of(generator, 8)),
            Feature(
                samples_of(generator, 4),
                col_offset=NUM_ROWS,
                rotation=cores_per_chip,
            ),
        ]
        for _ in range(NUM_CHIPS)
    ]
    blocks = [
        np.concatenate(
            [
                first.reshape(cores_per_chip, -1, DIM),
                second.reshape(cores_per_chip, -1, DIM),
            ],
            axis=1,
        ).reshape(-1, DIM)
        for first, second in zip(
            to_chips(tables[0], cores_per_chip),
            to_chips(tables[1], cores_per_chip, cores_per_chip),
        )
    ]
    found = on_each_chip(
        lambda table, buffers: look_up(table, buffers, 12, cores_per_chip),
        blocks,
        buffers_of(of_chip, cores_per_chip),
    )
    for features, activations in zip(of_chip, found):
        by_core = activations.numpy().reshape(cores_per_chip, -1, DIM)
        start = 0
        for table, feature in zip(tables, features):
            size = len(feature.samples) // cores_per_chip
            expected = [table[ids].sum(axis=0) for ids in feature.samples]
            np.testing.assert_array_equal(
                by_core[:, start : start + size].reshape(-1, DIM), expected
            )
            start += size


@pytest.mark.parametrize("cores_per_chip", [2, 4])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_equals_the_host_engine(kind, cores_per_chip):
    optimizer, op, slots, attributes = OPTIMIZERS[kind]
    generator = np.random.default_rng(0)
    initial = generator.normal(size=[NUM_ROWS, DIM]).astype(np.float32)
    host = tlm.TPUEmbedding(
        tpu.FeatureConfig(
            tpu.TableConfig(
                NUM_ROWS,
                DIM,
                initializer=lambda shape, dtype=None: tf.constant(initial),
                combiner="sum",
                name="t",
            )
        ),
        optimizer,
    )
    tables = to_chips(initial, cores_per_chip)
    variables = {"embedding_table": tables}
    for slot, value in slots.items():
        variables[slot] = [np.full_like(table, value) for table in tables]
    update = getattr(
        tf.raw_ops, f"XlaSparseDenseMatmulGradWith{op}AndStaticBufferSize"
    )
    for _ in range(3):
        samples = [samples_of(generator, 8) for _ in range(NUM_CHIPS)]
        buffers = buffers_of(
            [[Feature(of_chip)] for of_chip in samples], cores_per_chip
        )
        gradients = generator.normal(size=[NUM_CHIPS, 8, DIM])
        gradients = gradients.astype(np.float32)
        host.enqueue(
            tf.ragged.constant(sum(samples, []), dtype=tf.int64, ragged_rank=1)
        )
        expected = host.dequeue()
        found = on_each_chip(
            lambda table, buffers: look_up(table, buffers, 8, cores_per_chip),
            variables["embedding_table"],
            buffers,
        )
        if kind == "sgd" and cores_per_chip == 2:
            # The order of the sums can differ in lookups with several ids.
            np.testing.assert_allclose(
                np.concatenate(found), expected, rtol=1e-5, atol=1e-6
            )
        host.apply_gradients(tf.constant(gradients.reshape(-1, DIM)))
        updated = on_each_chip(
            lambda buffers, gradient, *values: update(
                activation_gradients=gradient,
                learning_rate=0.1,
                max_ids_per_sparse_core=100,
                max_unique_ids_per_sparse_core=100,
                table_name="t",
                num_sparsecores_per_device=cores_per_chip,
                **dict(zip(variables, values)),
                **inputs_of(buffers),
                **attributes,
            ),
            buffers,
            gradients,
            *variables.values(),
        )
        for index, name in enumerate(variables):
            variables[name] = [
                (of_chip if kind == "sgd" else of_chip[index]).numpy()
                for of_chip in updated
            ]
    rows = from_chips(variables["embedding_table"], cores_per_chip)
    (expected,) = host.embedding_tables.values()
    np.testing.assert_array_equal(rows, expected.numpy())


def one_id(row=1, cores_per_chip=2):
    """Buffers of both chips, where each sample of chip 0 has one id."""
    samples = [[[row]] * 8, [[]] * 8]
    return buffers_of([[Feature(one)] for one in samples], cores_per_chip)


sgd = tf.raw_ops.XlaSparseDenseMatmulGradWithSgdAndStaticBufferSize


def zero_tables():
    return [np.zeros([NUM_ROWS // 2, DIM], np.float32)] * NUM_CHIPS


def test_rows_are_quantized():
    tables = to_chips(np.full([NUM_ROWS, DIM], 0.4, np.float32), 2)
    found = on_each_chip(
        lambda table, buffers: look_up(
            table,
            buffers,
            8,
            2,
            quantization_config_low=0.0,
            quantization_config_high=1.0,
            quantization_config_num_buckets=2,
        ),
        tables,
        one_id(),
    )
    assert found[0].numpy().max() == 0
    assert (found[1].numpy() == 0).all()


def test_an_op_in_a_loop_runs_once_per_iteration():
    buffers = one_id()

    def update(*tables):
        updated = []
        for chip, table in enumerate(tables):
            with tf.device(f"CPU:{chip}"), tf.name_scope(f"replica_{chip}"):
                updated.append(
                    sgd(
                        activation_gradients=tf.ones([8, DIM]),
                        learning_rate=0.5,
                        embedding_table=table,
                        max_ids_per_sparse_core=100,
                        max_unique_ids_per_sparse_core=100,
                        table_name="t",
                        num_sparsecores_per_device=2,
                        **inputs_of(buffers[chip]),
                    )
                )
        return updated

    @tf.function
    def program(table):
        return tf.while_loop(
            lambda *_: True, update, [table, table], maximum_iterations=5
        )

    rows = from_chips([table.numpy() for table in program(zero_tables()[0])], 2)
    # 8 samples with a gradient of 1, in 5 steps.
    assert rows[1].tolist() == [-20.0] * DIM
    assert not np.delete(rows, 1, axis=0).any()


@pytest.mark.parametrize(
    "buffers, changes, words",
    [
        # Row 64 of the table is row 16 of a SparseCore.
        (dict(row=NUM_ROWS), {}, "must be rows of the stacked table.*row 16"),
        ({}, dict(max_ids_per_sparse_core=3), "gets 4 ids and 1 unique ids"),
        ({}, dict(input_size=6), "sample 3 of 3 samples"),
        ({}, dict(input_size=5), "num_samples_per_chip 5 not divisible"),
        ({}, dict(num_sparsecores_per_device=3), "power of two, but got: 3"),
        (
            {},
            dict(num_minibatches_per_physical_sparse_core=9),
            "elements for 9 minibatches",
        ),
        (
            {},
            dict(row_pointers=np.full([16], 10**6, np.int32)),
            "Row pointers must ascend",
        ),
    ],
)
def test_invalid_inputs_raise_on_all_chips(buffers, changes, words):
    with pytest.raises(tf.errors.InvalidArgumentError, match=words):
        on_each_chip(
            lambda table, buffers: look_up(table, buffers, 8, 2, **changes),
            zero_tables(),
            one_id(**buffers),
        )


def test_a_tpu_without_sparse_cores_raises():
    with pytest.raises(
        tf.errors.FailedPreconditionError, match="pass `tpu` to"
    ):
        on_each_chip(
            lambda table, buffers: look_up(table, buffers, 8, -1),
            zero_tables(),
            one_id(),
        )


def test_a_chip_that_waits_for_another_chip_raises_at_the_deadline():
    @tf.function
    def program(buffers):
        with tf.device("CPU:0"), tf.name_scope("replica_0"):
            return look_up(zero_tables()[0], buffers, 8, 2)

    buffers = one_id()[0]
    with pytest.raises(
        tf.errors.DeadlineExceededError,
        match="core 0 .table t. has waited for 2 s.*not run on 1 other cores",
    ):
        program(buffers)


def test_different_tables_of_the_chips_raise():
    tables = zero_tables()
    tables[1] = tables[1][:-2]
    with pytest.raises(tf.errors.InvalidArgumentError, match="same shapes"):
        on_each_chip(
            lambda table, buffers: look_up(table, buffers, 8, 2),
            tables,
            one_id(),
        )


def test_copies_for_a_device_are_the_same_tensors():
    tensors = [tf.constant([1, 2]), tf.constant([0.5])]
    found = tf.raw_ops.TPUCopyWithDynamicShape(
        tensors=tensors, unpadded_sizes=[1, 1]
    )
    found = tf.raw_ops.TPUAnnotateTensorsWithDynamicShape(tensors=found)
    assert [tensor.numpy().tolist() for tensor in found] == [[1, 2], [0.5]]
