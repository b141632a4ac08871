"""Long files of tests start first where files run at the same time."""

import types
import xml.etree.ElementTree

from tests import conftest, long_cases


def test_each_long_file_is_there_once():
    files = conftest.long_files()
    assert len(files) == len(set(files)) > 20
    for file in files:
        assert (conftest.ROOT / file).is_file(), file


def items_of(files):
    return [
        types.SimpleNamespace(path=conftest.ROOT / file, nodeid=file)
        for file in files
    ]


def test_a_worker_starts_with_them_and_keeps_the_order_of_the_rest():
    first, second, *_ = conftest.long_files()
    items = items_of(["a.py", second, "b.py", first, "a.py"])
    conftest.pytest_collection_modifyitems(
        types.SimpleNamespace(workerinput={}), items
    )
    assert items == items_of([first, second, "a.py", "b.py", "a.py"])


def test_one_process_for_all_keeps_the_order():
    items = items_of(["a.py", conftest.long_files()[0]])
    conftest.pytest_collection_modifyitems(types.SimpleNamespace(), items)
    assert items == items_of(["a.py", conftest.long_files()[0]])


def test_cases_that_took_long_get_the_mark_that_make_check_leaves_out():
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


def test_a_report_names_cases_as_pytest_does():
    case = xml.etree.ElementTree.fromstring(
        '<testcase classname="tests.project.test_long_files.TestIt" '
        'name="test_a[1/2]" time="2.0"/>'
    )
    assert long_cases.node_id(case) == (
        "tests/project/test_long_files.py::TestIt::test_a[1/2]"
    )
