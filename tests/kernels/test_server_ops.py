"""The ops of steps over servers against a reference that keeps lists."""

import json

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import tf_layoutmap as tlm
from tests.kernels import cases
from tests.reference import host_engine, servers
from tf_layoutmap import _ops
from tf_layoutmap.embedding.servers.step_ops import APPLIED_SIZE

InvalidArgument = tf.errors.InvalidArgumentError
FailedPrecondition = tf.errors.FailedPreconditionError

OFFSETS = [(0, 4, 7), (0, 2, 2, 5)]
DIMS = [3, 16]
OPTIMIZERS = ["adagrad", "sgd"]
FEATURES = [host_engine.Feature("clicked", 0, "mean"),
            host_engine.Feature("text", 1, "sum", max_sequence_length=2),
            host_engine.Feature("shown", 0, "sqrtn"),
            host_engine.Feature("bag", 1, "sum")]
HYPERPARAMETERS = [np.array([0.3], np.float32), np.array([0.5], np.float32)]
NAMES = ["ads", "words"]


def plan_attrs(shard_servers, num_servers, **changes) -> dict:
    return {
        "num_servers": num_servers, "shard_servers": shard_servers,
        "table_names": NAMES,
        "table_num_rows": [one[-1] for one in OFFSETS],
        "table_dims": DIMS,
        "table_num_shards": [len(one) - 1 for one in OFFSETS],
        "table_placements": ["offsets", "offsets"],
        "table_offsets": [o for one in OFFSETS for o in one],
        "table_optimizers": OPTIMIZERS,
        "feature_names": [one.name for one in FEATURES],
        "feature_tables": [one.table for one in FEATURES],
        "feature_combiners": [one.combiner for one in FEATURES],
        "feature_max_sequence_lengths": [
            one.max_sequence_length for one in FEATURES],
        **changes}


@st.composite
def batches(draw):
    """By feature samples of (id, weight); and whether it has weights."""
    num_samples = draw(st.integers(0, 4))
    batch = []
    for feature in FEATURES:
        row = st.integers(0, OFFSETS[feature.table][-1] - 1)
        weight = (st.just(1.0) if feature.max_sequence_length else
                  st.sampled_from([1.0, 2.0, 3.0]))
        batch.append([draw(st.lists(st.tuples(row, weight), max_size=5))
                      for _ in range(num_samples)])
    return batch


def inputs(batch, id_type=np.int64) -> dict:
    flat = [[one for sample in samples for one in sample] for samples in batch]
    return {
        "ids": [np.array([i for i, _ in one], id_type) for one in flat],
        "splits": [np.cumsum([0, *map(len, samples)]).astype(np.int64)
                   for samples in batch],
        "num_samples": np.array([len(one) for one in batch], np.int64),
        "weights": [np.array([w for _, w in one], np.float32)
                    if not feature.max_sequence_length
                    else np.zeros(0, np.float32)
                    for feature, one in zip(FEATURES, flat, strict=True)]}


class Cluster:
    """Servers that are all here: the ops, and the reference beside them."""

    def __init__(self, shard_servers, num_servers=2):
        self.plan_attrs = plan_attrs(shard_servers, num_servers)
        self.refs, self.variables = [], []
        self.tables = [[] for _ in range(num_servers)]
        shards = [[] for _ in range(num_servers)]
        places = iter(shard_servers)
        for t, offsets in enumerate(OFFSETS):
            rows = cases.floats(offsets[-1], DIMS[t], seed=t)
            for first, end in zip(offsets[:-1], offsets[1:], strict=True):
                server = next(places)
                own = rows[first:end].copy()
                slots = ([np.full_like(own, 0.5)]
                         if OPTIMIZERS[t] == "adagrad" else [])
                shards[server].append(servers.Shard(t, first, own, slots))
                self.tables[server].append(t)
        for own in shards:
            self.refs.append(servers.Server(
                own, [OPTIMIZERS[one.table] for one in own]))
            self.variables.append({
                "shards": [tf.Variable(one.rows) for one in own],
                "slots": [tf.Variable(slot) for one in own
                          for slot in one.slots],
                "applied": tf.Variable(tf.zeros([APPLIED_SIZE], tf.int64))})

    def describe(self, server) -> dict:
        return {"tables": [NAMES[t] for t in self.tables[server]],
                "dims": [DIMS[t] for t in self.tables[server]],
                "dtypes": [tf.float32 for t in self.tables[server]]}

    def plan(self, batch, id_type=np.int64):
        return _ops.plan_step(**inputs(batch, id_type), **self.plan_attrs)

    def fetch(self, server, request, **changes):
        own = self.variables[server]
        return _ops.fetch_rows(**{
            "shards": cases.handles(own["shards"]),
            "applied": own["applied"].handle, "request": request,
            **self.describe(server), **changes})

    def apply(self, server, request, values, **changes):
        own, tables = self.variables[server], self.tables[server]
        return _ops.apply_rows(**{
            "shards": cases.handles(own["shards"]),
            "slots": cases.handles(own["slots"]), "rounding_steps": [],
            "applied": own["applied"].handle,
            "request": request, "values": values, "table_numbers": tables,
            "first_rows": [one.first_row for one in self.refs[server].shards],
            "optimizers": [OPTIMIZERS[t] for t in tables],
            "num_hyperparameters": [1 for _ in tables],
            **self.describe(server), **changes})

    def check(self):
        for ref, own in zip(self.refs, self.variables, strict=True):
            slots = iter(own["slots"])
            for shard, variable in zip(ref.shards, own["shards"], strict=True):
                cases.same_bits(variable.numpy(), shard.rows)
                for slot in shard.slots:
                    cases.same_bits(next(slots).numpy(), slot)
            assert own["applied"].numpy()[2] == ref.num_updates


def combine(plan, fetched, **changes):
    return _ops.combine_rows(**{
        "plan": plan, "fetched": fetched, "num_features": len(FEATURES),
        "dims": [DIMS[one.table] for one in FEATURES],
        "max_sequence_lengths": [
            one.max_sequence_length for one in FEATURES], **changes})


# Of five shards, some of them empty or on a server of their own.
cuts = st.lists(st.integers(0, 1), min_size=5, max_size=5).filter(
    lambda servers: set(servers) == {0, 1})
tokens = st.tuples(st.integers(1, 2), st.integers(-1, 4), st.integers(0, 3))


@given(cut=cuts, batch=batches(), id_type=st.sampled_from(cases.ID_TYPES))
def test_each_server_is_asked_for_its_unique_rows(cut, batch, id_type):
    cluster = Cluster(cut)
    _, requests = cluster.plan(batch, id_type)
    for ref, request in zip(cluster.refs, requests, strict=True):
        cases.same_bits(request, servers.words(FEATURES, batch, ref.shards))


@given(cut=cuts, batch=batches(), num_updates=st.integers(0, 2**62))
def test_a_server_answers_with_rows_and_its_updates(cut, batch, num_updates):
    cluster = Cluster(cut)
    for server, request in enumerate(cluster.plan(batch).requests):
        own = cluster.variables[server]["applied"]
        own.assign(tf.tensor_scatter_nd_update(own, [[2]], [num_updates]))
        cases.same_bits(
            cluster.fetch(server, request),
            servers.fetched(num_updates, request.numpy(),
                            cluster.refs[server].shards))


@given(cut=cuts, batch=batches())
def test_rows_are_combined_as_by_the_host_engine(cut, batch):
    cluster = Cluster(cut)
    plan, requests = cluster.plan(batch)
    activations = combine(plan, [
        cluster.fetch(*one) for one in enumerate(requests)])
    tables = [host_engine.Table(
        cases.floats(offsets[-1], DIMS[t], seed=t), OPTIMIZERS[t], [])
        for t, offsets in enumerate(OFFSETS)]
    engine = host_engine.HostEngine(
        tables, FEATURES, num_replicas=1, max_pending_steps=1)
    engine.enqueue(0, True, batch)
    for found, expected in zip(activations, engine.dequeue(0), strict=True):
        cases.same_bits(found, expected)


@given(cut=cuts, batch=batches(), seed=st.integers(0, 9), token=tokens)
def test_gradients_are_summed_row_by_row(cut, batch, seed, token):
    cluster = Cluster(cut)
    plan, requests = cluster.plan(batch)
    fetched = [cluster.fetch(*one) for one in enumerate(requests)]
    gradients = [cases.floats(*one.shape, seed=seed)
                 for one in combine(plan, fetched)]
    messages, values = _ops.fold_gradients(
        plan=plan, fetched=fetched, gradients=gradients,
        hyperparameters=HYPERPARAMETERS, token=np.array(token, np.int64))
    flat = [one.reshape(-1, one.shape[-1]) for one in gradients]
    for ref, message, own in zip(cluster.refs, messages, values, strict=True):
        cases.same_bits(message, np.concatenate([
            servers.header(token, 0),
            servers.words(FEATURES, batch, ref.shards)]))
        cases.same_bits(own, np.concatenate([
            *(HYPERPARAMETERS[one.table] for one in ref.shards),
            *(servers.sums(FEATURES, batch, flat, one)
              for one in ref.shards)]))


@given(cut=cuts, data=st.data())
def test_each_closure_is_applied_once(cut, data):
    cluster = Cluster(cut)
    server = data.draw(st.integers(0, 1))
    ref = cluster.refs[server]
    for step in range(data.draw(st.integers(1, 6))):
        token = data.draw(tokens)
        rows, gradients = [], []
        for shard in ref.shards:
            rows.append(sorted(data.draw(st.sets(st.integers(
                0, max(len(shard.rows) - 1, 0)), max_size=len(shard.rows)))))
            gradients.append(cases.floats(
                len(rows[-1]), shard.rows.shape[1], seed=step))
        rates = [HYPERPARAMETERS[one.table] for one in ref.shards]
        message = np.concatenate([
            servers.header(token, 0), np.array(
                [*map(len, rows), *sum(rows, [])], np.uint32)])
        values = np.concatenate([*rates, *(one.ravel() for one in gradients)])
        expected = ref.apply(token, rows, gradients, rates)
        try:
            found = bool(cluster.apply(server, message, values))
        except FailedPrecondition:
            found = None
        assert found is expected, token
        cluster.check()


@pytest.mark.parametrize("ids, words", [
    ([[(7, 1.0)]], "Feature 'clicked', sample 0: id 7.*'ads' with 7 rows"),
    ([[(0, 1.0)], [(-1, 1.0)]], "Feature 'clicked', sample 1: id -1")])
def test_a_bad_id_names_its_feature_and_sample(ids, words):
    with pytest.raises(InvalidArgument, match=words):
        Cluster([0, 1, 0, 1, 0]).plan(
            [ids, *([[] for _ in ids] for _ in FEATURES[1:])])


@pytest.mark.parametrize("changes, words", [
    ({"shard_servers": [0, 1]}, "each of 5 shards"),
    ({"shard_servers": [0, 1, 2, 0, 0]}, r"in \[0, 2\)"),
    ({"table_placements": ["mod", "offsets"],
      "table_offsets": [0, 4, 7, 0, 2, 2, 5]}, "contiguous rows"),
    ({"table_optimizers": ["adagrad"]}, "too few values")])
def test_a_plan_of_other_tables_is_refused(changes, words):
    attrs = {**plan_attrs([0, 1, 0, 1, 0], 2), **changes}
    with pytest.raises(InvalidArgument, match=words):
        _ops.plan_step(**inputs([[] for _ in FEATURES]), **attrs)


@pytest.mark.parametrize("request_words, words", [
    ([], "too few"), ([9, 0, 0], "too few"), ([1, 0, 0, 4], "below 4"),
    ([0, 0, 0, 1], "must have 3 words"),
    ([2**32 - 1, 2**32 - 1, 2**32 - 1], "too few")])
def test_a_request_that_does_not_fit_is_refused(request_words, words):
    cluster = Cluster([0, 1, 0, 1, 0])
    request = np.array(request_words, np.uint32)
    with pytest.raises(InvalidArgument, match=words):
        cluster.fetch(0, request)
    with pytest.raises(InvalidArgument, match=words):
        cluster.apply(0, np.concatenate([servers.header((1, 0, 0), 0),
                                         request]), np.zeros(3, np.float32))
    cluster.check()


@pytest.mark.parametrize("changes, words", [
    ({"values": np.zeros(2, np.float32)}, "values. Received: 2"),
    ({"values": np.array([-1, 0, 0], np.float32)}, "learning rate"),
    ({"values": np.zeros([3, 1], np.float32)}, "`values` must have rank 1"),
    ({"request": np.zeros(7, np.uint32)}, "begin with 8 words"),
    ({"dims": [3, 16, 0]}, "`dims` must be 1 or more"),
    ({"dims": [4, 16, 16]}, "'ads'"),
    ({"num_hyperparameters": [1, 1, -1]}, "must not be negative"),
    ({"optimizers": ["sgd"]}, "`optimizers` must have one value for each of 3"),
    ({"slots": []}, "need 1 `slots`. Received: 0")])
def test_an_update_that_does_not_fit_changes_nothing(changes, words):
    cluster = Cluster([0, 1, 0, 1, 0])
    arguments = {"request": np.concatenate([
        servers.header((1, 0, 0), 0), np.zeros(3, np.uint32)]),
        "values": np.zeros(3, np.float32), **changes}
    with pytest.raises(InvalidArgument, match=words):
        cluster.apply(0, **arguments)
    cluster.check()


def test_rows_that_do_not_ascend_are_refused():
    cluster = Cluster([0, 1, 0, 1, 0])
    with pytest.raises(InvalidArgument, match="must ascend"):
        cluster.apply(0, np.concatenate([
            servers.header((1, 0, 0), 0),
            np.array([2, 0, 0, 3, 1], np.uint32)]), np.zeros(9, np.float32))
    cluster.check()


def test_a_state_of_another_size_is_refused():
    cluster = Cluster([0, 1, 0, 1, 0])
    cluster.variables[0]["applied"] = tf.Variable(tf.zeros([9], tf.int64))
    with pytest.raises(InvalidArgument, match="closures applied"):
        cluster.fetch(0, np.zeros(3, np.uint32))


def test_a_process_tells_its_versions():
    found = json.loads(_ops.describe_process().numpy())
    assert found == {"tensorflow": tf.__version__,
                     "tf_layoutmap": tlm.__version__}


def test_what_is_no_plan_or_no_answer_is_refused():
    cluster = Cluster([0, 1, 0, 1, 0])
    plan, requests = cluster.plan([[] for _ in FEATURES])
    fetched = [cluster.fetch(*one) for one in enumerate(requests)]
    gradients = [tf.zeros(one.shape) for one in combine(plan, fetched)]
    fold = {"plan": plan, "fetched": fetched, "gradients": gradients,
            "hyperparameters": HYPERPARAMETERS,
            "token": np.array([1, 0, 0], np.int64)}
    _ops.fold_gradients(**fold)
    for changes, words in [
            ({"plan": tf.raw_ops.EmptyTensorList(
                element_shape=tf.constant([], tf.int32), max_num_elements=0,
                element_dtype=tf.float32)}, "must be what `PlanStep` made"),
            ({"fetched": [tf.zeros([3]), fetched[1]]}, "must have 2 values"),
            ({"fetched": fetched[:1]}, "each of 2 servers"),
            ({"gradients": gradients[:1]}, "`num_features` must be 4"),
            ({"gradients": [tf.zeros([1, 3]), *gradients[1:]]}, "'clicked'"),
            ({"hyperparameters": [[0.5]]}, "`num_tables` must be 2"),
            ({"hyperparameters": [[0.5], [-1.0]]}, "Table 'words'"),
            ({"token": np.array([1, 0], np.int64)}, "epoch, number and")]:
        with pytest.raises(InvalidArgument, match=words):
            _ops.fold_gradients(**{**fold, **changes})
    with pytest.raises(InvalidArgument, match="`num_features` must be 4"):
        combine(plan, fetched, num_features=1, dims=[3],
                max_sequence_lengths=[0])
