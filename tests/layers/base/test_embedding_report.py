"""Sizes, expected times and text of an `EmbeddingReport`."""

import json

import pytest

from tf_layoutmap.layers.base import embedding_report
from tf_layoutmap.layers.base.embedding_report import (
    EmbeddingEntry,
    EmbeddingReport,
)

LARGE = EmbeddingEntry(
    "a", "Embedding", 1_000_000, 16, True, "", ("It differs.",), 128, 64
)
SMALL = EmbeddingEntry("b", "Embedding", 10, 16, False, "it is small", (), 8, 8)


@pytest.fixture(autouse=True)
def _bandwidth(monkeypatch):
    monkeypatch.setattr(embedding_report, "memory_bandwidth", lambda: 1e10)


def test_a_report_sums_the_bytes_of_all_layers():
    report = EmbeddingReport([LARGE, SMALL])
    assert (report.bytes_before, report.bytes_after) == (136, 72)
    assert report.replaced == [LARGE] and report.not_replaced == [SMALL]


def test_the_time_of_a_replaced_layer_does_not_depend_on_its_rows():
    one = EmbeddingReport([LARGE]).expected_step_ms()
    larger = EmbeddingEntry("a", "Embedding", 4_000_000, 16, True)
    four = EmbeddingReport([larger]).expected_step_ms()
    assert four[1] == one[1] < one[0]
    assert four[0] > 3 * one[0]


def test_a_layer_that_is_not_replaced_keeps_its_time():
    before, after = EmbeddingReport([SMALL]).expected_step_ms()
    assert before == after > 0


def test_the_text_lists_layers_reasons_and_differences():
    text = str(EmbeddingReport([LARGE, SMALL]))
    assert "a (Embedding, 1,000,000 x 16)" in text
    assert "b (Embedding, 10 x 16): it is small" in text
    assert "It differs." in text
    assert "no stock Embedding layers" in str(EmbeddingReport())


def test_the_dictionary_can_be_written_as_json(capsys):
    report = EmbeddingReport([LARGE, SMALL], ids_per_step=7)
    found = json.loads(json.dumps(report.to_dict()))
    assert found["bytes_before"] == 136 and found["ids_per_step"] == 7
    assert [layer["path"] for layer in found["layers"]] == ["a", "b"]
    report.print()
    assert "Not replaced: 1" in capsys.readouterr().out


def test_the_bandwidth_is_measured(monkeypatch):
    monkeypatch.undo()
    assert embedding_report.memory_bandwidth() > 1e8
