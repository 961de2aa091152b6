"""A function in a process of its own; what a harmful one does is tested with the rewards."""

import http.server
import os
import threading

import pytest

from jaxrl_tis.data import child
from jaxrl_tis.data.confined import Confined, function

CODE = '''
import os, socket, time, urllib.request

def maker(argument):
    if argument == "refuse":
        raise LookupError("not here")
    def call(x, y=None):
        if x == "end":
            os._exit(3)
        if x == "raise":
            raise KeyError(y)
        if x == "sleep":
            time.sleep(y)
        if x == "get":
            return urllib.request.urlopen(y, timeout=5).read().decode()
        if x == "send":
            return socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", y))
        if x == "name":
            return socket.getaddrinfo(y, 80)[0][4][0]
        if x == "local":
            server = socket.socket(socket.AF_UNIX)
            server.bind(y)
            server.listen()
            return socket.socket(socket.AF_UNIX).connect(y)
        if x == "bytes":
            return b"no JSON"
        return [argument, os.getpid(), x, y]
    if argument == "traits":
        call.traits = {"a": 1}
    return call
'''


@pytest.fixture
def maker(tmp_path, monkeypatch):
    (tmp_path / "made_for_tests.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "made_for_tests:maker"


@pytest.mark.all
def test_calls_get_their_arguments_and_return_in_order(maker):
    it = Confined(maker, {"a": [1]}, what="it", timeout=5)
    try:
        results = it.calls([[1], ["é", None], [{"k": 2.5}, 3]])
        assert [r["value"][2:] for r in results] == [[1, None], ["é", None], [{"k": 2.5}, 3]]
        assert {r["value"][1] for r in results} != {os.getpid()}
        assert len({r["value"][1] for r in results}) == 1
        assert all(r["value"][0] == {"a": [1]} and r["fault"] is None for r in results)
    finally:
        it.close()


@pytest.mark.all
def test_what_fails_says_so_and_what_follows_is_called(maker):
    it = Confined(maker, 0, what="it", timeout=5)
    try:
        results = it.calls([["raise", 1], ["bytes"], ["end"], [1]])
        assert [r["error"].partition(":")[0] for r in results] == ["KeyError", "TypeError",
                                                                   "EOFError", ""]
        assert [r["fault"] for r in results] == ["errors"] * 3 + [None]
    finally:
        it.close()


@pytest.mark.all
def test_two_threads_get_each_their_own(maker):
    it, found = Confined(maker, 0, what="it", timeout=5), {}
    try:
        def ask(i):
            found[i] = [r["value"][2] for r in it.calls([[[i, k]] for k in range(200)])]

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == {i: [[i, k] for k in range(200)] for i in range(4)}
    finally:
        it.close()


@pytest.mark.all
def test_what_cannot_be_made_is_refused_by_name(maker):
    with pytest.raises(ValueError, match="^it cannot be loaded: LookupError: not here$"):
        Confined(maker, "refuse", what="it", timeout=5)


class Page(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"a page")

    def log_message(self, *_):
        pass


@pytest.fixture
def page():
    """The address of a page on this machine."""
    with http.server.HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(params=["as it is", "without namespaces"])
def system(request, monkeypatch):
    if request.param == "without namespaces":
        monkeypatch.setattr(child, "namespaces", lambda network=False: ())


def test_there_is_no_network_on_any_system(maker, page, system, tmp_path):
    """The same refusal with namespaces and without: Python's sockets are closed in any case."""
    it = Confined(maker, 0, what="it", timeout=10)
    try:
        calls = [["get", page], ["send", 9], ["name", "localhost"]]
        for result in it.calls(calls):
            assert result["fault"] == "errors" and "reward.network=True" in result["error"]
        [local] = it.calls([["local", str(tmp_path / "socket")]])
        assert local["error"] == ""
    finally:
        it.close()


def test_there_is_network_where_it_is_asked_for(maker, page, system):
    it = Confined(maker, 0, what="it", timeout=10, network=True)
    try:
        [got, name] = it.calls([["get", page], ["name", "localhost"]])
        assert got["value"] == "a page" and name["error"] == ""
    finally:
        it.close()


@pytest.mark.all
def test_a_call_may_have_a_time_of_its_own(maker):
    it = Confined(maker, 0, what="it", timeout=0.2)
    try:
        [slow] = it.calls([["sleep", 0.5]])
        assert slow["fault"] == "timeouts"
        [slow] = it.calls([["sleep", 0.5]], timeout=10)
        assert slow["error"] == ""
    finally:
        it.close()


@pytest.mark.all
def test_the_facts_of_a_function_are_known(maker):
    it = Confined(maker, "traits", what="it", timeout=5)
    it.close()
    assert it.traits == {"a": 1}


def test_a_function_is_found_by_its_path():
    assert function("os.path:join") is os.path.join
    with pytest.raises(AttributeError):
        function("os.path:nothing")
