"""Tests how `fit` handles the failure of a server."""

import os

import pytest

import tf_layoutmap as tlm
from tf_layoutmap.ps import connection, fit_loop


class Backup:
    def __init__(self, backup_dir):
        self.backup_dir = backup_dir


def restarting():
    return tlm.ps.Datasets(lambda: None, on_server_loss="restart")


@pytest.fixture
def connected(monkeypatch):
    monkeypatch.setattr(connection, "processes_of", lambda strategy: [])


@pytest.mark.parametrize("num_backups", [0, 2])
def test_restart_without_a_backup_callback_raises(
    connected, num_backups, tmp_path
):
    with pytest.raises(ValueError, match="must have one BackupAndRestore"):
        fit_loop.server_loss_handler(
            None, restarting(), [Backup(tmp_path)] * num_backups
        )


def test_checkpoint_status_increases_with_each_backup(connected, tmp_path):
    found = fit_loop.server_loss_handler(
        None, restarting(), [Backup(tmp_path / "backup")]
    )
    assert found._checkpoint_status()[0] == 0
    (tmp_path / "backup" / "chief").mkdir(parents=True)
    for number, name in enumerate(["checkpoint", "chief/variables"], 1):
        file = tmp_path / "backup" / name
        file.write_text("")
        os.utime(file, ns=(0, number * 10**9))
        assert found._checkpoint_status()[0] == number * 10**9


def test_callbacks_of_a_class_are_found_in_all_argument_types():
    one = Backup("")

    class Listed:
        callbacks = [one]

    for given, expected in [
        (None, []),
        (one, [one]),
        ([one, 3], [one]),
        ((one,), [one]),
        (Listed(), [one]),
    ]:
        assert fit_loop.callbacks_of(given, Backup) == expected
