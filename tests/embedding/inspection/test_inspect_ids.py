"""Tests tf_layoutmap.inspect_ids, which computes statistics of ids."""

import io
import json
import xml.dom.minidom

import numpy as np
import pytest
import tensorflow as tf
from rich import console

import tf_layoutmap as tlm
from tf_layoutmap.embedding.inspection import html_report, id_counts, svg_plots

tpu = tf.tpu.experimental.embedding


def config(length=0):
    words = tpu.TableConfig(10, 4, name="words", optimizer=tpu.Adam(0.1))
    users = tpu.TableConfig(5, 2, name="<users>")
    return {
        "title": tpu.FeatureConfig(words),
        "body": tpu.FeatureConfig(words, max_sequence_length=length),
        "user": tpu.FeatureConfig(users),
    }


def dataset():
    return [
        {
            "title": tf.ragged.constant([[1, 1, 2], []], dtype=tf.int64),
            "body": tf.sparse.from_dense([[3, 4, 1], [1, 0, 0]]),
            "user": tf.constant([0, 4]),
        },
        {
            "title": tf.ragged.constant([[1], [11, -3]], dtype=tf.int64),
            "body": tf.sparse.from_dense([[1, 0, 0], [1, 0, 0]]),
            "user": tf.constant([[4], [4]]),
        },
    ]


def test_features_are_counted():
    report = tlm.inspect_ids(dataset(), config(2), optimizer=tpu.SGD(0.1))
    assert report.num_batches == 2
    title = report.features["title"]
    assert (title["num_samples"], title["num_ids"]) == (4, 6)
    assert (title["num_distinct"], title["num_empty"]) == (2, 1)
    assert title["num_out_of_range"] == 2
    assert (title["lowest_out_of_range"], title["highest_out_of_range"]) == (
        -3,
        11,
    )
    assert title["mean_ids_per_sample"] == 1.5
    assert title["max_ids_per_sample"] == 3
    assert title["samples_by_size"] == {0: 1, 1: 1, 2: 1, 3: 1}
    # The two batches have 2 samples each and are padded to 3 and 2 positions.
    assert title["padding_waste"] == 1 - 6 / 10
    # The first batch has 2 distinct ids in 3 lookups, the second batch 1 id in
    # 1 lookup.
    assert title["unique_ratio"] == 3 / 4
    body = report.features["body"]
    assert body["num_truncated"] == 1
    assert body["padding_waste"] == 1 - 5 / 8
    assert report.features["user"]["padding_waste"] == 0


def test_gaps_of_a_sparse_sequence_count_as_padding():
    gappy = tf.SparseTensor([[0, 1], [2, 0], [2, 7]], [1, 2, 4], [3, 8])
    feature = config(2)["body"]
    found = tlm.inspect_ids([{"x": gappy}], {"x": feature}).features["x"]
    assert (found["num_truncated"], found["padding_waste"]) == (1, 1 - 2 / 6)
    embedding = tlm.TPUEmbedding({"x": feature}, None)
    embedding.enqueue({"x": gappy})
    assert embedding.stats()["features"]["x"]["num_truncated"] == 1


def test_tables_sum_the_counts_of_their_features():
    report = tlm.inspect_ids(dataset(), config(), optimizer=tpu.SGD(0.1))
    words = report.tables["words"]
    assert words["num_lookups"] == 4 + 6
    assert words["num_distinct"] == 4
    assert words["coverage"] == 0.4
    assert words["hottest_rows"] == [(1, 7), (2, 1), (3, 1), (4, 1)]
    assert words["share_of_hottest"] == {1: 0.7, 10: 1, 100: 1, 1000: 1}
    assert (words["num_bytes"], words["num_slot_bytes"]) == (160, 320)
    assert words["bytes_by_optimizer"] == {
        "SGD": 160,
        "Adagrad": 320,
        "AdagradMomentum": 480,
        "Adam": 480,
        "FTRL": 480,
    }
    assert report.tables["<users>"]["num_slot_bytes"] == 0


def test_labels_are_ignored_and_max_batches_is_applied():
    batches = tf.data.Dataset.from_tensors(
        ({"x": tf.constant([1, 2])}, tf.constant([0.0, 1.0]))
    ).repeat()
    report = tlm.inspect_ids(
        batches,
        {"x": tpu.FeatureConfig(tpu.TableConfig(4, 2, name="t"))},
        max_batches=3,
    )
    assert report.num_batches == 3
    assert report.features["x"]["num_ids"] == 6


def test_an_empty_dataset_is_reported():
    report = tlm.inspect_ids([], config())
    assert report.tables["words"]["num_lookups"] == 0
    assert report.features["title"]["mean_ids_per_sample"] == 0
    assert "<h1>Ids of 0 batches" in report.html()


def test_the_report_is_json_serializable():
    report = tlm.inspect_ids(dataset(), config())
    json.dumps(report.to_dict())
    assert report.to_dict()["tables"]["words"]["num_rows"] == 10


def test_features_and_tables_are_printed():
    stream = io.StringIO()
    tlm.inspect_ids(dataset(), config()).print(
        console.Console(file=stream, width=200)
    )
    shown = stream.getvalue()
    for words in (
        "Features",
        "Tables",
        "title",
        "2 (-3 to 11)",
        "160 B",
        "70.0%",
    ):
        assert words in shown


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_narrow_terminal_shows_full_numbers(width):
    products = tpu.TableConfig(
        1_000_000, 64, name="product_identifiers", optimizer=tpu.Adam(0.1)
    )
    features = {"clicked_products": tpu.FeatureConfig(products)}
    ids = np.arange(1_000_000, 1_200_000)
    report = tlm.inspect_ids([{"clicked_products": ids}], features)
    stream = io.StringIO()
    report.print(console.Console(file=stream, width=width))
    shown = stream.getvalue()
    assert max(map(len, shown.splitlines())) <= width
    assert "…" not in shown
    for rows in (
        html_report.feature_rows(report),
        html_report.table_rows(report),
    ):
        for cell in (*rows[0][1:], *rows[1][1:]):
            assert f" {cell} " in shown
    assert "Features, continued" in shown


def test_a_wide_terminal_shows_unsplit_tables():
    stream = io.StringIO()
    tlm.inspect_ids(dataset(), config()).print(
        console.Console(file=stream, width=200)
    )
    assert "continued" not in stream.getvalue()


def test_plot_axes_have_names_and_labels():
    users = {"user": tpu.FeatureConfig(tpu.TableConfig(2000, 2, name="users"))}
    ids = np.concatenate([np.zeros(5000, np.int64), np.arange(2000)])
    page = tlm.inspect_ids([{"user": ids}], users).html()
    ranks = page.split("users: lookups by rank of the row")[-1].split("</svg>")[
        0
    ]
    for words in (
        "rank of the row (log scale)",
        "lookups (log scale)",
        ">1<",
        ">10<",
        ">100<",
        ">1k<",
    ):
        assert words in ranks
    sizes = page.split("user: samples by number of ids")[-1].split("</svg>")[0]
    for words in (">ids in a sample<", ">samples<", ">0<", ">1<", ">6k<"):
        assert words in sizes


@pytest.mark.parametrize("high", [1, 2, 9, 10, 99, 100, 12_345, 10**9, 10**12])
def test_log_axis_has_few_labels_at_their_positions(high):
    ticks = svg_plots.log_ticks(high)
    assert 1 <= len(ticks) <= 7
    assert ticks[0] == (0.0, "1")
    places = [place for place, _ in ticks]
    assert places == sorted(set(places))
    assert places[-1] <= 1


def test_the_page_is_self_contained(tmp_path):
    report = tlm.inspect_ids(dataset(), config(2))
    report.save_html(tmp_path / "ids.html")
    page = (tmp_path / "ids.html").read_text()
    assert page.count("<svg") == 3 + 2
    for part in page.split("<svg")[1:]:
        xml.dom.minidom.parseString("<svg" + part.split("</svg>")[0] + "</svg>")
    for loading in ("http", "<script", "@import", "<link", "url("):
        assert loading not in page
    assert "&lt;users&gt;" in page
    assert "<users>" not in page
    assert "<td class=bad>2 (-3 to 11)</td>" in page


def test_wrong_structures_and_types_raise():
    with pytest.raises(ValueError, match="`dataset` must have the structure"):
        tlm.inspect_ids([{"title": tf.constant([1])}], config())
    only = {"x": tpu.FeatureConfig(tpu.TableConfig(4, 2, name="t"))}
    with pytest.raises(TypeError, match="'x' must be integers"):
        tlm.inspect_ids([{"x": tf.constant([1.0])}], only)


def test_batched_counts_equal_the_total_counts():
    rng = np.random.default_rng(4)
    counts, everything = id_counts.RowCounts(), []
    for _ in range(20):
        ids = rng.zipf(1.5, 50) % 40
        counts.add(*np.unique(ids, return_counts=True))
        everything.extend(ids.tolist())
    found = np.bincount(everything, minlength=40)
    assert dict(zip(*(one.tolist() for one in counts.items()))) == {
        row: count for row, count in enumerate(found.tolist()) if count
    }
    assert counts.share_of_hottest(5) == np.sort(found)[-5:].sum() / 1000


def test_unique_rows_per_batch_are_counted_over_all_features_of_a_table():
    report = tlm.inspect_ids(dataset(), config())
    # The rows of "words" are {1, 2, 3, 4} and {1}: -3 and 11 are no rows.
    assert report.tables["words"]["mean_unique_per_batch"] == 2.5
    assert report.tables["<users>"]["mean_unique_per_batch"] == 1.5
