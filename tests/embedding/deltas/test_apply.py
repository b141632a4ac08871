"""Deltas that are not applied."""

import json
import shutil

import pytest

import tf_layoutmap as tlm
from tests.embedding.deltas import cases


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Two bases, and three deltas of each."""
    where = tmp_path_factory.mktemp("written")
    for name in ("one", "two"):
        one = cases.embedding()
        cases.train(one, 100 if name == "two" else 99)
        base = cases.save(one, where / name)
        writer = tlm.DeltaWriter(one, where / f"{name}_deltas", base=base)
        for step in range(3):
            cases.train(one, step)
            writer.write()
    return where


def data_of(directory, number):
    return directory / number / "delta.data-00000-of-00001"


def cut(directory, _):
    file = data_of(directory, "00000002")
    file.write_bytes(file.read_bytes()[:-1])


def alter(directory, _):
    file = data_of(directory, "00000002")
    found = bytearray(file.read_bytes())
    found[len(found) // 2] ^= 1
    file.write_bytes(found)


def alter_meta(directory, _):
    file = directory / "00000003" / "meta.json"
    found = json.loads(file.read_text())
    found["tables"]["words"]["to_step"] += 1
    file.write_text(json.dumps(found))


def cut_meta(directory, _):
    file = directory / "00000001" / "meta.json"
    file.write_text(file.read_text()[:40])


def other_format(directory, _):
    file = directory / "00000001" / "meta.json"
    file.write_text(file.read_text().replace('"format": 1', '"format": 3'))


def lose_meta(directory, _):
    (directory / "00000003" / "meta.json").unlink()


def lose_data(directory, _):
    data_of(directory, "00000003").unlink()


def gap(directory, _):
    shutil.rmtree(directory / "00000002")


def no_first(directory, _):
    shutil.rmtree(directory / "00000001")


def repeat(directory, _):
    shutil.copytree(directory / "00000002", directory / "00000004")


def foreign_base(directory, other):
    for path in sorted(directory.iterdir()):
        shutil.rmtree(path)
    shutil.copytree(other / "00000001", directory / "00000001")


def foreign_delta(directory, other):
    # Of the same base, written after another first one.
    shutil.rmtree(directory / "00000003")
    shutil.copytree(other / "00000003", directory / "00000003")


@pytest.mark.parametrize(("change", "message"), [
    (cut, "00000002/delta.data.*must have .* bytes.*cut or altered"),
    (alter, "00000002/delta.data.*the checksum.*it was altered"),
    (alter_meta, "00000003/meta.json.*altered, its seal is of another"),
    (cut_meta, "00000001/meta.json.*a file that was cut or altered"),
    (other_format, "must be of format 1 or 2.*Received: format 3"),
    (lose_meta, "00000003' must hold 'meta.json'. Received: .*No such file"),
    (lose_data, "Delta 3 must have the file .*delta.data.*Received: none"),
    (gap, "without a gap. Received: delta 3 after 1"),
    (no_first, "without a gap. Received: delta 2 after 0"),
    (repeat, "00000004' must hold delta 4. Received: delta 2 once more"),
    (foreign_base, "Delta 1 must be of base .*one-1'. Received: one of ano"),
], ids=lambda one: getattr(one, "__name__", ""))
def test_what_is_not_whole_is_refused_by_name(
        change, message, written, tmp_path):
    directory = tmp_path / "deltas"
    shutil.copytree(written / "one_deltas", directory)
    change(directory, written / "two_deltas")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match=message):
        tlm.apply_deltas(written / "one-1", directory, tmp_path / "full")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_delta_that_follows_another_is_refused(written, tmp_path):
    one = cases.embedding()
    cases.train(one, 99)
    writer = tlm.DeltaWriter(one, tmp_path / "other", base=written / "one-1")
    for _ in range(3):
        writer.write()
    directory = tmp_path / "deltas"
    shutil.copytree(written / "one_deltas", directory)
    foreign_delta(directory, tmp_path / "other")
    with pytest.raises(ValueError, match=(
            "Delta 3 must continue delta 2 of its directory")):
        tlm.apply_deltas(written / "one-1", directory)
    with pytest.raises(ValueError, match="Delta 3 must continue delta 2"):
        tlm.DeltaWriter(one, directory, base=written / "one-1")


def test_where_nothing_can_be_applied(written, tmp_path):
    with pytest.raises(ValueError, match="must be a directory with deltas"):
        tlm.apply_deltas(written / "one-1", tmp_path / "nothing")
    with pytest.raises(ValueError, match="must be the prefix of a checkpoint"):
        tlm.apply_deltas(tmp_path / "nothing", written / "one_deltas")
    with pytest.raises(ValueError, match="another prefix than `base`"):
        tlm.apply_deltas(written / "one-1", written / "one_deltas",
                         written / "one-1")
    # Without a delta it is the base.
    assert cases.tensors(tlm.apply_deltas(
        written / "one-1", tmp_path)) == cases.tensors(str(written / "one-1"))


def test_a_base_that_was_altered_is_refused(written, tmp_path):
    for path in written.glob("one-1.*"):
        shutil.copy(path, tmp_path)
    data = tmp_path / "one-1.data-00000-of-00001"
    found = bytearray(data.read_bytes())
    found[len(found) // 2] ^= 1
    data.write_bytes(found)
    with pytest.raises(ValueError, match="cannot be read from the base"):
        tlm.apply_deltas(tmp_path / "one-1", written / "one_deltas",
                         tmp_path / "full")
    assert not list(tmp_path.glob("full*"))
