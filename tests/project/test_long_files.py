"""Slow test files start first when files run in parallel."""

import types
import xml.etree.ElementTree

from tests import conftest, long_cases


def test_each_long_file_exists_and_is_listed_once():
    files = conftest.long_files()
    assert len(files) == len(set(files)) > 20
    for file in files:
        assert (conftest.ROOT / file).is_file(), file


def items_of(files):
    return [
        types.SimpleNamespace(path=conftest.ROOT / file, nodeid=file)
        for file in files
    ]


def test_a_worker_runs_long_files_first_and_keeps_the_other_order():
    first, second, *_ = conftest.long_files()
    items = items_of(["a.py", second, "b.py", first, "a.py"])
    conftest.pytest_collection_modifyitems(
        types.SimpleNamespace(workerinput={}), items
    )
    assert items == items_of([first, second, "a.py", "b.py", "a.py"])


def test_a_single_process_keeps_the_order():
    items = items_of(["a.py", conftest.long_files()[0]])
    conftest.pytest_collection_modifyitems(types.SimpleNamespace(), items)
    assert items == items_of(["a.py", conftest.long_files()[0]])


def test_long_cases_are_marked_as_slow():
    listed = sorted(long_cases.read())
    assert len(listed) == len(set(listed)) > 100
    marked = []
    items = [
        types.SimpleNamespace(
            path=conftest.ROOT, nodeid=name, add_marker=marked.append
        )
        for name in (listed[0], "tests/none.py::test_quick")
    ]
    conftest.pytest_collection_modifyitems(types.SimpleNamespace(), items)
    assert marked == ["slow"]


def test_node_ids_of_a_report_match_pytest():
    case = xml.etree.ElementTree.fromstring(
        '<testcase classname="tests.project.test_long_files.TestIt" '
        'name="test_a[1/2]" time="2.0"/>'
    )
    assert long_cases.node_id(case) == (
        "tests/project/test_long_files.py::TestIt::test_a[1/2]"
    )
