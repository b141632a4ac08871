"""Runs cases on a cluster with two servers; test_steps.py starts it.

    python -m tests.embedding.servers.program NUM_SERVERS FOLDER

Prints a line of JSON with the result or the error of each case.
"""

import json
import os
import pathlib
import sys

from tests.embedding.servers import cluster  # isort: skip

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tests.embedding import stock_class
from tests.embedding.servers import key_cases
from tf_layoutmap._core import random_tensors, tf_private
from tf_layoutmap.embedding.servers.closure_trace import ClosureTrace

tpu = tf.tpu.experimental.embedding
NUM_STEPS = 3
OPTIMIZERS = {
    "sgd": lambda: tpu.SGD(0.3),
    "adagrad": lambda: tpu.Adagrad(0.3),
    "adam": lambda: tpu.Adam(0.3),
}
PARTITIONER = tlm.partitioners.FixedShardsPartitioner(3)


def table(name, num_rows, dim, combiner):
    rows = (
        np.random.default_rng(dim)
        .uniform(-1, 1, [num_rows, dim])
        .astype(np.float32)
    )

    def initializer(shape, shard_info=None, dtype=None):
        del shape, dtype
        first = shard_info.offset[0]
        return rows[first : first + shard_info.shape[0]]

    return tpu.TableConfig(
        num_rows, dim, initializer=initializer, combiner=combiner, name=name
    )


def feature_config():
    ads, words = table("ads", 11, 4, "mean"), table("words", 7, 3, "sum")
    return {
        "clicked": tpu.FeatureConfig(ads, name="clicked"),
        "shown": tpu.FeatureConfig(ads, name="shown"),
        "text": tpu.FeatureConfig(words, max_sequence_length=2, name="text"),
        "bag": tpu.FeatureConfig(words, name="bag"),
    }


def embedding(optimizer, **options):
    return tlm.TPUEmbedding(
        feature_config(),
        optimizer,
        **{"partitioner": PARTITIONER, "rounding_seed": 5, **options},
    )


def batch(step):
    random = np.random.default_rng(step)
    num_samples = 3

    def ragged(num_rows):
        sizes = random.integers(0, 5, num_samples)
        return tf.RaggedTensor.from_row_lengths(
            random.integers(0, num_rows, sizes.sum()), sizes
        )

    clicked = ragged(11)
    weights = clicked.with_values(
        tf.constant(
            random.uniform(0.5, 2, clicked.flat_values.shape[0]), tf.float32
        )
    )
    ids = {
        "clicked": clicked,
        "shown": tf.constant(random.integers(0, 11, [num_samples])),
        "text": ragged(7),
        "bag": ragged(7).to_sparse(),
    }
    return ids, weights


def gradients(activations):
    """Returns gradients that depend on the activations."""
    return {name: tf.sin(7 * one) for name, one in activations.items()}


def step_of(one):
    @tf.function(reduce_retracing=True)
    def step(ids, weights):
        one.enqueue(
            ids, {"clicked": weights, "shown": None, "text": None, "bag": None}
        )
        activations = one.dequeue()
        one.apply_gradients(gradients(activations))
        return activations

    return step


def values(one):
    found = {}
    for config, rows in one.embedding_tables.items():
        found[config.name] = rows.numpy().tobytes()
    for config, slots in one.slot_variables.items():
        for name, slot in slots.items():
            found[f"{config.name}/{name}"] = slot.numpy().tobytes()
    return found


def differences(distributed, host):
    return [name for name in distributed if distributed[name] != host[name]]


def trained(strategy, coordinator, optimizer, **options):
    """Returns embeddings trained on servers and host, and differences."""
    host = embedding(OPTIMIZERS[optimizer](), **options)
    with strategy.scope():
        distributed = embedding(OPTIMIZERS[optimizer](), **options)
    steps = step_of(distributed), step_of(host)
    wrong = []
    for number in range(NUM_STEPS):
        future = coordinator.schedule(steps[0], args=batch(number))
        expected = steps[1](*batch(number))
        coordinator.join()
        for name, one in future.fetch().items():
            if np.asarray(one).tobytes() != expected[name].numpy().tobytes():
                wrong.append(f"activation {name}, step {number}")
    return (
        distributed,
        host,
        wrong + differences(values(distributed), values(host)),
    )


def planned(strategy, coordinator):
    """Trains tables that a plan places, and compares bytes and values."""
    num_servers = len(
        [
            one
            for one in tf.config.list_logical_devices("CPU")
            if "/job:ps/" in one.name
        ]
    )
    plan = tlm.plan(
        feature_config(),
        num_servers=num_servers,
        memory="1MiB",
        optimizer=tpu.Adagrad(0.3),
        pins={"ads": "rows", "words": f"table on server {num_servers - 1}"},
        batch_size=3,
        costs=tlm.planning.MachineCosts.typical(),
    )
    host = embedding(OPTIMIZERS["adagrad"](), partitioner=None)
    with strategy.scope():
        distributed = embedding(OPTIMIZERS["adagrad"](), partitioner=plan)
    steps = step_of(distributed), step_of(host)
    for number in range(NUM_STEPS):
        coordinator.schedule(steps[0], args=batch(number))
        steps[1](*batch(number))
        coordinator.join()
    resident = [0] * num_servers
    for variables in (
        *distributed.embedding_tables.values(),
        *(
            one
            for slots in distributed.slot_variables.values()
            for one in slots.values()
        ),
    ):
        for part in getattr(variables, "variables", [variables]):
            server = tf.DeviceSpec.from_string(part.device).task
            resident[server] += 4 * int(np.prod(part.shape))
    predicted = [
        one["weights"] + one["slot variables"] for one in plan.solution.memory()
    ]
    return [
        differences(values(distributed), values(host)),
        resident,
        predicted,
    ]


def quantized(strategy, coordinator):
    def features():
        rows = table("rows", 9, 4, "sum")
        rows.quantization_config = tpu.QuantizationConfig(
            num_buckets=5, lower=-0.5, upper=0.5
        )
        return {"a": tpu.FeatureConfig(rows, name="a")}

    host = tlm.TPUEmbedding(features(), tpu.SGD(0.5))
    with strategy.scope():
        distributed = tlm.TPUEmbedding(features(), tpu.SGD(0.5))

    def step_with(one):
        @tf.function
        def step(ids):
            one.enqueue({"a": ids})
            activations = one.dequeue()
            one.apply_gradients(gradients(activations))
            return activations["a"]

        return step

    ids = tf.constant([3, 8, 3])
    future = coordinator.schedule(step_with(distributed), args=(ids,))
    coordinator.join()
    expected = step_with(host)(ids)
    same = (future.fetch() == expected).numpy().all()
    return [bool(same), differences(values(distributed), values(host))]


def bfloat16_on_the_wire(strategy, coordinator):
    """Compares bfloat16 transfers with the host engine, and checks stats."""
    host = embedding(tpu.SGD(0.25))
    with strategy.scope():
        distributed = embedding(tpu.SGD(0.25), wire_dtype="bfloat16")
    # Rows and gradients are below 1 and are rounded with a relative error of
    # 2^-8. A sample has up to 4 ids with weights up to 2. Up to 30 gradients,
    # each with a weight up to 2, are added to a row, and their sum is rounded
    # once.
    ids, weights = batch(0)
    given = {"clicked": weights, "shown": None, "text": None, "bag": None}

    def step_with(one):
        @tf.function
        def step(ids):
            one.enqueue(ids, given)
            activations = one.dequeue()
            one.apply_gradients(
                {
                    name: tf.fill(tf.shape(found), 1 / 3)
                    for name, found in activations.items()
                }
            )
            return activations

        return step

    future = coordinator.schedule(step_with(distributed), args=(ids,))
    coordinator.join()
    expected = step_with(host)(ids)
    activations = max(
        np.abs(found - expected[name].numpy()).max()
        for name, found in future.fetch().items()
    )
    rows = max(
        abs(one.numpy() - other.numpy()).max()
        for one, other in zip(
            distributed.embedding_tables.values(),
            host.embedding_tables.values(),
            strict=True,
        )
    )
    return [
        bool(0 < activations <= 4 * 2 * 2**-8),
        bool(0 < rows <= 0.25 * 30 * 2 / 3 * 2**-8),
        distributed.stats()["wire_dtype"],
        [one.dtype.name for one in distributed.embedding_tables.values()],
    ]


def checkpoint_of(one):
    return tf.train.Checkpoint(embedding=one)


def checkpoint_for_tensorflows_class(strategy, coordinator):
    del coordinator
    with strategy.scope():
        distributed = tlm.TPUEmbedding(
            stock_class.features(), None, partitioner=PARTITIONER
        )
    stock_class.train(distributed, 2)
    checkpoint_of(distributed).write(str(FOLDER / "stock"))
    found = stock_class.tables_in(FOLDER / "stock")
    return [
        sorted(found),
        differences(
            {name: one.tobytes() for name, one in found.items()},
            values(distributed),
        ),
    ]


def stats(strategy, coordinator):
    distributed, _, wrong = trained(strategy, coordinator, "sgd")
    found = distributed.stats()
    return [
        found["num_updates"],
        found["staleness"],
        found["num_repeated"],
        len(found["servers"]),
        wrong,
    ]


def stale_step(strategy, coordinator):
    """Applies a second step between the lookup and the update of a step."""
    with strategy.scope():
        distributed = embedding(tpu.SGD(0.5))

    @tf.function
    def step(ids, weights):
        factors = {"clicked": weights, "shown": None, "text": None, "bag": None}
        distributed.enqueue(ids, factors)
        activations = distributed.dequeue()
        distributed.apply_gradients(gradients(activations))

    ids, weights = batch(0)
    distributed.enqueue(ids, None)
    activations = distributed.dequeue()
    coordinator.schedule(step, args=(ids, weights))
    coordinator.join()
    distributed.apply_gradients(gradients(activations))
    return distributed.stats()["staleness"]["max"]


def bad_id(strategy, coordinator):
    with strategy.scope():
        distributed = embedding(tpu.SGD(0.5))
    before = values(distributed)
    ids, weights = batch(0)
    bad = {**ids, "shown": tf.constant([0, 11, 1], tf.int64)}
    step = step_of(distributed)
    try:
        coordinator.schedule(step, args=(bad, weights))
        coordinator.join()
        return ["not refused"]
    except tf.errors.InvalidArgumentError as error:
        message = error.message
    # The failed step must not change variables, and the next step must work.
    wrong = differences(values(distributed), before)
    coordinator.schedule(step, args=(ids, weights))
    coordinator.join()
    return [message, wrong, differences(values(distributed), before) != []]


def scheduled(coordinator, closure, *numbers):
    """Runs closures numbered `numbers` and returns their error messages."""
    messages = []
    for number in numbers:
        try:
            coordinator.schedule(
                closure, args=(tf.constant([1, number], tf.int64),)
            )
            coordinator.join()
        except tf.errors.FailedPreconditionError as error:
            messages.append(error.message)
    return messages


def closure_run_again(strategy, coordinator):
    """Runs the same closures again, as a coordinator does if a worker dies."""
    with strategy.scope():
        distributed = embedding(OPTIMIZERS["adam"]())
    host = embedding(OPTIMIZERS["adam"]())
    step = step_of(distributed).python_function

    @tf.function
    def closure(numbers):
        ClosureTrace().begin(numbers)
        strategy.run(step, args=batch(0))

    messages = scheduled(coordinator, closure, 0, 0, 2, 1, 2, 0)
    for _ in range(3):
        step_of(host)(*batch(0))
    return [
        messages,
        differences(values(distributed), values(host)),
        distributed.stats()["num_repeated"],
    ]


def two_steps_in_a_closure(strategy, coordinator):
    with strategy.scope():
        distributed = embedding(OPTIMIZERS["sgd"]())
    host = embedding(OPTIMIZERS["sgd"]())
    step = step_of(distributed)

    @tf.function
    def closure(numbers):
        ClosureTrace().begin(numbers)
        for _ in tf.range(2):
            step(*batch(0))

    messages = scheduled(coordinator, closure, 0)
    step_of(host)(*batch(0))
    return [messages, differences(values(distributed), values(host))]


def calls_of_a_step(strategy, coordinator):
    """Lists the ops that a step runs on servers, and counts their tensors.

    Also lists the servers of the resources that the step captures, and the ops
    on workers with a control dependency on an op on a server. The embeddings
    have 2 and 9 tables.
    """
    del coordinator
    found, captured, waiting = [], [], []
    for count in (2, 9):
        with strategy.scope():
            distributed = tlm.TPUEmbedding(
                {
                    str(i): tpu.FeatureConfig(table(f"t{i}", 9, 4, "sum"))
                    for i in range(count)
                },
                tpu.Adagrad(0.5),
                partitioner=PARTITIONER,
            )

        @tf.function
        def step():
            distributed.enqueue(
                {str(i): tf.constant([i]) for i in range(count)}
            )
            distributed.apply_gradients(gradients(distributed.dequeue()))

        concrete = step.get_concrete_function()
        captured.append(servers_of_captures(concrete))
        ops = concrete.graph.get_operations()
        waiting += [
            one.type
            for one in ops
            if "job:ps" not in one.device
            and any("job:ps" in before.device for before in one.control_inputs)
        ]
        found.append(
            sorted(
                (
                    one.device,
                    one.type,
                    sum(value.dtype != tf.resource for value in one.inputs),
                    len(one.outputs),
                )
                for one in ops
                if "job:ps" in one.device and one.type != "Placeholder"
            )
        )
    return [found, captured, waiting]


def servers_of_captures(concrete):
    """Returns the task of each resource that a function captures."""
    return sorted(
        one.device.split("/")[3]
        for one in concrete.captured_inputs
        if one.dtype == tf.resource
    )


def initial_values(strategy, coordinator):
    """Compares initial values, and lists the devices that drew the values."""
    del coordinator
    rows = np.arange(36, dtype=np.float32).reshape(9, 4)
    initializers = {
        "default": None,
        "uniform": tf.random_uniform_initializer(-1, 1),
        "seeded": tf.random_normal_initializer(seed=4),
        "own": lambda shape, dtype=None: tf.constant(rows[: shape[0]]),
    }

    def create_values():
        tf.random.set_seed(3)
        one = tlm.TPUEmbedding(
            {
                name: tpu.FeatureConfig(
                    tpu.TableConfig(9, 4, initializer=initializer, name=name)
                )
                for name, initializer in initializers.items()
            },
            tpu.Adagrad(0.3),
            partitioner=PARTITIONER,
            table_dtypes={"uniform": "bfloat16"},
        )
        one.build()
        return values(one)

    devices = []
    draw = random_tensors.ops.random_block

    def recording_draw(**arguments):
        devices.append(tf_private.current_device().split("/")[1:4:2])
        return draw(**arguments)

    random_tensors.ops.random_block = recording_draw
    try:
        host = create_values()
        del devices[:]
        with strategy.scope():
            wrong = differences(create_values(), host)
    finally:
        random_tensors.ops.random_block = draw
    return [wrong, len(devices), sorted({"/".join(one) for one in devices})]


def pipelined(strategy, coordinator):
    del coordinator
    with strategy.scope():
        embedding(tpu.SGD(0.5), pipeline_execution_with_tensor_core=True)


def sampled_keys(strategy, coordinator):
    """Reads counts and samples keys in closures, and compares with the host."""
    host = key_cases.embedding({"evict": "lru"})
    with strategy.scope():
        distributed = key_cases.embedding(
            {"evict": "lru"}, partitioner=PARTITIONER
        )
    for number in range(NUM_STEPS):
        key_cases.train(host, number)
        key_cases.train(distributed, number)
    keys = host.vocabularies["words"].keys()

    @tf.function
    def sample(keys):
        words = distributed.vocabularies["words"]
        sampled = tlm.ops.sample_keys(
            words, 500, distribution="count", seed=[1, 2]
        )
        return words.counts(keys), *sampled

    future = coordinator.schedule(sample, args=(keys,))
    coordinator.join()
    counts, sampled, rows, expected_counts = future.fetch()
    expected = host.vocabularies["words"].counts(keys).numpy()
    share = dict(zip(keys.numpy().tolist(), expected / expected.sum()))
    return [
        bool((counts == expected).all()),
        bool(
            (rows == distributed.vocabularies["words"].lookup(sampled))
            .numpy()
            .all()
        ),
        bool(
            np.allclose(
                expected_counts, [500 * share[int(key)] for key in sampled]
            )
        ),
        len(set(np.asarray(sampled).tolist())) > len(keys) // 4,
    ]


def host_asked_for(strategy, coordinator):
    del coordinator
    with strategy.scope():
        embedding(tpu.SGD(0.5), engine="host")


def dequeue_elsewhere(strategy, coordinator):
    del coordinator
    with strategy.scope():
        distributed = embedding(tpu.SGD(0.5))
    distributed.enqueue(batch(0)[0])
    tf.function(lambda: distributed.dequeue()["bag"])()


def traced_training(strategy, coordinator):
    del coordinator
    with strategy.scope():
        distributed = embedding(tpu.SGD(0.5))
    distributed.enqueue(batch(0)[0], training=tf.constant(True))


def shard_devices(strategy, coordinator):
    """Lists the device of each shard, with and without a partitioner."""
    del coordinator
    with strategy.scope():
        distributed = embedding(tpu.Adagrad(0.5))
        unpartitioned = tlm.TPUEmbedding(
            {"a": tpu.FeatureConfig(tpu.TableConfig(1 << 16, 16))}, tpu.SGD(0.5)
        )

    def tasks(one):
        return [
            [
                shard.device.split("/")[3]
                for shard in getattr(rows, "variables", [rows])
            ]
            for rows in one.embedding_tables.values()
        ]

    return [tasks(distributed), tasks(unpartitioned)]


CASES = (
    quantized,
    planned,
    bfloat16_on_the_wire,
    checkpoint_for_tensorflows_class,
    stats,
    stale_step,
    bad_id,
    closure_run_again,
    two_steps_in_a_closure,
    calls_of_a_step,
    initial_values,
    pipelined,
    sampled_keys,
    host_asked_for,
    dequeue_elsewhere,
    traced_training,
    shard_devices,
)


def main(num_servers):
    servers, strategy = cluster.start(num_servers)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    found = {}
    for case in CASES:
        name = case.__name__
        try:
            found[name] = case(strategy, coordinator)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[-3000:]
    print("FOUND " + json.dumps(found), flush=True)
    # The servers run in threads that never end, so the process exits here.
    del servers
    os._exit(0)


if __name__ == "__main__":
    FOLDER = pathlib.Path(sys.argv[2])
    main(int(sys.argv[1]))
