"""Program that uses `tlm.ps.Run` without failures; test_run.py starts it.

python -m tests.ps.run_program FOLDER

Prints a line of JSON with the result or the error of each case.
"""

import json
import os
import pathlib
import sys
import types
import unittest.mock

import numpy as np
import tensorflow as tf
from absl import logging

import tf_layoutmap as tlm
from tests.ps.train import RATE, ROW, embedding, rows
from tf_layoutmap.ps import step_closure

# `sys.argv` contains no folder if pytest imports this file.
tpu = tf.tpu.experimental.embedding
FOLDER = pathlib.Path(sys.argv[-1])


def endless():
    return tf.data.Dataset.from_tensors([ROW]).repeat()


def step_of(one):
    def step(ids):
        one.enqueue({"a": ids, "b": ids})
        activations = one.dequeue()
        one.apply_gradients(
            {name: tf.ones_like(found) for name, found in activations.items()}
        )
        return tf.reduce_sum(activations["a"])

    return step


def make_embedding(strategy):
    with strategy.scope():
        return embedding()


def run(strategy, one, folder, step=None, dataset_fn=endless, **options):
    return tlm.ps.Run(
        strategy,
        step or step_of(one),
        dataset_fn,
        FOLDER / folder,
        **{"objects": {"embedding": one}, **options},
    )


def is_exact(one, num_done):
    return rows(one) == [[-RATE * num_done] * 4] * 2


def calls_add_up(strategy):
    one = make_embedding(strategy)
    first = run(strategy, one, "calls")
    results = [first.steps(3), first.steps(0), first.steps(4)]
    # Simulates a restart of the program.
    restored = make_embedding(strategy)
    second = run(strategy, restored, "calls")
    with unittest.mock.patch.object(logging, "warning") as warning:
        passed = [
            second.num_done,
            second.steps(until=3),
            second.steps(until=7),
            second.num_done,
        ]
        more = [second.steps(2), second.num_done]
        until = [second.steps(until=12), second.num_done]
    # Another restart runs as many steps as the call says.
    third = run(strategy, restored, "calls")
    with unittest.mock.patch.object(logging, "warning") as of_third:
        third.steps(2)
        third.steps(1)
    wrong = []
    for arguments in ({}, {"count": 1, "until": 2}, {"until": -1}):
        try:
            third.steps(**arguments)
        except (TypeError, ValueError) as error:
            wrong.append(str(error))
    return [
        [None if one is None else float(one) for one in results],
        passed,
        [float(more[0]), more[1], float(until[0]), until[1]],
        is_exact(one, 7),
        third.num_done,
        is_exact(restored, 15),
        [
            [call.args[0] % call.args[1:] for call in calls.call_args_list]
            for calls in (warning, of_third)
        ],
        wrong,
    ]


def a_step_that_is_a_tf_function(strategy):
    one = make_embedding(strategy)
    step = tf.function(step_of(one))
    # This call traces the function outside of a closure.
    step(tf.constant([ROW]))
    run(strategy, one, "function", step).steps(3)
    return is_exact(one, 4)


def a_function_that_was_traced_before(strategy):
    one = make_embedding(strategy)
    inner = tf.function(step_of(one))
    inner(tf.constant([ROW]))
    run(strategy, one, "traced", lambda ids: inner(ids)).steps(3)


def some_steps_apply_nothing(strategy):
    """Runs many closures without gradients, more than a server's window."""
    one = make_embedding(strategy)
    step = step_of(one)

    def sometimes(number):
        tf.cond(
            number % 50 == 0,
            lambda: step(tf.constant([ROW])),
            lambda: tf.constant(0.0),
        )

    run(
        strategy, one, "some", sometimes, lambda: tf.data.Dataset.range(1 << 40)
    ).steps(1200)
    return is_exact(one, 24)


def a_step_without_gradients(strategy):
    """Checks that a training step without gradients is warned about once.

    A step that only looks up rows causes no warning.
    """
    one = make_embedding(strategy)
    warnings = []

    def look_up(training):
        def step(ids):
            one.enqueue({"a": ids, "b": ids}, training=training)
            return tf.reduce_sum(one.dequeue()["a"])

        return step

    with unittest.mock.patch.object(
        step_closure.logging, "warning", warnings.append
    ):
        run(strategy, one, "reads", look_up(False)).steps(2)
        run(strategy, one, "forgets", look_up(True)).steps(2)
    return [warnings, is_exact(one, 0)]


def a_dataset_that_ends(strategy):
    one = make_embedding(strategy)
    run(strategy, one, "ends", dataset_fn=lambda: endless().take(2)).steps(9)


def a_dataset_with_input_context(strategy):
    """Passes a dataset function that reads its input context."""
    one = make_embedding(strategy)
    seen = []

    def dataset_fn(context):
        seen.append(context.num_input_pipelines)
        # The pipeline id of the first worker is 0, so its ids are unchanged.
        return endless().map(
            lambda ids: ids + tf.cast(context.input_pipeline_id, ids.dtype)
        )

    run(strategy, one, "context", dataset_fn=dataset_fn).steps(2)
    return [seen[0], is_exact(one, 2)]


def another_embedding(strategy):
    one = make_embedding(strategy)
    run(strategy, one, "other").steps(1)
    with strategy.scope():
        other = tf.Variable(1.0)
    run(strategy, one, "other", objects={"embedding": one, "other": other})


def run_of_two(strategy, folder, value, **options):
    one = make_embedding(strategy)
    with strategy.scope():
        dense = tf.Variable(value)
    objects = {"embedding": one, "dense": dense}
    return one, dense, run(strategy, one, folder, objects=objects, **options)


def a_variable_of_another_shape(strategy):
    _, _, first = run_of_two(strategy, "shape", 5.0)
    first.steps(1)
    one = make_embedding(strategy)
    with strategy.scope():
        other = tf.Variable([1.0, 2.0])
    try:
        run(strategy, one, "shape", objects={"embedding": one, "dense": other})
    except ValueError as error:
        return [str(error), other.numpy().tolist(), is_exact(one, 0)]
    return None


def a_missing_object(strategy):
    _, _, first = run_of_two(strategy, "less", 5.0)
    first.steps(1)
    one = make_embedding(strategy)
    try:
        run(strategy, one, "less")
    except ValueError as error:
        message = str(error)
    second = run(strategy, one, "less", allow_missing=["dense"])
    return [message, second.num_done, is_exact(one, 1)]


def keys_and_16_bit_rows_are_restored(strategy):
    """A checkpoint stores all shards of a table as one variable."""

    def keyed():
        with strategy.scope():
            return tlm.TPUEmbedding(
                tpu.FeatureConfig(tpu.TableConfig(64, 4, name="t")),
                tpu.Adagrad(0.5),
                vocabularies={
                    "t": tlm.vocabulary.OpenVocabulary(
                        64, admission="count", min_count=2
                    )
                },
                table_dtypes={"t": "bfloat16"},
                partitioner=tlm.partitioners.FixedShardsPartitioner(2),
            )

    def step_on(one):
        def step(ids):
            one.enqueue(ids)
            one.apply_gradients(tf.ones_like(one.dequeue()))

        return step

    one, other = keyed(), keyed()
    run(strategy, one, "keyed", step_on(one)).steps(5)
    restored = run(strategy, other, "keyed", step_on(other))
    return [restored.num_done, other.vocabularies["t"].keys().numpy().tolist()]


def a_run_after_a_resize(strategy):
    with strategy.scope():
        one = tlm.TPUEmbedding(
            tpu.FeatureConfig(tpu.TableConfig(64, 4, name="t")),
            tpu.Adagrad(0.5),
            vocabularies={"t": tlm.vocabulary.OpenVocabulary(64)},
        )

    def step(ids):
        one.enqueue(ids)
        one.apply_gradients(tf.ones_like(one.dequeue()))

    before = run(strategy, one, "resized", step)
    before.steps(2)
    one.vocabularies["t"].resize(128)
    try:
        error = str(before.steps(2))
    except tf.errors.FailedPreconditionError as raised:
        error = raised.message
    before.save()
    after = run(strategy, one, "resized", step)
    after.steps(3)
    keys = one.vocabularies["t"].keys().numpy().tolist()
    return error, after.num_done, keys


def changes_between_steps_are_saved(strategy):
    one, dense, first = run_of_two(strategy, "between", 5.0)
    first.steps(1)
    dense.assign(7.0)
    first.save()
    restored, found, second = run_of_two(strategy, "between", 0.0)
    return [second.num_done, float(found.numpy()), is_exact(restored, 1)]


def a_step_without_a_batch(strategy):
    """Runs a step whose operations do not depend on its batch."""
    with strategy.scope():
        count = tf.Variable(0)
        nested = tf.Variable(0)

    @tf.function
    def add():
        nested.assign_add(1)

    def step(ids):
        count.assign_add(1)
        add()

    tested = run(
        strategy,
        None,
        "nothing",
        step,
        lambda: endless().take(3),
        objects={"count": count},
    )
    errors = []
    for _ in range(3):
        try:
            tested.steps(9)
        except ValueError as error:
            errors.append(str(error))
    return [tested.num_done, int(count.numpy()), int(nested.numpy()), errors]


def a_dataset_created_outside(strategy):
    outside = endless()
    errors = []
    for dataset_fn in (
        lambda: outside,
        lambda: (
            tf.data.Dataset.range(9)
            .map(lambda _: 0)
            .concatenate(outside.map(lambda ids: ids[0]))
        ),
    ):
        one = make_embedding(strategy)
        try:
            run(strategy, one, "elsewhere", dataset_fn=dataset_fn).steps(1)
        except ValueError as error:
            errors.append(str(error))
    run(strategy, one, "elsewhere").steps(3)
    return [errors, is_exact(one, 3)]


def closures_of_several_steps(strategy):
    """Runs closures whose number of steps does not divide the total number."""
    one = make_embedding(strategy)
    tested = run(strategy, one, "several", steps_per_closure=3)
    results = [float(tested.steps(count)) for count in (7, 1, 3)]
    return [results, tested.num_done, is_exact(one, 11)]


# Batches of the cases about prefetched rows. A batch and the next one have
# different ids; a batch and the one after the next have common ids.
BATCHES = np.int64([[2, 6, 2], [1, 3, 5], [6, 0, 4], [5, 3, 3]])


def train_on(one, batch):
    one.enqueue(batch)
    activations = one.dequeue()
    one.apply_gradients(activations)
    return activations


def adagrad_table(**options):
    config = tpu.FeatureConfig(
        tpu.TableConfig(
            8, 4, initializer=tf.constant_initializer(0.25), name="t"
        )
    )
    return tlm.TPUEmbedding(config, tpu.Adagrad(0.5), **options)


def table_on_two_servers(strategy):
    with strategy.scope():
        return adagrad_table(
            partitioner=tlm.partitioners.FixedShardsPartitioner(2)
        )


def batches():
    return tf.data.Dataset.from_tensor_slices(BATCHES).repeat()


def order_on_a_server(graph):
    """Returns whether each read of rows follows each update, by program order.

    All ops are on the server of the first read.
    """
    ops = graph.get_operations()
    # The joined op updates rows before it reads rows.
    joined = "LayoutMap>ApplyAndFetchRows"
    reads = [
        one for one in ops if one.type in ("LayoutMap>FetchServerRows", joined)
    ]
    updates = [
        one for one in ops if one.type in ("LayoutMap>ApplyRows", joined)
    ]

    def ancestors(op):
        found, todo = {op}, [op]
        while todo:
            one = todo.pop()
            before = {tensor.op for tensor in one.inputs}
            before.update(one.control_inputs)
            todo.extend(before - found)
            found |= before
        return found

    device = reads[0].device
    updates = [one for one in updates if one.device == device]
    # A worker computes the gradients of a step before the update.
    gradients = [one for one in ops if one.type == "LayoutMap>FoldGradients"]
    reads = [one for one in reads if one.device == device]
    for read in reads:
        before = ancestors(read)
        assert [one in before for one in updates] == [
            one in before for one in gradients
        ]
    return [[update in ancestors(read) for update in updates] for read in reads]


def prefetched_rows(strategy):
    """Trains with prefetched rows, and returns a list of results for each run.

    A list consists of whether the rows are the rows of the host, the maximum
    staleness, and the order of reads and updates.
    """
    host = adagrad_table()
    for number in range(12):
        train_on(host, tf.constant(BATCHES[number % len(BATCHES)]))
    (expected,) = host.embedding_tables.values()
    found = {}
    for prefetch_steps in (0, 1, 3):
        one = table_on_two_servers(strategy)
        tested = run(
            strategy,
            one,
            f"prefetched{prefetch_steps}",
            lambda batch, one=one: tf.reduce_sum(train_on(one, batch)),
            batches,
            steps_per_closure=5,
            prefetch_steps=prefetch_steps,
        )
        tested.steps(12)
        (table,) = one.embedding_tables.values()
        found[prefetch_steps] = [
            bool((table.numpy() == expected.numpy()).all()),
            one.stats()["staleness"]["max"],
            order_on_a_server(tested._rounds._closure._traced[5].graph),
        ]
    return found


def reads_the_table_first(one, batch):
    (table,) = one.embedding_tables.values()
    found = tf.reduce_sum(table.read_value())
    return found + tf.reduce_sum(train_on(one, batch))


def reads_the_table_last(one, batch):
    train_on(one, batch)
    (table,) = one.embedding_tables.values()
    return tf.reduce_sum(table.read_value())


def look_up(one, batch):
    one.enqueue(batch, training=False)
    return tf.reduce_sum(one.dequeue())


def looks_up_twice(one, batch):
    train_on(one, batch)
    return look_up(one, batch)


def looks_up_in_a_branch(one, batch):
    found = tf.cond(
        batch[0] > 2, lambda: look_up(one, batch), lambda: tf.constant(0.0)
    )
    return found + tf.reduce_sum(train_on(one, batch))


def trains_in_a_branch(one, batch):
    found = tf.cond(
        batch[0] > 2,
        lambda: tf.reduce_sum(train_on(one, batch)),
        lambda: tf.constant(0.0),
    )
    return found + look_up(one, batch)


def joined_calls(strategy):
    """Returns results of steps, and the ops of a closure on a server, by step.

    A result consists of whether the results of steps and the rows equal the
    results of the host, and of the number of reads, updates and joined calls of
    a server.
    """
    found = {}
    for step in (
        lambda one, batch: tf.reduce_sum(train_on(one, batch)),
        reads_the_table_first,
        reads_the_table_last,
        looks_up_twice,
        looks_up_in_a_branch,
        trains_in_a_branch,
    ):
        name = step.__name__.strip("<>")
        host = adagrad_table()
        expected = [
            float(
                tf.function(step)(
                    host, tf.constant(BATCHES[number % len(BATCHES)])
                )
            )
            for number in range(12)
        ]
        one = table_on_two_servers(strategy)
        tested = run(
            strategy,
            one,
            f"joined_{name}",
            lambda batch, one=one, step=step: step(one, batch),
            batches,
            steps_per_closure=5,
        )
        results = [float(tested.steps(count)) for count in (5, 7)]
        (table,) = one.embedding_tables.values()
        (rows_of_host,) = host.embedding_tables.values()
        graph = tested._rounds._closure._traced[5].graph
        ops = [one.type.removeprefix("LayoutMap>") for one in server_ops(graph)]
        found[name] = [
            results == [expected[4], expected[11]],
            bool((table.numpy() == rows_of_host.numpy()).all()),
            [
                ops.count(kind)
                for kind in (
                    "FetchServerRows",
                    "ApplyRows",
                    "ApplyAndFetchRows",
                )
            ],
        ]
    return found


def server_ops(graph):
    """Returns the ops on the first server in a function and its branches."""
    ops = list(graph.get_operations())
    for function in graph.as_graph_def().library.function:
        ops.extend(
            types.SimpleNamespace(type=node.op, device=node.device)
            for node in function.node_def
        )
    return [
        one for one in ops if "job:ps" in one.device and "task:0" in one.device
    ]


def folder_that_is_a_file(strategy):
    (FOLDER / "file").touch()
    run(strategy, None, "file")


def refusal(**arguments):
    return lambda strategy: run(
        strategy, make_embedding(strategy), "refused", **arguments
    )


CASES = {
    **{
        case.__name__: case
        for case in [
            calls_add_up,
            a_step_that_is_a_tf_function,
            a_function_that_was_traced_before,
            some_steps_apply_nothing,
            a_step_without_gradients,
            a_dataset_that_ends,
            a_dataset_with_input_context,
            another_embedding,
            folder_that_is_a_file,
            a_variable_of_another_shape,
            a_missing_object,
            keys_and_16_bit_rows_are_restored,
            changes_between_steps_are_saved,
            a_run_after_a_resize,
            a_step_without_a_batch,
            a_dataset_created_outside,
            closures_of_several_steps,
            prefetched_rows,
            joined_calls,
        ]
    },
    "no_objects": refusal(objects={}),
    "no_function": refusal(step=3),
    "no_such_answer": refusal(on_server_loss="wait"),
    "no_time": refusal(save_every="soon"),
    "no_time_to_connect": lambda strategy: tlm.ps.connect(timeout_seconds="a"),
    "nothing_kept": refusal(max_to_keep=0),
    "too_many_prefetched": refusal(steps_per_closure=1, prefetch_steps=1),
    "a_name": refusal(allow_missing="dense"),
    "fewer_steps": lambda strategy: run(
        strategy, make_embedding(strategy), "fewer"
    ).steps(-1),
}


def main():
    strategy = tlm.ps.connect()
    found = {}
    for name, case in CASES.items():
        try:
            found[name] = case(strategy)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"[-2000:]
    print("FOUND " + json.dumps(found), flush=True)
    os._exit(0)  # A coordinator would not exit normally while its workers run.


if __name__ == "__main__":
    main()
