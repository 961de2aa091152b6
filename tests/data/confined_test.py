"""A function in a process of its own; what a harmful one does is tested with the rewards."""

import os
import threading

import pytest

from jaxrl_tis.data.confined import Confined, function

CODE = '''
import os

def maker(argument):
    if argument == "refuse":
        raise LookupError("not here")
    def call(x, y=None):
        if x == "end":
            os._exit(3)
        if x == "raise":
            raise KeyError(y)
        if x == "bytes":
            return b"no JSON"
        return [argument, os.getpid(), x, y]
    return call
'''


@pytest.fixture
def maker(tmp_path, monkeypatch):
    (tmp_path / "made_for_tests.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "made_for_tests:maker"


def test_calls_get_their_arguments_and_return_in_order(maker):
    confined = Confined(maker, {"a": [1]}, what="it", timeout=5)
    try:
        results = confined.calls([[1], ["é", None], [{"k": 2.5}, 3]])
        assert [r["value"][2:] for r in results] == [[1, None], ["é", None], [{"k": 2.5}, 3]]
        assert {r["value"][1] for r in results} != {os.getpid()}
        assert len({r["value"][1] for r in results}) == 1
        assert all(r["value"][0] == {"a": [1]} and r["fault"] is None for r in results)
    finally:
        confined.close()


def test_what_fails_says_so_and_what_follows_is_called(maker):
    confined = Confined(maker, 0, what="it", timeout=5)
    try:
        results = confined.calls([["raise", 1], ["bytes"], ["end"], [1]])
        assert [r["error"].partition(":")[0] for r in results] == ["KeyError", "TypeError",
                                                                   "EOFError", ""]
        assert [r["fault"] for r in results] == ["errors"] * 3 + [None]
    finally:
        confined.close()


def test_two_threads_get_each_their_own(maker):
    confined, found = Confined(maker, 0, what="it", timeout=5), {}
    try:
        def ask(i):
            found[i] = [r["value"][2] for r in confined.calls([[[i, k]] for k in range(200)])]

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {i: [[i, k] for k in range(200)] for i in range(4)}
    finally:
        confined.close()


def test_what_cannot_be_made_is_refused_by_name(maker):
    with pytest.raises(ValueError, match="^it cannot be loaded: LookupError: not here$"):
        Confined(maker, "refuse", what="it", timeout=5)


def test_a_function_is_found_by_its_path():
    assert function("os.path:join") is os.path.join
    with pytest.raises(AttributeError):
        function("os.path:nothing")
