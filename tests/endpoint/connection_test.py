"""Sockets whose clients are slow, silent, or ambiguous."""

import contextlib
import json
import socket
import time
import types
from unittest import mock

import h11
import pytest

from jaxrl_tis.endpoint.connection import OPTIONS, Connection
from tests.asgi import listening
from tests.endpoint.app_test import SEED, application


class Quick(Connection):
    seconds = 0.3


class Patient(Connection):
    seconds = 4.0


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"prompt": "abc", "max_tokens": 2, "seed": SEED}).encode()
WHOLE = HEAD + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
CLOSES = 30  # seconds, on however busy a machine
HEALTH = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.fixture(scope="module")
def port():
    with listening(application(), http=Quick, timeout_keep_alive=60) as port:
        yield port


@pytest.fixture
def client(port):
    with contextlib.closing(socket.create_connection(("127.0.0.1", port), timeout=CLOSES)) as client:
        yield client


def reply(client):
    """(head, body) of one answer."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += client.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
    while len(body) < length:
        body += client.recv(65536)
    return head, body


def seconds_until_closed(client, drip=b""):
    """A byte of `drip` every 50 ms until the server closes."""
    start = time.monotonic()
    client.settimeout(0.05)
    while True:
        with contextlib.suppress(TimeoutError):
            try:
                if not client.recv(65536):
                    break
            except ConnectionError:
                break
        if drip:
            with contextlib.suppress(ConnectionError):
                client.send(drip[:1])
            drip = drip[1:]
        assert time.monotonic() - start < CLOSES, "the server never closes"
    return time.monotonic() - start


def test_the_command_serves_such_connections():
    assert OPTIONS["http"] is Connection and 1 < Connection.seconds <= 60


def test_the_time_of_a_head_begins_once():
    """By the states of both sides: nothing came, some bytes came, the head is here, an answer is out
    before the body has ended."""
    connection = object.__new__(Connection)
    connection.loop, connection.transport, connection._timer = mock.Mock(), mock.Mock(), None
    started = lambda: connection.loop.call_later.call_count

    def state(theirs, ours):
        connection.conn = types.SimpleNamespace(their_state=theirs, our_state=ours)
        connection._watch()

    state(h11.IDLE, h11.IDLE)
    state(h11.IDLE, h11.IDLE)
    assert started() == 1 and connection._timer is not None
    assert connection.loop.call_later.call_args.args == (20.0, connection.transport.close)
    state(h11.SEND_BODY, h11.SEND_RESPONSE)
    assert connection._timer is None
    state(h11.SEND_BODY, h11.DONE)
    assert started() == 2 and connection._timer is not None


@pytest.mark.parametrize("sent, drip", [
    (b"", b""), (HEAD[:20], b""), (HEAD, b""), (HEAD[:20], b"a" * 9999),
], ids=["nothing", "half a line", "half a head", "a byte at a time"])
def test_a_head_that_does_not_come_ends_the_connection(client, sent, drip):
    client.sendall(sent)
    assert 0.2 < seconds_until_closed(client, drip) < CLOSES


def test_so_it_does_after_an_answer(client):
    client.sendall(WHOLE)
    assert reply(client)[0].startswith(b"HTTP/1.1 200")
    client.sendall(HEAD[:20])
    assert 0.2 < seconds_until_closed(client, b"a" * 9999) < CLOSES


def test_the_rest_of_a_body_that_was_answered_is_not_awaited_for_long(client):
    head = HEAD.replace(b"application/json", b"text/plain")
    client.sendall(head + b"Content-Length: 999\r\n\r\n")
    assert reply(client)[0].startswith(b"HTTP/1.1 415")
    assert 0.2 < seconds_until_closed(client, b" " * 999) < CLOSES


def test_a_request_that_comes_in_time_is_answered_and_the_next_one_has_as_long():
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(listening(application(), http=Patient))
        client = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=CLOSES))
        for _ in range(3):
            time.sleep(1.4)  # in all more than Patient.seconds
            client.sendall(WHOLE[:30])
            time.sleep(0.05)
            client.sendall(WHOLE[30:])
            head, body = reply(client)
            assert head.startswith(b"HTTP/1.1 200") and json.loads(body)["choices"][0]["text"]


def test_two_requests_at_once_are_both_answered(client):
    client.sendall(HEALTH + HEALTH)
    data = b""
    while data.count(b'"status"') < 2:
        data += client.recv(65536)
    assert data.count(b"HTTP/1.1 200") == 2


def test_a_slow_body_has_the_time_of_its_request(client):
    client.sendall(WHOLE[:-1])
    time.sleep(2 * Quick.seconds)
    client.sendall(WHOLE[-1:])
    assert reply(client)[0].startswith(b"HTTP/1.1 200")


def test_nothing_after_a_body_of_two_lengths_is_read(client):
    """The chunks end where Content-Length says that the body does not."""
    client.sendall(
        HEAD + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + HEALTH
    )
    head, body = reply(client)
    assert head.startswith(b"HTTP/1.1 400") and b"connection: close" in head.lower()
    assert b"Transfer-Encoding" in body
    assert b"".join(iter(lambda: client.recv(65536), b"")) == b""


def test_a_page_s_post_is_refused_over_a_socket(client):
    client.sendall(WHOLE.replace(b"Host: localhost\r\n", b"Host: evil.example\r\n"))
    assert reply(client)[0].startswith(b"HTTP/1.1 421")
