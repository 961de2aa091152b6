"""The default choice of tests stays small, by what each of them cost when all of them last ran.

`./launch/test.sh --all --record-durations=tests/durations.json` renews the record. A test or file
that is not recorded costs nothing until then; one that is gone has to leave the record.
"""

import ast
import collections
import json
import pathlib

from tests import durations

ROOT = pathlib.Path(__file__).parents[1]
RECORD = json.loads(durations.RECORD.read_text())
FILE_SECONDS, TEST_SECONDS = 30.0, 8.0  # of CPU, recorded beside other work
# What cannot be less: eight devices and one, runs in processes of their own, whole programs.
MAY_TAKE = {
    "tests/sharding_test.py::test_eight_devices_give_the_numbers_of_one[24-others0-True]": 14.0,
    "tests/runtime/processes_test.py::test_two_processes_train_to_the_parameters_of_one": 40.0,
    "tests/runtime/processes_test.py": 44.0,
    "tests/learner/routing_test.py": 46.0,
}
SECONDS = 1000.0  # of the whole choice


def in_files(record, chosen):
    """CPU seconds by file of the chosen tests, all of whose names are given."""
    seconds = collections.Counter(record["files"])
    for test, (cpu, _) in record["tests"].items():
        if test not in chosen:
            seconds[test.partition("::")[0]] -= cpu
    files = {test.partition("::")[0] for test in chosen}
    return {file: seconds[file] for file in record["files"] if file in files}


def too_slow(record, chosen):
    """{file or test: CPU seconds} of the chosen tests, where that is more than it may be."""
    tests = {test: cpu for test, (cpu, _) in record["tests"].items() if test in chosen}
    files = in_files(record, chosen)
    return {
        name: cpu for costs, limit in ((tests, TEST_SECONDS), (files, FILE_SECONDS))
        for name, cpu in costs.items() if cpu > MAY_TAKE.get(name, limit)
    }


def gone(record, root):
    """Files and tests of the record that are not there."""
    missing = [file for file in record["files"] if not (root / file).is_file()]
    functions = {}
    for test in record["tests"]:
        file, _, name = test.partition("::")
        if file not in missing and file not in functions:
            nodes = ast.walk(ast.parse((root / file).read_text()))
            functions[file] = {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
        if name.partition("[")[0] not in functions.get(file, {name.partition("[")[0]}):
            missing.append(test)
    return missing


def chosen(request):
    """Names of the tests of this session that are of the default choice."""
    return {item.nodeid for item in request.session.items if not item.get_closest_marker("all")}


def test_no_file_nor_test_of_the_default_choice_is_slow(request):
    """Of those that run in this session: it says most in a whole one."""
    assert too_slow(RECORD, chosen(request)) == {}


def test_the_default_choice_takes_no_longer_than_it_says(request):
    assert sum(in_files(RECORD, chosen(request)).values()) < SECONDS


def test_the_cases_of_the_default_choice_are_there(request):
    """An id that is mistyped would leave its test out."""
    names, wanted = {item.nodeid for item in request.session.items}, set()
    for item in request.session.items:
        for marker in item.iter_markers("cases"):
            wanted |= {f"{item.nodeid.partition('[')[0]}[{case}]" for case in marker.args}
    assert sorted(wanted - names) == []


def test_the_record_is_of_tests_that_are_there():
    assert gone(RECORD, ROOT) == []


def test_what_is_slow_or_gone_is_found(tmp_path):
    record = {
        "files": {"a_test.py": 31.0, "b_test.py": 30.5, "c_test.py": 1.0},
        "tests": {
            "a_test.py::f[1]": [9.0, 1.0], "a_test.py::g": [15.0, 1.0], "b_test.py::f": [1.0, 9.0],
        },
    }
    chosen = {"a_test.py::f[1]", "a_test.py::h", "b_test.py::f"}
    assert in_files(record, chosen) == {"a_test.py": 16.0, "b_test.py": 30.5}
    assert too_slow(record, chosen) == {"a_test.py::f[1]": 9.0, "b_test.py": 30.5}
    (tmp_path / "a_test.py").write_text("def f(): pass\n")
    (tmp_path / "b_test.py").write_text("def f(): pass\n")
    assert gone(record, tmp_path) == ["c_test.py", "a_test.py::g"]
