"""Each optimizer matches its formula for any number of shards and replicas."""

import functools

import hypothesis
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import tf_layoutmap as tlm
from tests import strategies
from tests.embedding import trainer
from tests.reference import optimizers as reference

tpu = tf.tpu.experimental.embedding

NUM_ROWS, DIM, NUM_STEPS = 9, 5, 100
# The engine rounds to float32 in each of 100 steps and evaluates formulas in a
# different order. The results differ by a few units in the last place (6e-8) of
# the largest values of a row.
CLOSE = 1e-6

RULES = {
    "sgd": ("SGD", {}),
    "adagrad": ("Adagrad", {"initial_accumulator_value": 0.25}),
    "momentum": ("AdagradMomentum", {"momentum": 0.8, "epsilon": 1e-3}),
    "nesterov": (
        "AdagradMomentum",
        {
            "momentum": 0.6,
            "use_nesterov": True,
            "exponent": 3.0,
            "epsilon": 1e-2,
        },
    ),
    "decayed momentum": (
        "AdagradMomentum",
        {"momentum": 0.5, "beta2": 0.9, "epsilon": 1e-3},
    ),
    "adam": ("Adam", {"epsilon": 1e-3}),
    "adam, root alone": ("Adam", {"epsilon": 1e-3, "sum_inside_sqrt": False}),
    "adam of all rows": (
        "Adam",
        {"beta_1": 0.7, "beta_2": 0.9, "epsilon": 1e-3, "lazy_adam": False},
    ),
    "ftrl": ("FTRL", {"l2_regularization_strength": 0.3, "beta": 0.1}),
    "ftrl, sparse": (
        "FTRL",
        {"l1_regularization_strength": 0.2, "learning_rate_power": -0.3},
    ),
    "ftrl times rate": (
        "FTRL",
        {
            "l1_regularization_strength": 0.1,
            "multiply_linear_by_learning_rate": True,
            "beta": 0.5,
        },
    ),
    "rowwise": ("RowwiseAdagrad", {"initial_accumulator_value": 0.25}),
    "rowwise from 0": ("RowwiseAdagrad", {"epsilon": 1e-3}),
    "lamb": ("LAMB", {"epsilon": 1e-3}),
    "lamb with decay": (
        "LAMB",
        {"beta_1": 0.7, "beta_2": 0.99, "epsilon": 1e-3, "weight_decay": 0.2},
    ),
}
MODIFIERS = {
    "clipped gradient": {"clipvalue": 0.3},
    "clipped above": {"clipvalue": (-0.5, 0.2)},
    "clipped weight": {"clip_weight_min": -0.4, "clip_weight_max": 0.6},
    "decay": {"weight_decay_factor": 0.03},
    "decay by rate": {
        "weight_decay_factor": 0.3,
        "clipvalue": 0.4,
        "multiply_weight_decay_factor_by_learning_rate": True,
    },
    "one by one": {"use_gradient_accumulation": False},
}


strategy_of = functools.cache(strategies.mirrored)


def optimizer_of(kind, rate, **settings):
    """Returns the optimizer of TensorFlow or tf_layoutmap with this name."""
    module = tpu if hasattr(tpu, kind) else tlm.optimizers
    return getattr(module, kind)(rate, **settings)


def start_rows():
    return (
        np.random.default_rng(7)
        .uniform(-1, 1, [NUM_ROWS, DIM])
        .astype(np.float32)
    )


def embedding_of(optimizer, *, num_shards=1, num_replicas=1):
    rows = start_rows()

    def initializer(shape, shard_info=None, dtype=None):
        del shape, dtype
        first = shard_info.offset[0]
        return rows[first : first + shard_info.shape[0]]

    table = tpu.TableConfig(
        NUM_ROWS,
        DIM,
        initializer,
        combiner="sum",
        name="words",
        optimizer=optimizer,
    )
    with strategy_of(num_replicas).scope():
        return tlm.TPUEmbedding(
            tpu.FeatureConfig(table),
            None,
            partitioner=tlm.partitioners.FixedShardsPartitioner(num_shards),
        )


def batches(num_steps=NUM_STEPS):
    """Returns ids with repetitions, and gradients. No id is the last row."""
    rng = np.random.default_rng(11)
    return (
        rng.integers(0, NUM_ROWS - 1, [num_steps, 8]),
        rng.normal(0, 0.5, [num_steps, 8, DIM]).astype(np.float32),
    )


def train(embedding, num_replicas=1, rate=None):
    """Trains on `batches`. Each batch is split evenly among the replicas."""
    strategy = strategy_of(num_replicas)

    def replica_step(ids, gradients):
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        size = 8 // num_replicas
        part = slice(replica * size, (replica + 1) * size)
        embedding.enqueue(ids[part])
        embedding.dequeue()
        embedding.apply_gradients(gradients[part])

    @tf.function(reduce_retracing=True)
    def loop(all_ids, all_gradients):
        for step in tf.range(tf.shape(all_ids)[0]):
            if rate is not None:
                rate.assign(0.1 / (1 + tf.cast(step, tf.float32)))
            strategy.run(replica_step, (all_ids[step], all_gradients[step]))

    loop(*batches())
    [rows] = embedding.embedding_tables.values()
    [slots] = embedding.slot_variables.values()
    return {
        "parameters": rows.numpy(),
        **{name: slot.numpy() for name, slot in slots.items()},
    }


def train_reference(kind, rate, **settings):
    table = reference.Table(start_rows(), kind, 0.1, **settings)
    for step, (ids, gradients) in enumerate(zip(*batches())):
        if callable(rate):
            table.learning_rate = np.float32(0.1) / np.float32(1 + step)
        table.train(list(zip(ids, gradients)))
    return {"parameters": table.rows, **table.slots}


def check_close(found, expected):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(
            found[name],
            values,
            rtol=CLOSE,
            atol=CLOSE * np.abs(values).max(),
            err_msg=name,
        )


@pytest.mark.parametrize("name", RULES)
def test_an_optimizer_equals_its_formula(name):
    kind, settings = RULES[name]
    optimizer = optimizer_of(kind, 0.1, **settings)
    check_close(
        train(embedding_of(optimizer)), train_reference(kind, 0.1, **settings)
    )


@pytest.mark.covering(1, 12)
@pytest.mark.parametrize("modifier", MODIFIERS)
@pytest.mark.parametrize(
    "name",
    ["sgd", "decayed momentum", "adam", "ftrl", "rowwise", "lamb with decay"],
)
def test_a_modified_optimizer_equals_its_formula(name, modifier):
    kind, settings = RULES[name]
    settings = {**settings, **MODIFIERS[modifier]}
    optimizer = optimizer_of(kind, 0.1, **settings)
    check_close(
        train(embedding_of(optimizer)), train_reference(kind, 0.1, **settings)
    )


@pytest.mark.parametrize("name", ["adam of all rows", "ftrl times rate"])
def test_a_dynamic_rate_is_applied(name):
    kind, settings = RULES[name]
    rate = tf.Variable(0.0)
    optimizer = optimizer_of(kind, lambda: rate, **settings)
    check_close(
        train(embedding_of(optimizer), rate=rate),
        train_reference(kind, rate.read_value, **settings),
    )


@pytest.mark.parametrize("name", RULES)
def test_shards_and_replicas_do_not_change_any_bit(name):
    kind, settings = RULES[name]
    settings = {**settings, "weight_decay_factor": 0.01, "clipvalue": 1.5}

    def trained(**options):
        optimizer = optimizer_of(kind, 0.1, **settings)
        return train(
            embedding_of(optimizer, **options), options.get("num_replicas", 1)
        )

    expected = trained()
    for options in ({"num_shards": 3}, {"num_shards": 2, "num_replicas": 2}):
        for name_, value in trained(**options).items():
            np.testing.assert_array_equal(value, expected[name_])


def train_by_formula(plan):
    """Returns float64 tables, and activations by step and replica."""
    tables = {
        name: reference.Table(
            one.starting_rows(),
            one.optimizer[0],
            one.optimizer[1],
            **one.optimizer[2],
        )
        for name, one in plan.tables.items()
    }
    activations = []
    for step, by_replica in enumerate(plan.bags):
        terms = {name: [] for name in tables}
        found = [{} for _ in by_replica]
        for name, feature in plan.features.items():
            table = tables[feature.table]
            for replica in range(len(by_replica)):
                matrix = trainer.matrix_of(plan, step, replica, name)
                found[replica][name] = matrix @ table.rows
                gradient = trainer.coefficients(plan, step, replica)[name]
                terms[feature.table] += [
                    (
                        int(place[-1]),
                        matrix[tuple(place)] * gradient[tuple(place[:-1])],
                    )
                    for place in np.argwhere(matrix)
                ]
        for name, table in tables.items():
            table.train(terms[name])
        activations.append(found)
    return tables, activations


# Each example is a training run, so fewer examples than usual are drawn.
@hypothesis.settings(max_examples=hypothesis.settings.default.max_examples // 2)
@given(
    seed=st.integers(0, 2**32 - 1),
    rules=st.tuples(
        *[
            st.tuples(
                st.sampled_from(sorted(RULES)),
                st.sampled_from(
                    [None, *sorted(set(MODIFIERS) - {"one by one"})]
                ),
            )
        ]
        * 2
    ),
    combiner=st.sampled_from(["sum", "mean", "sqrtn"]),
    features=st.lists(
        st.tuples(
            st.sampled_from(["words", "users"]),
            st.integers(0, 3),
            st.sampled_from(["ragged", "sparse", "dense"]),
            st.booleans(),
        ),
        min_size=1,
        max_size=4,
    ),
    num_rows=st.integers(1, 9),
    dim=st.integers(1, 19),
    num_shards=st.integers(1, 4),
    num_replicas=st.integers(1, 2),
)
def test_any_plan_with_any_optimizer_equals_its_formula(
    seed, rules, combiner, features, num_rows, dim, num_shards, num_replicas
):
    tables = {}
    for i, (name, (rule, modifier)) in enumerate(
        zip(("words", "users"), rules)
    ):
        kind, options = RULES[rule]
        if any(one[0] == name for one in features):
            tables[name] = trainer.Table(
                num_rows + i,
                dim,
                combiner,
                (kind, 0.1, {**options, **MODIFIERS.get(modifier, {})}),
            )
    plan = trainer.random_plan(
        np.random.default_rng(seed),
        tables=tables,
        features={
            f"feature_{i}": trainer.Feature(
                table,
                length,
                form,
                weighted and length == 0 and form != "dense",
            )
            for i, (table, length, form, weighted) in enumerate(features)
        },
        num_replicas=num_replicas,
        num_shards=num_shards,
        compiled=False,
    )
    expected, wanted = train_by_formula(plan)
    embedding, configs, found = trainer.train_on_engine(plan)
    # Gains and sums of gains are also rounded, so the tolerance is larger.
    close = {"rtol": 1e-5, "atol": 1e-5}
    for by_replica, other in zip(found, wanted):
        for one, two in zip(by_replica, other):
            for name, value in two.items():
                np.testing.assert_allclose(one[name], value, **close)
    for name, config in configs.items():
        np.testing.assert_allclose(
            embedding.embedding_tables[config].numpy(),
            expected[name].rows,
            **close,
        )
        for slot, variable in embedding.slot_variables[config].items():
            np.testing.assert_allclose(
                variable.numpy(), expected[name].slots[slot], **close
            )


# The following functions call TensorFlow's own kernels of the same optimizers.


def stock_ftrl(rows, slots, ids, gradient, settings):
    tf.raw_ops.ResourceSparseApplyFtrlV2(
        var=rows.handle,
        accum=slots["accumulators"].handle,
        linear=slots["linears"].handle,
        grad=gradient,
        indices=ids,
        lr=0.1,
        l1=settings.get("l1_regularization_strength", 0.0),
        # The kernel has no argument `beta`, so it is added to `l2`, as in
        # Keras.
        l2=settings.get("l2_regularization_strength", 0.0)
        + settings.get("beta", 0.0) / 0.2,
        l2_shrinkage=0.0,
        lr_power=settings.get("learning_rate_power", -0.5),
    )


def stock_adagrad(rows, slots, ids, gradient, settings):
    del settings
    tf.raw_ops.ResourceSparseApplyAdagradV2(
        var=rows.handle,
        accum=slots["accumulators"].handle,
        lr=0.1,
        epsilon=0.0,
        grad=gradient,
        indices=ids,
    )


def stock_rms_prop(rows, slots, ids, gradient, settings):
    # The kernel multiplies its momenta by the learning rate, which is constant
    # here.
    tf.raw_ops.ResourceSparseApplyRMSProp(
        var=rows.handle,
        ms=slots["accumulators"].handle,
        mom=slots["momenta"].handle,
        lr=0.1,
        rho=settings["beta2"],
        momentum=settings["momentum"],
        epsilon=settings["epsilon"],
        grad=gradient,
        indices=ids,
    )


def stock_adam(rows, slots, ids, gradient, settings):
    dense = tf.IndexedSlices(gradient, ids, [NUM_ROWS, DIM])
    # A beta power of 0 disables the bias correction.
    tf.raw_ops.ResourceApplyAdam(
        var=rows.handle,
        m=slots["momenta"].handle,
        v=slots["velocities"].handle,
        beta1_power=0.0,
        beta2_power=0.0,
        lr=0.1,
        beta1=settings["beta_1"],
        beta2=settings["beta_2"],
        epsilon=settings["epsilon"],
        grad=tf.convert_to_tensor(dense),
    )


@pytest.mark.parametrize(
    ("name", "settings", "kernel"),
    [
        ("adagrad", {}, stock_adagrad),
        ("decayed momentum", {}, stock_rms_prop),
        ("adam of all rows", {"sum_inside_sqrt": False}, stock_adam),
        ("ftrl", {}, stock_ftrl),
        ("ftrl, sparse", {}, stock_ftrl),
    ],
)
def test_an_optimizer_equals_tensorflow_s_kernel(name, settings, kernel):
    kind, own = RULES[name]
    settings = {
        **(reference.RULES[kind].__kwdefaults__ or {}),
        **own,
        **settings,
    }
    found = train(embedding_of(optimizer_of(kind, 0.1, **settings)))
    initial = reference.Table(start_rows(), kind, 0.1, **settings)
    # The sparse kernel of some rules exists for the CPU only.
    with tf.device("CPU:0"):
        rows = tf.Variable(start_rows())
        slots = {
            slot: tf.Variable(tf.cast(value, tf.float32))
            for slot, value in initial.slots.items()
        }
        for ids, gradients in zip(*batches()):
            unique, places = tf.unique(ids)
            kernel(
                rows,
                slots,
                unique,
                tf.math.unsorted_segment_sum(
                    gradients, places, tf.size(unique)
                ),
                settings,
            )
    expected = {
        "parameters": rows.numpy(),
        **{slot: one.numpy() for slot, one in slots.items()},
    }
    if "momenta" in found and kernel is stock_rms_prop:
        expected["momenta"] = expected["momenta"] / np.float32(0.1)
    for slot, value in expected.items():
        # The engine and the kernel both round, so the tolerance is doubled.
        np.testing.assert_allclose(
            found[slot],
            value,
            rtol=2 * CLOSE,
            atol=2 * CLOSE * np.abs(value).max(),
            err_msg=slot,
        )


@pytest.mark.parametrize("lazy", [True, False])
def test_rows_not_looked_up_change_only_for_non_lazy_adam(lazy):
    embedding = embedding_of(tpu.Adam(0.1, lazy_adam=lazy))
    embedding.enqueue(np.array([1]))
    embedding.apply_gradients(tf.ones_like(embedding.dequeue()))
    [rows] = embedding.embedding_tables.values()
    once = rows.numpy()
    embedding.enqueue(np.array([2]))
    embedding.apply_gradients(tf.zeros_like(embedding.dequeue()))
    moved = np.any(rows.numpy() != once, axis=1)
    assert np.flatnonzero(moved).tolist() == ([] if lazy else [1])


def test_momentum_moves_a_row_with_a_zero_gradient():
    embedding = embedding_of(tpu.AdagradMomentum(0.1, momentum=0.5))
    [rows] = embedding.embedding_tables.values()
    for gradient in (tf.ones, tf.zeros):
        before = rows.numpy()
        embedding.enqueue(np.array([1, 2]))
        embedding.dequeue()
        embedding.apply_gradients(gradient([2, DIM]))
    moved = np.any(rows.numpy() != before, axis=1)
    assert np.flatnonzero(moved).tolist() == [1, 2]


def test_tables_have_separate_optimizers_and_schedules():
    rate = tf.Variable(0.5)
    makers = {
        "a": lambda: tpu.SGD(lambda: rate),
        "b": lambda: tpu.Adam(0.1),
        "c": lambda: None,
    }
    embedding = tlm.TPUEmbedding(
        {
            name: tpu.FeatureConfig(
                tpu.TableConfig(
                    NUM_ROWS, DIM, tf.ones, make(), combiner="sum", name=name
                )
            )
            for name, make in makers.items()
        },
        tpu.FTRL(0.2),
    )
    refs = {
        "a": reference.Table(np.ones([NUM_ROWS, DIM]), "SGD", 0.5),
        "b": reference.Table(np.ones([NUM_ROWS, DIM]), "Adam", 0.1),
        "c": reference.Table(np.ones([NUM_ROWS, DIM]), "FTRL", 0.2),
    }
    for step, (ids, gradients) in enumerate(zip(*batches(5))):
        rate.assign(0.5 / (1 + step))
        refs["a"].learning_rate = 0.5 / (1 + step)
        embedding.enqueue({name: ids for name in refs})
        embedding.dequeue()
        embedding.apply_gradients(
            {name: tf.constant(gradients) for name in refs}
        )
        for ref in refs.values():
            ref.train(list(zip(ids, gradients)))
    for config, rows in embedding.embedding_tables.items():
        ref = refs[config.name]
        slots = embedding.slot_variables[config]
        check_close(
            {
                "parameters": rows.numpy(),
                **{name: slot.numpy() for name, slot in slots.items()},
            },
            {"parameters": ref.rows, **ref.slots},
        )
