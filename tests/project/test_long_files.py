"""Long files of tests start first where files run at the same time."""

import types

from tests import conftest


def test_each_long_file_is_there_once():
    files = conftest.long_files()
    assert len(files) == len(set(files)) > 20
    for file in files:
        assert (conftest.ROOT / file).is_file(), file


def items_of(files):
    return [types.SimpleNamespace(path=conftest.ROOT / file) for file in files]


def test_a_worker_starts_with_them_and_keeps_the_order_of_the_rest():
    first, second, *_ = conftest.long_files()
    items = items_of(["a.py", second, "b.py", first, "a.py"])
    conftest.pytest_collection_modifyitems(
        types.SimpleNamespace(workerinput={}), items)
    assert items == items_of([first, second, "a.py", "b.py", "a.py"])


def test_one_process_for_all_keeps_the_order():
    items = items_of(["a.py", conftest.long_files()[0]])
    conftest.pytest_collection_modifyitems(types.SimpleNamespace(), items)
    assert items == items_of(["a.py", conftest.long_files()[0]])
