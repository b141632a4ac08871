"""Slow test files start first when files run in parallel."""

import types
import xml.etree.ElementTree

from tests import conftest, long_cases


def test_each_long_file_exists_and_is_listed_once():
    files = long_cases.read(long_cases.FILES)
    assert len(files) == len(set(files)) > 20
    for file in files:
        assert (conftest.ROOT / file).is_file(), file


def items_of(files):
    return [
        types.SimpleNamespace(path=conftest.ROOT / file, nodeid=file)
        for file in files
    ]


def test_a_worker_runs_long_files_first_and_keeps_the_other_order():
    first, second, *_ = long_cases.read(long_cases.FILES)
    items = items_of(["a.py", second, "b.py", first, "a.py"])
    conftest.pytest_collection_modifyitems(
        types.SimpleNamespace(workerinput={}), items
    )
    assert items == items_of([first, second, "a.py", "b.py", "a.py"])


def test_a_single_process_keeps_the_order():
    items = items_of(["a.py", long_cases.read(long_cases.FILES)[0]])
    conftest.pytest_collection_modifyitems(types.SimpleNamespace(), items)
    assert items == items_of(["a.py", long_cases.read(long_cases.FILES)[0]])


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


def report_of(cases):
    suite = xml.etree.ElementTree.Element("testsuite")
    for (module, name), seconds in cases.items():
        xml.etree.ElementTree.SubElement(
            suite, "testcase", classname=module, name=name, time=str(seconds)
        )
    return xml.etree.ElementTree.ElementTree(suite)


def test_slow_cases_and_files_that_are_not_listed_are_found(monkeypatch):
    module = "tests.project.test_long_files"
    file = "tests/project/test_long_files.py"
    cases = long_cases.durations(
        report_of({(module, "a"): 5.9, (module, "b"): 6.0, (module, "c"): 29})
    )
    listed = {long_cases.LIST: (f"{file}::c",), long_cases.FILES: ()}
    monkeypatch.setattr(
        long_cases, "read", lambda path=long_cases.LIST: listed[path]
    )
    assert long_cases.missing(cases) == [
        f"{file}::b took 6.0 s",
        f"{file} took 40.9 s",
    ]
    listed[long_cases.LIST] += (f"{file}::b",)
    listed[long_cases.FILES] = (file,)
    assert not long_cases.missing(cases)


def test_entries_that_did_not_run_stay_in_a_list():
    file = "tests/project/test_long_files.py"
    listed = (f"{file}::a", f"{file}::b", "tests/none.py::c")
    found = {f"{file}::a": 0.1, f"{file}::d": 2.0}
    assert long_cases.updated(listed, found, 0.7) == [
        f"{file}::d",
        f"{file}::b",
    ]
