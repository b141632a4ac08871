"""Compares predicted and measured step times of plans on parameter servers.

    python -m tf_layoutmap.local_cluster --ps 2 --workers 1 -- \
        python -m benchmarks.plans

Prints Kendall's rank correlation of predicted and measured times of random
plans, and the measured time of the planned tables divided by the time of the
fastest random plan. All processes run on this machine, so that the servers
share its processors, and the numbers are only meaningful on an idle machine.
"""

import argparse
import itertools
import random
import time

import numpy as np
import tensorflow as tf

import tf_layoutmap as tlm
from tf_layoutmap.planning.plan import Plan
from tf_layoutmap.planning.search import Solution

tpu = tf.tpu.experimental.embedding

# Rows, columns and ids per batch of each table.
TABLES = (
    (200_000, 64, 16_384),
    (400_000, 16, 8192),
    (50_000, 128, 4096),
    (100_000, 32, 4096),
    (1_000, 16, 2048),
    (20_000, 64, 2048),
)


def feature_config():
    return [
        tpu.FeatureConfig(
            tpu.TableConfig(
                rows,
                dim,
                tf.zeros_initializer(),
                combiner="sum",
                name=f"table_{index}",
            )
        )
        for index, (rows, dim, _) in enumerate(TABLES)
    ]


def batches(count):
    rng = np.random.default_rng(0)
    return [
        [
            tf.constant(rng.integers(0, rows, [ids, 1]), tf.int64)
            for rows, _, ids in TABLES
        ]
        for _ in range(count)
    ]


def step_seconds(plan, strategy, coordinator, inputs):
    """Returns the shortest time of a step with a plan."""
    with strategy.scope():
        embedding = tlm.TPUEmbedding(
            feature_config(), tpu.Adagrad(0.1), partitioner=plan
        )

    @tf.function
    def step(ids):
        embedding.enqueue(ids)
        activations = embedding.dequeue()
        embedding.apply_gradients([one + 1.0 for one in activations])

    seconds = []
    for number, one in enumerate([inputs[0], *inputs]):
        start = time.perf_counter()
        coordinator.schedule(step, args=(one,))
        coordinator.join()
        if number > 1:
            seconds.append(time.perf_counter() - start)
    return min(seconds)


def random_plan(plan, rng):
    """Returns a plan with random choices."""
    problem = plan.solution.problem
    selected = {
        item.name: rng.choice(item.choices).name for item in problem.items
    }
    return Plan(Solution(problem, selected), plan.target)


def kendall(pairs):
    """Returns Kendall's rank correlation of pairs of numbers.

    >>> kendall([(1, 10), (2, 20), (3, 15)])
    0.3333333333333333
    """
    signs = [
        np.sign(a[0] - b[0]) * np.sign(a[1] - b[1])
        for a, b in itertools.combinations(pairs, 2)
    ]
    return float(np.mean(signs))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=int, default=50)
    parser.add_argument("--ranked", type=int, default=20)
    parser.add_argument("--steps", type=int, default=15)
    options = parser.parse_args()
    strategy = tlm.ps.connect()
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    num_servers = len(
        {
            one.name
            for one in tf.config.list_logical_devices("CPU")
            if "/job:ps/" in one.name
        }
    )
    inputs = batches(options.steps)
    plan = tlm.plan(
        feature_config(),
        servers=num_servers,
        memory="8GiB",
        optimizer=tpu.Adagrad(0.1),
        ids=tlm.inspect_ids(inputs[:4], feature_config()),
    )
    print(plan, flush=True)
    chosen = step_seconds(plan, strategy, coordinator, inputs)
    print(f"planned: {1e3 * chosen:.2f} ms", flush=True)
    rng = random.Random(0)
    pairs = []
    for _ in range(options.plans):
        other = random_plan(plan, rng)
        measured = step_seconds(other, strategy, coordinator, inputs)
        pairs.append((other.step_seconds, measured))
        print(
            f"predicted {1e3 * pairs[-1][0]:.2f} ms, measured "
            f"{1e3 * measured:.2f} ms",
            flush=True,
        )
    print(f"Kendall: {kendall(pairs[: options.ranked]):.2f}")
    best = min(measured for _, measured in pairs)
    print(f"planned / fastest random plan: {chosen / best:.2f}")


if __name__ == "__main__":
    main()
