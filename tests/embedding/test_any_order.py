"""Calls of two replicas in any order match a reference in plain Python."""

import contextlib
import faulthandler
import tempfile

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import settings, stateful
from hypothesis import strategies as st

import tf_layoutmap as tlm
from tests import strategies
from tests.reference import host_engine as ref

tpu = tf.tpu.experimental.embedding

NUM_ROWS, DIM, NUM_REPLICAS, MAX_PENDING = 5, 2, 2, 4
ROWS = np.arange(NUM_ROWS * DIM, dtype=np.float32).reshape(NUM_ROWS, DIM)
RATE = np.array([0.5], np.float32)
# A call that raises an error takes milliseconds, so a longer wait is a hang.
HANG_SECONDS = 300

replica_ids = st.integers(0, NUM_REPLICAS - 1)
id_lists = st.lists(st.integers(0, NUM_ROWS - 1), min_size=1, max_size=3)


@contextlib.contextmanager
def hang_watchdog():
    """Ends the process with a traceback if the block hangs."""
    faulthandler.dump_traceback_later(HANG_SECONDS, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


class AnyOrder(stateful.RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.strategy = strategies.mirrored(NUM_REPLICAS)
        with self.strategy.scope():
            self.embedding = tlm.TPUEmbedding(
                tpu.FeatureConfig(
                    tpu.TableConfig(
                        NUM_ROWS,
                        DIM,
                        lambda shape: tf.constant(ROWS),
                        combiner="sum",
                        name="words",
                    )
                ),
                tpu.SGD(float(RATE[0])),
            )
        self.embedding.build()
        [self.rows] = self.embedding.embedding_tables.values()
        self.model = ref.HostEngine(
            [ref.Table(ROWS.copy(), "sgd", [])],
            [ref.Feature("feature", 0)],
            num_replicas=NUM_REPLICAS,
            max_pending_steps=MAX_PENDING,
        )
        self.saved = None
        self.sizes = {}

    def on_replica(self, replica, call):
        """Runs a call on only one replica, and returns the result."""
        found = []

        def run():
            context = tf.distribute.get_replica_context()
            if int(context.replica_id_in_sync_group) == replica:
                found.append(call())

        self.strategy.run(run)
        return found[0]

    def both(self, real, model):
        """Calls the embedding and the reference; returns None if both raise."""
        try:
            expected = model()
        except ref.OrderError:
            with (
                hang_watchdog(),
                pytest.raises(tf.errors.FailedPreconditionError),
            ):
                real()
            return None
        found = real()
        return found, expected

    @stateful.rule(replica=replica_ids, ids=id_lists, training=st.booleans())
    def enqueue(self, replica, ids, training):
        self.both(
            lambda: self.embedding.enqueue(
                np.array(ids),
                training=training,
                device=f"/device:CPU:{replica}",
            ),
            lambda: self.model.enqueue(
                replica, training, [[[(one, 1.0)] for one in ids]]
            ),
        )

    @stateful.rule(ids=st.tuples(id_lists, id_lists))
    def enqueue_a_training_step(self, ids):
        for replica in range(NUM_REPLICAS):
            self.enqueue(replica, ids[replica], True)

    @stateful.rule(replica=replica_ids, bad=st.sampled_from([-1, NUM_ROWS]))
    def enqueue_an_out_of_range_id(self, replica, bad):
        words = (
            tf.errors.InvalidArgumentError,
            tf.errors.FailedPreconditionError,
        )
        with hang_watchdog(), pytest.raises(words):
            self.embedding.enqueue(
                np.array([bad]), device=f"/device:CPU:{replica}"
            )
        with pytest.raises((ValueError, ref.OrderError)):
            self.model.enqueue(replica, True, None, valid=False)

    @stateful.rule(replica=replica_ids)
    def dequeue(self, replica):
        found = self.both(
            lambda: self.on_replica(replica, self.embedding.dequeue),
            lambda: self.model.dequeue(replica),
        )
        if found is not None:
            np.testing.assert_array_equal(found[0], found[1][0])
            self.sizes[replica] = len(found[0])

    @stateful.rule(replica=replica_ids, scale=st.integers(-2, 2))
    def apply(self, replica, scale):
        gradient = np.full([self.sizes.get(replica, 1), DIM], scale, np.float32)
        self.both(
            lambda: (
                self.on_replica(
                    replica,
                    lambda: self.embedding.apply_gradients(
                        tf.constant(gradient)
                    ),
                )
                or True
            ),
            lambda: self.model.apply(replica, [gradient], [RATE]),
        )

    @stateful.rule(ids=st.tuples(id_lists, id_lists))
    def full_step(self, ids):
        """Runs a complete step, which random orders rarely contain."""
        self.enqueue_a_training_step(ids)
        for rule in (self.dequeue, lambda r: self.apply(r, 1)):
            for replica in range(NUM_REPLICAS):
                rule(replica)

    @stateful.rule(ids=st.tuples(id_lists, id_lists))
    def evaluate_by_steps(self, ids):
        """Runs a forward-only step on both replicas while steps are pending."""
        for replica in range(NUM_REPLICAS):
            self.enqueue(replica, ids[replica], False)
        for replica in range(NUM_REPLICAS):
            self.dequeue(replica)

    @stateful.rule()
    def evaluate(self):
        ids = np.arange(NUM_ROWS)
        np.testing.assert_array_equal(
            self.embedding(ids), self.model.tables[0].rows
        )

    @stateful.rule()
    def reset(self):
        self.embedding.reset()
        self.model.reset()

    @stateful.rule()
    def save(self):
        with tempfile.TemporaryDirectory() as folder:
            path = tf.train.Checkpoint(embedding=self.embedding).write(
                folder + "/ckpt"
            )
            [value] = [
                tf.train.load_variable(path, name)
                for name, _ in tf.train.list_variables(path)
                if "parameters" in name
            ]
        np.testing.assert_array_equal(value, self.model.tables[0].rows)
        self.saved = value

    @stateful.precondition(lambda self: self.saved is not None)
    @stateful.rule()
    def restore(self):
        in_flight = any(self.model.awaiting) or any(
            self.model.pending(r) for r in range(NUM_REPLICAS)
        )
        with tempfile.TemporaryDirectory() as folder:
            other = tf.Module()
            other._variables = {
                "words": {"parameters": tf.Variable(self.saved)}
            }
            path = tf.train.Checkpoint(embedding=other).write(folder + "/ckpt")
            checkpoint = tf.train.Checkpoint(embedding=self.embedding)
            if in_flight:
                with (
                    hang_watchdog(),
                    pytest.raises(RuntimeError, match="in flight"),
                ):
                    checkpoint.read(path)
                return
            checkpoint.read(path).assert_existing_objects_matched()
        self.model.tables[0].rows[:] = self.saved

    @stateful.invariant()
    def state_matches_the_reference(self):
        stats = self.embedding.stats()
        model = self.model
        assert stats["pending"] == [
            model.pending(r) for r in range(NUM_REPLICAS)
        ]
        assert stats["awaiting"] == model.awaiting
        assert stats["num_updates"] == model.num_updates
        assert bool(stats["poisoned"]) == model.poisoned
        np.testing.assert_array_equal(self.rows, model.tables[0].rows)


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(
    max_examples=settings.default.max_examples // 2, stateful_step_count=30
)
