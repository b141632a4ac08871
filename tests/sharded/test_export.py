"""Exported models return the same results without tf_layoutmap installed.

Every public method of a table runs on the original table, on the exported table
and in numpy. The exported table runs in a new process that does not import the
package.
"""

import json

import numpy as np
import pytest
import tensorflow as tf

from tests import forked_process
from tests.sharded.tables import make_table, placed
from tf_layoutmap.sharded import indexing
from tf_layoutmap.sharded.routing import routing

IDS = tf.TensorSpec([None], tf.int32)
ROWS = tf.TensorSpec([None, 2], tf.float32)

READS = {
    "gather": lambda table, ids: tf.gather(table, ids),
    "sparse_read": lambda table, ids: table.sparse_read(ids),
    "lookup": lambda table, ids: tf.nn.embedding_lookup(table, ids),
    "lookup_sparse": lambda table, ids: tf.nn.embedding_lookup_sparse(
        table,
        tf.RaggedTensor.from_row_lengths(ids, [2, 3]),
        None,
        combiner="sum",
    ),
    "item": lambda table, ids: table[4],
    "slice": lambda table, ids: table[3:9:2],
    "reversed": lambda table, ids: table[8:1:-3],
    "column": lambda table, ids: table[..., 1],
    "tensor_index": lambda table, ids: table[ids[0], 1],
    "ids_index": lambda table, ids: table[ids],
    "tensor_slice": lambda table, ids: table[ids[0] :],
    "dense": lambda table, ids: table * 2 + 1,
    # An exported table has one shard, so the results must not depend on the
    # number of shards.
    "shards": lambda table, ids: tf.add_n(
        [tf.reduce_sum(shard) for shard in table]
    ),
    "unique": lambda table, ids: table.gather_rows(ids, unique=True),
    "v1_lookup": lambda table, ids: tf.compat.v1.nn.embedding_lookup(
        table, ids
    ),
    "value": lambda table, ids: table.value(),
    "gather_nd": lambda table, ids: table.gather_nd(
        tf.stack([ids, ids % 2], axis=1)
    ),
    "mask": lambda table, ids: table[tf.range(10) % (ids[1] + 2) == 0],
    "branch": lambda table, ids: tf.cond(
        ids[0] > 3, lambda: tf.gather(table, ids), lambda: table[:2]
    ),
}
WRITES = {
    **{
        verb: lambda table, ids, rows, verb=verb: getattr(table, verb)(
            tf.IndexedSlices(rows, ids)
        )
        for verb in routing.SCATTER_VERBS
    },
    **{
        verb: lambda table, ids, rows, verb=verb: getattr(table, verb)(
            rows[0] * tf.range(10.0)[:, None]
        )
        for verb in ("assign", "assign_add", "assign_sub")
    },
    **{
        f"scatter_nd_{verb}": lambda table, ids, rows, verb=verb: getattr(
            table, f"scatter_nd_{verb}"
        )(tf.stack([ids, ids % 2], axis=1), rows[:, 0])
        for verb in indexing.UPDATE_METHODS
    },
    "batch": lambda table, ids, rows: table.batch_scatter_update(
        tf.IndexedSlices(rows, ids)
    ),
    "slice_assign": lambda table, ids, rows: table[2:7].assign(rows),
    "part_assign": lambda table, ids, rows: table[ids, 1].assign_add(
        rows[:, 1]
    ),
}


def gradient(table, ids):
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(tf.gather(table, ids) ** 2)
    return tf.convert_to_tensor(tape.gradient(total, table))


READS["gradient"] = gradient
LOADER = """
import json, sys
import tensorflow as tf
model = tf.saved_model.load(sys.argv[1])
calls = json.load(open(sys.argv[2]))
answers = {"value": model.table.numpy().tolist()}
for name, ids in calls["reads"]:
    answers[f"{name} {ids}"] = getattr(model, name)(
        tf.constant(ids)).numpy().tolist()
for name, ids in calls["writes"]:
    model.table.assign(calls["value"])
    getattr(model, name)(tf.constant(ids), tf.constant(calls["rows"]))
    answers[f"{name} {ids}"] = model.table.numpy().tolist()
try:
    model.gather(tf.constant([10]))
except tf.errors.InvalidArgumentError as error:
    answers["refusal"] = str(error)
model.table.assign(calls["value"])
served = model.signatures["serving_default"](ids=tf.constant([7, 0]))
answers["served"] = served["output_0"].numpy().tolist()
assert "tf_layoutmap" not in {
    name.partition(".")[0] for name in sys.modules}
json.dump(answers, open(sys.argv[3], "w"))
"""


def traced_read(table, read):
    return tf.function(lambda ids: read(table, ids), input_signature=[IDS])


def traced_write(table, write):
    def step(ids, rows):
        write(table, ids, rows)

    return tf.function(step, input_signature=[IDS, ROWS])


def make_model(table, reads=READS, writes=WRITES):
    model = tf.Module()
    model.table = table
    for name in reads:
        setattr(model, name, traced_read(table, READS[name]))
    for name in writes:
        setattr(model, name, traced_write(table, WRITES[name]))
    return model


TABLES = {
    "one": lambda values: make_table(values, [10]),
    "even": lambda values: make_table(values, [4, 3, 3]),
    "uneven": lambda values: make_table(values, [1, 2, 0, 7]),
    "mod": lambda values: placed(values, "mod"),
    "callable": lambda values: placed(values, "callable"),
    "columns": lambda values: placed(values, "columns", 2),
}


def tables_and_halves():
    """Yields each table with each half of the methods.

    `make test` runs one half with each table, so that each method runs with
    three tables.
    """
    for number, name in enumerate(TABLES):
        for half in (0, 1):
            yield pytest.param(
                name,
                half,
                marks=[pytest.mark.exhaustive] if (number + half) % 2 else [],
            )


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("name_of_table, half", list(tables_and_halves()))
def test_every_method_of_a_loaded_table_matches_the_live_table(
    values, name_of_table, half, tmp_path
):
    reads = ["gather", *[*READS][1:][half::2]]
    writes = [
        "scatter_update",
        *[one for one in WRITES if one != "scatter_update"][half::2],
    ]
    table = TABLES[name_of_table](values)
    model = make_model(table, reads, writes)
    rows = [[2.0, 4.0], [8.0, 2.0], [1.0, 1.0], [4.0, 4.0], [2.0, 2.0]]
    unsorted_ids, sorted_ids = [9, 0, 4, 3, 7], [0, 3, 4, 7, 9]
    calls = {
        "value": values.tolist(),
        "rows": rows,
        "reads": [
            (name, ids) for name in reads for ids in (unsorted_ids, sorted_ids)
        ],
        "writes": [
            (name, ids) for name in writes for ids in (unsorted_ids, sorted_ids)
        ],
    }
    live = {"value": values.tolist()}
    for name, ids in calls["reads"]:
        live[f"{name} {ids}"] = (
            getattr(model, name)(tf.constant(ids)).numpy().tolist()
        )
    for name, ids in calls["writes"]:
        table.assign(values)
        getattr(model, name)(tf.constant(ids), tf.constant(rows))
        live[f"{name} {ids}"] = table.numpy().tolist()
    table.assign(values)
    assert live[f"gather {unsorted_ids}"] == values[unsorted_ids].tolist()
    assert live[f"scatter_update {unsorted_ids}"][9] == rows[0]
    live["served"] = values[[7, 0]].tolist()

    tf.saved_model.save(model, str(tmp_path / "model"), signatures=model.gather)
    (tmp_path / "calls.json").write_text(json.dumps(calls))
    answers = tmp_path / "answers.json"
    forked_process.run_code(
        LOADER,
        str(tmp_path / "model"),
        str(tmp_path / "calls.json"),
        str(answers),
        cwd=tmp_path,
    )
    loaded = json.loads(answers.read_text())
    refusal = loaded.pop("refusal")
    assert "is outside table" in refusal and "10 rows" in refusal
    assert loaded == live


def test_an_exported_graph_has_no_custom_ops(values, tmp_path):
    model = make_model(make_table(values, [4, 6]))
    model.gather(tf.constant([3]))
    tf.saved_model.save(model, str(tmp_path))
    assert b"LayoutMap>" not in (tmp_path / "saved_model.pb").read_bytes()


@pytest.mark.exhaustive
def test_an_export_does_not_change_the_live_table(values, tmp_path):
    table = make_table(values, [4, 6])
    model = make_model(table)
    tf.saved_model.save(model, str(tmp_path))
    assert len(table.variables) == 2
    np.testing.assert_array_equal(
        model.gather(tf.constant([9, 0])), values[[9, 0]]
    )
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(table[3])
    assert tape.gradient(total, table).indices.numpy().tolist() == [3]
    with pytest.raises(AttributeError, match="no single handle"):
        table.handle  # noqa: B018


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["gather", "branch", "slice"])
def test_exporting_a_function_traced_earlier_raises(values, tmp_path, name):
    model = make_model(make_table(values, [4, 6]))
    traced = getattr(model, name).get_concrete_function()
    with pytest.raises(ValueError, match="table 'emb'|Table 'emb'"):
        tf.saved_model.save(model, str(tmp_path), signatures=traced)


@pytest.mark.exhaustive
def test_an_exported_table_restores_into_a_sharded_table(values, tmp_path):
    tf.saved_model.save(make_model(make_table(values, [4, 6])), str(tmp_path))
    table = make_table(np.zeros_like(values), [3, 3, 4])
    tf.train.Checkpoint(table=table).read(
        str(tmp_path / "variables" / "variables")
    ).expect_partial()
    np.testing.assert_array_equal(table.numpy(), values)
