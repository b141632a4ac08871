"""Training on the host engine equals dense training."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.embedding import trainer
from tests.embedding.trainer import Feature, Plan, Table
from tests.reference.dense_reference import Bag

# Each square root and each quotient is rounded once. The dense reference
# computes them in a different order.
ROUNDED = 1e-6


def two_tables(**options):
    """Returns two tables and four features of different kinds."""
    return {
        "tables": {
            "words": Table(7, 3, **options),
            "users": Table(5, 2, **options),
        },
        "features": {
            "title": Feature("words"),
            "body": Feature("words", form="sparse", weighted=True),
            "history": Feature("words", max_sequence_length=2),
            "user": Feature("users", form="dense"),
        },
    }


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_sgd_equals_dense_training_exactly(num_replicas, num_shards):
    trainer.check_equal(
        trainer.random_plan(
            np.random.default_rng(1),
            **two_tables(),
            num_replicas=num_replicas,
            num_shards=num_shards,
        )
    )


@pytest.mark.parametrize("num_shards", [1, 3])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_adagrad_equals_dense_training(num_replicas, num_shards):
    trainer.check_equal(
        trainer.random_plan(
            np.random.default_rng(2),
            **two_tables(optimizer=("adagrad", 0.25, 0.1)),
            num_replicas=num_replicas,
            num_shards=num_shards,
        ),
        rtol=ROUNDED,
    )


@pytest.mark.parametrize("optimizer", [("sgd", 0.5), ("adagrad", 0.25, 0.1)])
@pytest.mark.parametrize("combiner", ["mean", "sqrtn"])
def test_combiners_equal_dense_training(combiner, optimizer):
    trainer.check_equal(
        trainer.random_plan(
            np.random.default_rng(3),
            **two_tables(optimizer=optimizer, combiner=combiner),
            num_replicas=1,
            num_shards=3,
        ),
        rtol=ROUNDED,
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("enqueue_inside", [False, True])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_place_of_enqueue_and_compilation_do_not_matter(
    num_replicas, enqueue_inside, compiled
):
    trainer.check_equal(
        trainer.random_plan(
            np.random.default_rng(4),
            **two_tables(),
            num_replicas=num_replicas,
            enqueue_inside=enqueue_inside,
            compiled=compiled,
        )
    )


def test_repeated_ids_are_summed_into_one_update():
    tables = {"words": Table(3, 2, optimizer=("adagrad", 1.0, 1.0))}
    features = {"a": Feature("words"), "b": Feature("words")}
    step = [
        {"a": Bag([[1, 1], [1]]), "b": Bag([[1], []])},
        {"a": Bag([[], [1]]), "b": Bag([[2], [1, 2]])},
    ]
    trainer.check_equal(Plan(tables, features, [step]), rtol=ROUNDED)


def test_steps_without_ids_change_nothing():
    tables = {"words": Table(3, 2)}
    features = {
        "a": Feature("words"),
        "b": Feature("words", max_sequence_length=2),
    }
    empty = {"a": Bag([[], []]), "b": Bag([[], []])}
    embedding = trainer.check_equal(Plan(tables, features, [[empty]] * 2))
    assert embedding.stats()["num_updates"] == 2


def test_features_can_have_different_batch_sizes():
    tables = {"words": Table(3, 2)}
    features = {"a": Feature("words"), "b": Feature("words", form="sparse")}
    step = {"a": Bag([[1], [2], [0, 0]]), "b": Bag([[1]])}
    trainer.check_equal(Plan(tables, features, [[step]]))


# Each example is a training run, so fewer examples than usual are drawn.
@settings(max_examples=settings.default.max_examples // 4)
@given(
    seed=st.integers(0, 2**32 - 1),
    combiner=st.sampled_from(["sum", "mean", "sqrtn"]),
    kind=st.sampled_from(["sgd", "adagrad"]),
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
    dim=st.integers(1, 5),
    num_shards=st.integers(1, 4),
    num_replicas=st.integers(1, 2),
    num_samples=st.integers(1, 6),
)
def test_any_plan_equals_dense_training(
    seed,
    combiner,
    kind,
    features,
    num_rows,
    dim,
    num_shards,
    num_replicas,
    num_samples,
):
    optimizer = ("sgd", 0.5) if kind == "sgd" else ("adagrad", 0.25, 0.5)
    plan = trainer.random_plan(
        np.random.default_rng(seed),
        tables={
            name: Table(num_rows + i, dim, combiner, optimizer)
            for i, name in enumerate(["words", "users"])
            if any(one[0] == name for one in features)
        },
        features={
            f"feature_{i}": Feature(
                table,
                length,
                form,
                weighted and length == 0 and form != "dense",
            )
            for i, (table, length, form, weighted) in enumerate(features)
        },
        num_replicas=num_replicas,
        num_samples=num_samples,
        num_steps=2,
        num_shards=num_shards,
        compiled=False,
    )
    exact = combiner == "sum" and kind == "sgd"
    trainer.check_equal(plan, rtol=0 if exact else ROUNDED)


def test_one_and_two_replicas_train_equally():
    options = two_tables(optimizer=("adagrad", 0.25, 0.1), combiner="mean")
    two = trainer.random_plan(
        np.random.default_rng(5), num_replicas=2, **options
    )

    def joined(bags):
        return {
            name: Bag(
                [ids for bag in bags for ids in bag[name].ids],
                None
                if bags[0][name].weights is None
                else [weights for bag in bags for weights in bag[name].weights],
            )
            for name in bags[0]
        }

    first, configs, _ = trainer.train_on_engine(two)
    rows = {
        name: first.embedding_tables[one].numpy()
        for name, one in configs.items()
    }

    one = Plan(two.tables, two.features, [[joined(step)] for step in two.bags])
    scales = {
        step: [trainer.coefficients(two, step, replica) for replica in range(2)]
        for step in range(len(two.bags))
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            trainer,
            "coefficients",
            lambda plan, step, replica: {
                name: np.concatenate([part[name] for part in scales[step]])
                for name in scales[step][0]
            },
        )
        second, configs, _ = trainer.train_on_engine(one)
    for name, config in configs.items():
        assert np.array_equal(
            second.embedding_tables[config].numpy(), rows[name]
        )


def test_a_loop_in_a_function_trains_each_step():
    table = Table(5, 2)
    config = table.config("words")
    tpu = tf.tpu.experimental.embedding
    embedding = trainer.tpu_embedding.TPUEmbedding(
        [tpu.FeatureConfig(config)], None
    )

    @tf.function
    def train(ids):
        for step in tf.range(tf.shape(ids)[0]):
            embedding.enqueue([ids[step]])
            [activations] = embedding.dequeue()
            embedding.apply_gradients([tf.ones_like(activations)])

    train(tf.constant([[0, 1], [1, 1], [4, 1]]))
    touched = np.array([1, 4, 0, 0, 1])[:, np.newaxis]
    assert np.array_equal(
        embedding.embedding_tables[config].numpy(),
        table.starting_rows() - 0.5 * touched,
    )
