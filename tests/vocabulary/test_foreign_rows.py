"""Rows that other systems have saved by key are imported.

The files have the formats of the systems' sources, which `foreign_rows.py`
lists with their versions.
"""

import numpy as np
import pytest
import tensorflow as tf

import tf_layoutmap as tlm
from tests.vocabulary.test_key_rows import contents, make
from tf_layoutmap.vocabulary import key_rows

KEYS = np.array([5, -3, 2**61, 7, 0], np.int64)
ROWS = np.arange(15, dtype=np.float32).reshape(5, 3)


def write_pair(keys_path, values_path, part=slice(None)):
    keys_path.write_bytes(KEYS[part].tobytes())
    values_path.write_bytes(ROWS[part].tobytes())


def imported(path, **arguments):
    one, _ = make()
    written = tlm.vocabulary.import_rows(
        path, one.vocabularies["words"], **arguments
    )
    assert written.num_new == written.num_written
    return {
        key: row
        for key, (row, *_) in contents(one.vocabularies["words"]).items()
    }


EXPECTED = dict(zip(KEYS.tolist(), ROWS.tolist()))


@pytest.mark.parametrize(
    "names",
    [
        ["model_users_mht_1of1"],
        ["model_users_mht_1of2", "model_users_mht_2of2"],
        [
            "model_users_mht_1of2_rank0_size2",
            "model_users_mht_2of2_rank1_size2",
        ],
        ["model_users"],
    ],
    ids=["one", "two", "ranks", "table"],
)
def test_files_of_tfra_are_imported(tmp_path, names, monkeypatch):
    monkeypatch.setattr(key_rows, "BLOCK_SIZE", 2)
    parts = [slice(None)] if len(names) == 1 else [slice(2), slice(2, None)]
    for name, part in zip(names, parts):
        write_pair(tmp_path / f"{name}-keys", tmp_path / f"{name}-values", part)
    # Another table, whose name begins with the same letters.
    other = tmp_path / "model_users_Adagrad_mht_1of1"
    other.with_name(f"{other.name}-keys").write_bytes(b"1" * 8)
    assert imported(tmp_path, format="tfra", name="model/users") == EXPECTED


def test_slot_tables_of_tfra_are_imported(tmp_path):
    slots = ROWS + 100
    for name, keys, values in (
        ("users", KEYS[:4], ROWS[:4]),
        # The order of the keys differs, and one key has no row.
        ("users_Adagrad_acc", KEYS[::-1], slots[::-1]),
    ):
        (tmp_path / f"{name}_mht_1of1-keys").write_bytes(keys.tobytes())
        (tmp_path / f"{name}_mht_1of1-values").write_bytes(values.tobytes())
    one, _ = make()
    tlm.vocabulary.import_rows(
        tmp_path,
        one.vocabularies["words"],
        format="tfra",
        name="users",
        slots={"accumulators": "users/Adagrad/acc"},
    )
    found = contents(one.vocabularies["words"])
    assert len(found) == 4
    for key, row, slot in zip(KEYS[:4].tolist(), ROWS, slots):
        assert found[key][:2] == (row.tolist(), [slot.tolist()])
    for path, format in ((tmp_path, "hugectr"), (tmp_path, "dynamicemb")):
        with pytest.raises(ValueError, match="`slots` must be omitted unless"):
            imported(path, format=format, slots={"accumulators": "a"})
    with pytest.raises(ValueError, match="a dict with names from"):
        imported(tmp_path, format="tfra", name="users", slots={"m": "a"})


@pytest.mark.parametrize("strings", [False, True])
def test_checkpoints_of_tfra_are_imported(tmp_path, strings):
    keys = np.array([f"key {key}" for key in KEYS]) if strings else KEYS
    prefix = str(tmp_path / "ckpt")
    names = ["users_mht_1of2", "users_mht_2of2", "items_mht_1of1"]
    parts = [slice(2), slice(2, None), slice(1)]
    tf.raw_ops.SaveV2(
        prefix=prefix,
        tensor_names=[
            f"{name}-{what}" for name in names for what in ("keys", "values")
        ],
        shape_and_slices=[""] * 6,
        tensors=[
            tf.constant(value[part]) for part in parts for value in (keys, ROWS)
        ],
    )
    if strings:
        one, _ = make()
        tlm.vocabulary.import_rows(
            prefix, one.vocabularies["words"], format="tfra", name="users"
        )
        np.testing.assert_array_equal(
            one({"ids": tf.constant(keys)})["ids"], ROWS
        )
    else:
        assert imported(prefix, format="tfra", name="users") == EXPECTED
    with pytest.raises(ValueError, match="one of the tables.*items_mht_1of1"):
        imported(prefix, format="tfra", name="ads")
    with pytest.raises(ValueError, match="must have the shape"):
        wide, _ = make(dim=4)
        tlm.vocabulary.import_rows(
            prefix, wide.vocabularies["words"], format="tfra", name="users"
        )


@pytest.mark.parametrize("localized", [False, True])
def test_sparse_models_of_hugectr_are_imported(tmp_path, localized):
    write_pair(tmp_path / "key", tmp_path / "emb_vector")
    if localized:
        (tmp_path / "slot_id").write_bytes(b"0" * 40)
    assert imported(tmp_path, format="hugectr") == EXPECTED


def test_files_of_dynamicemb_are_imported(tmp_path):
    for rank, part in enumerate((slice(2), slice(2, None))):
        ends = f"rank_{rank}.world_size_2"
        write_pair(
            tmp_path / f"users_emb_keys.{ends}",
            tmp_path / f"users_emb_values.{ends}",
            part,
        )
        (tmp_path / f"users_emb_scores.{ends}").write_bytes(b"0" * 16)
    assert imported(tmp_path, format="dynamicemb", name="users") == EXPECTED
    (tmp_path / "users_emb_keys.rank_1.world_size_2").unlink()
    with pytest.raises(ValueError, match="the keys of each rank of one world"):
        imported(tmp_path, format="dynamicemb", name="users")


def test_invalid_files_raise(tmp_path):
    write_pair(tmp_path / "key", tmp_path / "emb_vector")
    write_pair(
        tmp_path / "users_mht_1of1-keys", tmp_path / "users_mht_1of1-values"
    )
    for arguments, message in (
        ({"format": "hugectr", "name": "a"}, "`name` must be None for format"),
        ({"format": "tfra"}, "`name` must be the name of a table"),
        ({"format": "dynamicemb"}, "`name` must be the name of a table"),
        (
            {"format": "tfra", "name": "ads"},
            "keys of table 'ads', for example 'ads_mht_1of1-keys'",
        ),
        (
            {"format": "dynamicemb", "name": "ads"},
            "example 'ads_emb_keys.rank_0.world_size_1'",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            imported(tmp_path, **arguments)
    for format in ("dynamicemb", "tfra"):
        with pytest.raises(ValueError, match="`path` must be"):
            imported(tmp_path / "nothing", format=format, name="a")
    (tmp_path / "emb_vector").write_bytes(b"0" * 44)
    with pytest.raises(
        ValueError,
        match="one row of 3 float32 values for each key. Received: 40 bytes",
    ):
        imported(tmp_path, format="hugectr")
    (tmp_path / "emb_vector").unlink()
    with pytest.raises(ValueError, match="emb_vector' does not exist"):
        imported(tmp_path, format="hugectr")
