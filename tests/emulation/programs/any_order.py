"""Calls of two emulated cores in any order match a Python reference.

Runs in a separate process (tests/emulation).
"""

import tempfile

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import settings, stateful
from hypothesis import strategies as st

import tf_layoutmap as tlm
from tests.covering import but
from tests.emulation import training
from tests.reference import host_engine as ref

# Deadline of calls, in seconds. A call that waits longer raises an error.
PATIENCE_SECONDS = 0.1
SETTING = dict(num_cores=2, deadline=PATIENCE_SECONDS)
STRATEGY = tlm.emulation.enable(**SETTING)

tpu = tf.tpu.experimental.embedding
NUM_CORES, NUM_SAMPLES, NUM_ROWS, DIM = 2, 2, 5, 2
ROWS = np.arange(NUM_ROWS * DIM, dtype=np.float32).reshape(NUM_ROWS, DIM)
RATE = np.array([0.5], np.float32)
WRONG_ORDER = (
    tf.errors.FailedPreconditionError,
    tf.errors.DeadlineExceededError,
)

cores = st.integers(0, NUM_CORES - 1)
ids_of_a_core = st.lists(
    st.integers(0, NUM_ROWS - 1), min_size=NUM_SAMPLES, max_size=NUM_SAMPLES
)


class Calls:
    """Functions for the calls of one core, traced once for all examples."""

    def __init__(self, kind):
        tlm.emulation.initialize_tpu_system()
        with STRATEGY.scope():
            self.embedding = training.CLASSES[kind](
                tpu.FeatureConfig(
                    tpu.TableConfig(
                        NUM_ROWS,
                        DIM,
                        initializer=tf.zeros_initializer(),
                        combiner="sum",
                        name="words",
                    ),
                    name="shown",
                ),
                tpu.SGD(float(RATE[0])),
            )
            self.embedding.build(NUM_SAMPLES)
        self.enqueue = [
            [self._enqueue(core, training) for training in (False, True)]
            for core in range(NUM_CORES)
        ]
        self.dequeue = [self._dequeue(core) for core in range(NUM_CORES)]
        self.apply = [self._apply(core) for core in range(NUM_CORES)]

    def _enqueue(self, core, training):
        return tf.function(
            lambda ids: self.embedding.enqueue(
                ids, training=training, device=f"/device:TPU:{core}"
            )
        )

    def _dequeue(self, core):
        return _on_core(core, self.embedding.dequeue)

    def _apply(self, core):
        return _on_core(
            core,
            lambda scale: self.embedding.apply_gradients(
                tf.fill([NUM_SAMPLES, DIM], scale)
            ),
        )

    def restart(self):
        tlm.emulation.reset()
        self.rows = self.embedding._variables["words"]["parameters"]
        self.rows.assign(ROWS)
        self.embedding._load_variables()


def _on_core(core, call):
    @tf.function
    def run(*args):
        found = []

        def program(*args):
            context = tf.distribute.get_replica_context()
            if (
                int(tf.get_static_value(context.replica_id_in_sync_group))
                == core
            ):
                found.append(call(*args))

        STRATEGY.run(program, args=args)
        return found[0]

    return run


class AnyOrder(stateful.RuleBasedStateMachine):
    calls: Calls

    def __init__(self):
        super().__init__()
        self.calls.restart()
        self.updates_before = _num_updates()
        self.model = ref.HostEngine(
            [ref.Table(ROWS.copy(), "sgd", [])],
            [ref.Feature("shown", 0)],
            num_replicas=NUM_CORES,
            max_pending_steps=32,
        )
        self.folder = tempfile.TemporaryDirectory()
        self.saved = None

    def teardown(self):
        self.folder.cleanup()

    def both(self, real, model):
        """Calls the TPU and the reference; returns None if both raise."""
        try:
            expected = model()
        except ref.OrderError:
            with pytest.raises(WRONG_ORDER):
                real()
            return None
        return real(), expected

    @stateful.rule(core=cores, ids=ids_of_a_core, training=st.booleans())
    def enqueue(self, core, ids, training):
        self.both(
            lambda: self.calls.enqueue[core][training](
                tf.constant(ids, tf.int64)
            ),
            lambda: self.model.enqueue(
                core, training, [[[(one, 1.0)] for one in ids]]
            ),
        )

    @stateful.rule(core=cores, bad=st.sampled_from([-1, NUM_ROWS]))
    def enqueue_an_out_of_range_id(self, core, bad):
        # tf_layoutmap's class checks ids before it calls the TPU, so this call
        # cannot raise an error about the order of calls.
        is_ours = isinstance(self.calls.embedding, tlm.TPUEmbedding)
        with pytest.raises(
            (tf.errors.InvalidArgumentError, *(() if is_ours else WRONG_ORDER))
        ):
            self.calls.enqueue[core][True](tf.constant([0, bad], tf.int64))
        if is_ours:
            return
        with pytest.raises((ValueError, ref.OrderError)):
            self.model.enqueue(core, True, None, valid=False)

    @stateful.rule(core=cores)
    def dequeue(self, core):
        found = self.both(
            self.calls.dequeue[core], lambda: self.model.dequeue(core)
        )
        if found is not None:
            np.testing.assert_array_equal(found[0], found[1][0])

    @stateful.rule(core=cores, scale=st.integers(-2, 2))
    def apply(self, core, scale):
        gradient = np.full([NUM_SAMPLES, DIM], scale, np.float32)
        self.both(
            lambda: self.calls.apply[core](tf.constant(float(scale))),
            lambda: self.model.apply(core, [gradient], [RATE]),
        )

    @stateful.rule(
        ids=st.tuples(ids_of_a_core, ids_of_a_core), training=st.booleans()
    )
    def full_step(self, ids, training):
        """Runs a complete step, which random orders rarely contain."""
        for core in range(NUM_CORES):
            self.enqueue(core, ids[core], training)
        for core in range(NUM_CORES):
            self.dequeue(core)
        for core in range(NUM_CORES if training else 0):
            self.apply(core, 1)

    @stateful.rule()
    def reset(self):
        tlm.emulation.reset()
        self.model.reset()

    @stateful.rule()
    def save(self):
        self.path = tf.train.Checkpoint(it=self.calls.embedding).write(
            self.folder.name + "/it"
        )
        self.saved = training.values_in(self.path)["words"]
        np.testing.assert_array_equal(self.saved, self.model.tables[0].rows)

    @stateful.precondition(lambda self: self.saved is not None)
    @stateful.rule()
    def restore(self):
        in_flight = any(self.model.awaiting) or any(
            self.model.pending(core) for core in range(NUM_CORES)
        )
        checkpoint = tf.train.Checkpoint(it=self.calls.embedding)
        if in_flight:
            with pytest.raises(
                tf.errors.FailedPreconditionError, match="in flight"
            ):
                checkpoint.read(self.path)
            return
        checkpoint.read(self.path).assert_consumed()
        self.model.tables[0].rows[:] = self.saved

    @stateful.invariant()
    def state_matches_the_reference(self):
        lines = tlm.emulation.report().splitlines()
        for core in range(NUM_CORES):
            assert lines[core] == (
                f"  core {core}: {self.model.pending(core)} batches wait for "
                "`dequeue`"
                + (
                    ", one for its gradients"
                    if self.model.awaiting[core]
                    else ""
                )
            )
        assert not any("waiting:" in line for line in lines)
        assert any("stopped:" in line for line in lines) == (
            self.model.poisoned
        )
        assert _num_updates() - self.updates_before == self.model.num_updates
        self.calls.embedding._retrieve_variables()
        np.testing.assert_array_equal(
            self.calls.rows.variables[0], self.model.tables[0].rows
        )


def _num_updates():
    return int(tlm.emulation.report().splitlines()[-1].split()[0])


@pytest.mark.parametrize("kind", but(training.CLASSES, "stock"))
def test_calls_in_any_order_match_the_reference(kind):
    AnyOrder.calls = Calls(kind)
    stateful.run_state_machine_as_test(
        AnyOrder,
        settings=settings(
            max_examples=settings.default.max_examples // 2,
            stateful_step_count=25,
        ),
    )
