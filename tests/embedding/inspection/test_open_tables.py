"""Tests the settings that `inspect_ids` proposes for open vocabularies."""

import io
import xml.dom.minidom

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from rich import console

import tf_layoutmap as tlm
from tf_layoutmap.embedding.inspection import id_counts

tpu = tf.tpu.experimental.embedding
WORDS = tpu.TableConfig(10, 4, name="words", combiner="sum")


def config(table=WORDS):
    return {"title": tpu.FeatureConfig(table), "text": tpu.FeatureConfig(table)}


def batches(num_batches=20, seed=1, dtype=str):
    rng = np.random.default_rng(seed)
    return [
        {
            name: tf.constant((rng.zipf(1.4, [16, 3]) % 500).astype(dtype))
            for name in ("title", "text")
        }
        for _ in range(num_batches)
    ]


class KeyCountsReference:
    """Reference implementation that counts one key at a time."""

    def __init__(self, steps):
        self.total = {}
        self.spent = {one: {} for one in id_counts.MIN_COUNTS}
        for step in steps:
            for key in step:
                self.total[key] = self.total.get(key, 0) + 1
            for key in set(step):
                for least, spent in self.spent.items():
                    if key not in spent and self.total[key] >= least:
                        spent[key] = self.total[key]

    def served(self, min_count):
        return sorted(
            (
                self.total[key] - spent
                for key, spent in self.spent[min_count].items()
            ),
            reverse=True,
        )


@given(st.lists(st.lists(st.integers(-5, 5), max_size=12), max_size=8))
def test_key_counts_match_the_reference(steps):
    counts, expected = id_counts.KeyCounts(), KeyCountsReference(steps)
    for step in steps:
        counts.add(np.array(step, np.int64))
    keys, lookups = counts.items()
    assert dict(zip(keys.tolist(), lookups.tolist())) == expected.total
    assert keys.tolist() == sorted(expected.total)
    for min_count in id_counts.MIN_COUNTS:
        assert counts.served(min_count).tolist() == expected.served(min_count)


@pytest.mark.parametrize("dtype", [str, np.int64])
@pytest.mark.parametrize("min_count", [1, 3])
def test_shares_match_a_training_run(min_count, dtype):
    data = batches(dtype=dtype)
    report = tlm.inspect_ids(data, config(), open_tables=[WORDS]).tables[
        "words"
    ]
    table = tpu.TableConfig(4000, 4, name="words", combiner="sum")
    settings = {"admission": "count", "min_count": min_count}
    embedding = tlm.TPUEmbedding(
        config(table),
        tpu.SGD(0.1),
        vocabularies={
            "words": tlm.vocabulary.OpenVocabulary(
                4000, **(settings if min_count > 1 else {})
            )
        },
    )
    for batch in data:
        embedding.enqueue(batch)
        embedding.dequeue()
        embedding.apply_gradients(
            {"title": tf.zeros([16, 4]), "text": tf.zeros([16, 4])}
        )
    stats = embedding.vocabularies["words"].stats()
    rows, share = report["hit_rate_by_rows"][min_count][-1]
    assert (rows, share) == (stats["num_keys"], stats["hit_rate"])
    assert report["num_lookups"] == stats["num_lookups"]


def test_the_proposal_serves_the_kept_share():
    report = tlm.inspect_ids(
        batches(),
        config(),
        open_tables=["words"],
        optimizer=tpu.Adam(0.1),
        relative_hit_rate=0.9,
    ).tables["words"]
    proposal = report["proposal"]
    served = {
        least: curve[-1] for least, curve in report["hit_rate_by_rows"].items()
    }
    most = proposal["max_hit_rate"]
    assert most == served[1][1]
    good = [
        least for least, (_, share) in served.items() if share >= 0.9 * most
    ]
    assert proposal["min_count"] == max(good) > 1
    assert (proposal["num_keys"], proposal["hit_rate"]) == served[max(good)]
    assert (
        proposal["num_keys"]
        <= 0.75 * proposal["capacity"]
        < (proposal["num_keys"] + 1)
    )
    num_rows = tlm.vocabulary.OpenVocabulary(proposal["capacity"]).num_rows
    assert report["num_rows"] == num_rows
    assert report["num_key_bytes"] == 16 * num_rows
    assert report["num_slot_bytes"] == 2 * 16 * num_rows
    everything = tlm.inspect_ids(
        batches(), config(), open_tables=["words"], relative_hit_rate=1
    )
    assert everything.tables["words"]["proposal"]["min_count"] == 1
    for curve in report["hit_rate_by_rows"].values():
        rows, shares = zip(*curve)
        assert rows[0] == 1 and list(rows) == sorted(set(rows))
        assert list(shares) == sorted(shares)


def test_closed_tables_are_inspected_beside_open_tables():
    users = {"user": tpu.FeatureConfig(tpu.TableConfig(5, 2, name="users"))}
    data = [{"user": tf.constant([[0, 7]]), **batch} for batch in batches()]
    report = tlm.inspect_ids(data, {**users, **config()}, open_tables=["words"])
    assert report.features["user"]["num_out_of_range"] == 20
    assert report.features["title"]["num_out_of_range"] == 0
    assert report.tables["users"]["num_rows"] == 5
    assert "proposal" not in report.tables["users"]


def test_page_and_terminal_output_show_the_proposal(tmp_path):
    report = tlm.inspect_ids(batches(), config(), open_tables=["words"])
    proposal = report.tables["words"]["proposal"]
    stream = io.StringIO()
    report.print(console.Console(file=stream, width=200))
    report.save_html(tmp_path / "ids.html")
    page = (tmp_path / "ids.html").read_text()
    for shown in (stream.getvalue(), page):
        for words in (
            "Open vocabularies",
            f"{proposal['capacity']:,}",
            f"{proposal['hit_rate']:.1%}",
        ):
            assert words in shown
    curves = page.split("share of lookups served")[-1].split("</svg>")[0]
    assert curves.count("<polyline") == len(
        report.tables["words"]["hit_rate_by_rows"]
    )
    for part in page.split("<svg")[1:]:
        xml.dom.minidom.parseString("<svg" + part.split("</svg>")[0] + "</svg>")


def test_without_keys_there_is_no_proposal():
    report = tlm.inspect_ids([], config(), open_tables=["words"])
    assert report.tables["words"]["proposal"] is None
    assert "Open vocabularies" not in report.html()


def test_invalid_arguments_raise():
    with pytest.raises(ValueError, match="`open_tables` must name tables"):
        tlm.inspect_ids([], config(), open_tables=["others"])
    for share in (-0.1, 1.1, "all", float("nan")):
        with pytest.raises(
            ValueError, match="`relative_hit_rate` must be a number"
        ):
            tlm.inspect_ids([], config(), relative_hit_rate=share)
    with pytest.raises(TypeError, match="integers or strings"):
        tlm.inspect_ids(
            [{"title": tf.ones([2]), "text": tf.ones([2])}],
            config(),
            open_tables=["words"],
        )
    with pytest.raises(TypeError, match="must be integers. Received: string"):
        tlm.inspect_ids(batches(), config())
