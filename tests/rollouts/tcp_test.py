"""Weights over TCP: whole trees for workers that belong to the learner, whatever else connects."""

import contextlib
import socket
import threading
import time

import jax
import numpy as np
import pytest

from jaxrl_tis.rollouts import tcp, transport, wire
from jaxrl_tis.rollouts.tcp import Broken, Refused, WeightClient, WeightServer
from jaxrl_tis.rollouts.transport import Unavailable
from tests.rollouts.serving_trees import assert_same, like, tree

TOKEN = "0123456789abcdef"
FACTS = {"model": "Qwen/Qwen3-0.6B", "quantization": "w8a8", "tokenizer": "sha256:1"}


@pytest.fixture(scope="module")
def trees():
    return [tree(seed) for seed in range(4)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """So that a leaf has several."""
    monkeypatch.setattr(tcp, "CHUNK", 16)


def publish(where, tree, version):
    where.publish(tree, version, transport.tree_digest(tree))


def server(**changes) -> WeightServer:
    return WeightServer(**dict(token=TOKEN, facts=FACTS, timeout=20.0) | changes)


def client(served, **changes) -> WeightClient:
    given = dict(host="127.0.0.1", port=served.port, token=TOKEN, facts=FACTS, timeout=20.0)
    return WeightClient(**given | changes)


@contextlib.contextmanager
def relay(port: int, change):
    """A port to which a client may connect instead: `change(n, data)` is what it is sent for the
    bytes from the n-th on that the server sent; None ends the connection. Yields the port and all
    bytes that passed, of both ways."""
    listener, passed = socket.create_server(("127.0.0.1", 0)), bytearray()

    def pump(source, target, change):
        count = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                passed.extend(data)
                changed = change(count, data)
                if changed is None:
                    break
                target.sendall(changed)
                count += len(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept():
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", port))
                for way in ((near, far, lambda n, data: data), (far, near, change)):
                    threading.Thread(target=pump, args=way, daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1], passed
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


# What arrives


def test_what_is_fetched_is_what_was_published(trees):
    with server() as learner:
        worker = client(learner)
        assert worker.latest() is None
        for version in (0, 1, 7):
            publish(learner, trees[version % 3], version)
            assert worker.latest() == learner.latest() == version
            assert_same(worker.fetch(version, like(trees[0])), trees[version % 3])
        assert worker.latest(after=6) == 7 and worker.latest(after=7) is None


@pytest.mark.parametrize("scheme", ["w8a16", "fp8_w8a8"])
def test_quantised_leaves_arrive_as_they_are(scheme):
    found = tree(1, scheme)
    with server() as learner:
        publish(learner, found, 1)
        assert_same(client(learner).fetch(1, like(found)), found)


def test_the_bytes_of_a_transfer_are_counted(trees):
    with server() as learner:
        publish(learner, trees[0], 1)
        leaves = [leaf.nbytes for leaf in jax.tree.leaves(trees[0])]
        once = sum(n + wire.FRAME.size * -(-n // 16) for n in leaves)  # chunks of 16
        for count in (1, 2):
            client(learner).fetch(1, like(trees[0]))
            deadline = time.monotonic() + 10
            while learner.bytes_sent != count * once and time.monotonic() < deadline:
                time.sleep(0.01)  # the last chunk may be read before it is counted
            assert learner.bytes_sent == count * once


def test_versions_only_grow(trees):
    with server() as learner:
        publish(learner, trees[0], 3)
        for version, why in ((3, "not newer than 3"), (2, "not newer than 3"), ("4", "give an int")):
            with pytest.raises(ValueError, match=why):
                publish(learner, trees[1], version)
        assert_same(client(learner).fetch(3, like(trees[0])), trees[0])


def test_the_learner_may_go_on_with_its_buffers():
    weights = {"a": np.zeros(100, np.float32)}
    with server() as learner:
        publish(learner, weights, 1)
        weights["a"] += 1
        assert not client(learner).fetch(1, like(weights))["a"].any()


@pytest.fixture
def asked(monkeypatch):
    """Set once the learner holds a worker's question."""
    event, newer = threading.Event(), WeightServer._newer
    monkeypatch.setattr(WeightServer, "_newer", lambda self, *a: event.set() or newer(self, *a))
    return event


def waiting(learner) -> tuple[threading.Thread, list]:
    """A worker that waits for what comes after version 1, and its answers."""
    answers = []
    ask = lambda: answers.append(client(learner).latest(after=1, wait=20.0))
    thread = threading.Thread(target=ask)
    thread.start()
    return thread, answers


def test_a_worker_waits_for_news(trees, asked):
    with server() as learner:
        publish(learner, trees[0], 1)
        start = time.monotonic()
        assert client(learner).latest(after=1, wait=0.1) is None
        assert time.monotonic() - start >= 0.1
        asked.clear()
        thread, answers = waiting(learner)
        assert asked.wait(20)
        publish(learner, trees[0], 2)
        thread.join(10)
        assert answers == [2]


def test_who_waits_is_let_go_when_the_learner_ends(trees, asked):
    with server() as learner:
        thread, answers = waiting(learner)
        assert asked.wait(20)
    thread.join(10)
    assert answers == [None]
    with pytest.raises(Broken, match=f"weights from 127.0.0.1:{learner.port}: .*refused"):
        client(learner).latest()


def test_more_workers_than_the_learner_serves_are_told_to_wait(trees, asked):
    with server(max_clients=1) as learner:
        publish(learner, trees[0], 1)
        thread, answers = waiting(learner)
        assert asked.wait(20)
        for ask in (client(learner).latest, lambda: client(learner).fetch(1, like(trees[0]))):
            with pytest.raises(Unavailable, match="1 workers are being served"):
                ask()
        publish(learner, trees[0], 2)
        thread.join(10)
        assert answers == [2]
        assert in_time(client(learner).latest) == 2


def in_time(ask):
    """What it returns, once there is a thread for this worker."""
    deadline = time.monotonic() + 20
    while True:
        try:
            return ask()
        except Unavailable:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def test_an_older_version_than_the_latest_is_not_served(trees):
    with server() as learner:
        with pytest.raises(Unavailable, match="version 1 is not served; the latest is None"):
            client(learner).fetch(1, like(trees[0]))
        publish(learner, trees[0], 1)
        publish(learner, trees[1], 2)
        with pytest.raises(Unavailable, match="version 1 is not served; the latest is 2"):
            client(learner).fetch(1, like(trees[0]))


def test_a_transfer_goes_on_with_the_version_it_began_with(trees):
    """Although the next one is published before its second chunk."""
    with server() as learner:
        publish(learner, trees[1], 1)
        swapped = []

        def change(count, data):
            if learner.bytes_sent > 0 and not swapped:
                swapped.append(publish(learner, trees[2], 2))
            return data

        with relay(learner.port, change) as (port, _):
            assert_same(client(learner, port=port).fetch(1, like(trees[0])), trees[1])
        assert swapped and learner.latest() == 2


def test_two_workers_beside_a_learner_get_whole_versions_that_grow(trees):
    seen, wrong, is_over = [[], []], [], threading.Event()

    def read(found):
        worker, newest = client(learner), -1
        while not is_over.is_set():
            version = worker.latest(after=newest, wait=0.2)
            if version is None:
                continue
            with contextlib.suppress(Unavailable):
                value = worker.fetch(version, like(trees[0]))["rest"][0]
                wrong.extend([version] * bool(value != version % 4))
                newest = version
                found.append(version)

    with server() as learner:
        threads = [threading.Thread(target=read, args=(found,)) for found in seen]
        [thread.start() for thread in threads]
        for version in range(20):
            publish(learner, trees[version % 4], version)
            time.sleep(0.01)
        deadline = time.monotonic() + 20
        while any(19 not in found for found in seen) and time.monotonic() < deadline:
            time.sleep(0.01)
        is_over.set()
        [thread.join() for thread in threads]
    assert not wrong
    assert all(found == sorted(set(found)) and found[-1] == 19 for found in seen)


# What is refused


def test_a_port_in_use_is_said():
    with server() as learner, pytest.raises(ValueError, match=f":{learner.port}: .*in use; choose"):
        server(port=learner.port)


@pytest.mark.parametrize("token", ["", "short"])
def test_a_token_that_can_be_guessed_is_refused(token):
    for make in (lambda: server(token=token), lambda: WeightClient("127.0.0.1", 1, token, FACTS)):
        with pytest.raises(ValueError, match=f"has {len(token)} characters; .* at least 16"):
            make()


def test_a_wrong_token_is_refused(trees):
    with server() as learner:
        publish(learner, trees[0], 1)
        other = client(learner, token="fedcba9876543210")
        for ask in (other.latest, lambda: other.fetch(1, like(trees[0]))):
            with pytest.raises(Refused, match="the worker's token is not the learner's"):
                ask()
        assert client(learner).latest() == 1


def test_a_learner_without_the_token_is_refused(trees):
    """It takes any proof and gives one of its own."""
    listener = socket.create_server(("127.0.0.1", 0))

    def lie():
        connection, _ = listener.accept()
        with connection:
            peer = tcp.Peer(connection, 20.0, 20.0)
            peer.tell(magic=tcp.MAGIC, protocol=tcp.PROTOCOL, nonce="0")
            proof = peer.hear("nonce", "proof", "facts")["proof"]
            peer.tell(proof=proof)  # the worker's own, sent back

    thread = threading.Thread(target=lie)
    thread.start()
    with listener, pytest.raises(Refused, match="the learner's token is not the worker's"):
        WeightClient(*listener.getsockname(), TOKEN, FACTS).latest()
    thread.join()


def test_the_token_never_travels_and_no_handshake_is_like_another(trees):
    with server() as learner:
        seen = []
        for _ in range(2):
            with relay(learner.port, lambda n, data: data) as (port, passed):
                client(learner, port=port).latest()
            seen.append(bytes(passed))
        assert b"proof" in seen[0] and TOKEN.encode() not in seen[0] + seen[1]
        assert seen[0] != seen[1]


@pytest.mark.parametrize("name, value, why", [
    ("model", "other", 'model: learner "Qwen/Qwen3-0.6B", worker "other"'),
    ("quantization", None, 'quantization: learner "w8a8", worker null'),
    ("tokenizer", "sha256:2", 'tokenizer: learner "sha256:1", worker "sha256:2"'),
    ("git revision", "abc", 'git revision: learner .*, worker "abc"'),
    ("version of jax", "0.1", f'version of jax: learner "{jax.__version__}", worker "0.1"'),
    ("more", 1, "more: learner absent, worker 1"),
])
def test_another_worker_is_told_what_differs(trees, name, value, why):
    with server() as learner:
        publish(learner, trees[0], 1)
        with pytest.raises(Refused, match=f"learner and worker differ in {why}$"):
            client(learner, facts=FACTS | {name: value}).latest()


def test_another_protocol_is_refused(monkeypatch):
    with server() as learner:
        with relay(learner.port, lambda n, data: data) as (port, _):
            worker = client(learner, port=port)
            hear = tcp.Peer.hear
            newer = lambda self, *names, **kw: hear(self, *names, **kw) | {"protocol": 2}
            monkeypatch.setattr(tcp.Peer, "hear", newer)
            with pytest.raises(Refused, match="speaks jaxrl_tis weights 2, worker jaxrl_tis weights 1"):
                worker.latest()


def test_another_format_is_refused_before_a_byte_of_it_is_sent_for(trees):
    with server() as learner:
        publish(learner, trees[0] | {"embed": trees[0]["embed"].astype("float32")}, 1)
        with pytest.raises(ValueError, match=r"'embed'\] is float32 \[7, 4\], this worker's bfloat16"):
            client(learner).fetch(1, like(trees[0]))


# What breaks


def transfer_start(served, trees) -> int:
    """How many bytes the server sends before the first chunk: those of all but the leaves."""
    sent = []
    with relay(served.port, lambda n, data: sent.append(len(data)) or data) as (port, _):
        client(served, port=port).fetch(1, like(trees[0]))
    leaves = [leaf.nbytes for leaf in jax.tree.leaves(trees[0])]
    return sum(sent) - sum(n + wire.FRAME.size * -(-n // 16) for n in leaves)


def test_every_changed_byte_is_seen(trees):
    """At random places of a transfer; the next attempt gets it whole."""
    rng = np.random.default_rng(0)
    with server() as learner:
        publish(learner, trees[1], 1)
        start = transfer_start(learner, trees)
        places = rng.integers(start, start + 1000, 12)
        for place in places:
            def change(count, data):
                data = bytearray(data)
                if 0 <= place - count < len(data):
                    data[place - count] ^= 1 << place % 8
                return data

            with relay(learner.port, change) as (port, _):
                once = client(learner, port=port, attempts=1, timeout=0.3)
                with pytest.raises(Broken, match="sha256 differs|announces|took too long|timed out"):
                    once.fetch(1, like(trees[0]))


@pytest.mark.parametrize("place", [0, 20, 400, -1, -45])
def test_a_connection_that_ends_gives_nothing_and_is_tried_again(trees, place):
    """Cut in the handshake, between chunks, in the last one: the first time, not the second."""
    with server() as learner:
        publish(learner, trees[1], 1)
        sent = []
        with relay(learner.port, lambda n, data: sent.append(len(data)) or data) as (port, _):
            client(learner, port=port).fetch(1, like(trees[0]))
        end, cuts = place % sum(sent), []

        def change(count, data):
            if len(cuts) < allowed and count + len(data) > end:
                cuts.append(1)
                return None
            return data

        with relay(learner.port, change) as (port, _):
            allowed = 3
            with pytest.raises(Broken):
                client(learner, port=port).fetch(1, like(trees[0]))
            assert len(cuts) == 3
            allowed = 4
            assert_same(client(learner, port=port).fetch(1, like(trees[0])), trees[1])


def test_a_transfer_that_stops_ends_at_the_timeout(trees):
    with server() as learner:
        publish(learner, trees[0], 1)
        start, is_over = transfer_start(learner, trees), threading.Event()

        def change(count, data):
            if count + len(data) > start:
                is_over.wait(20)
            return data

        with relay(learner.port, change) as (port, _):
            with pytest.raises(Broken, match="timed out|took too long"):
                client(learner, port=port, attempts=1, timeout=0.2).fetch(1, like(trees[0]))
            is_over.set()


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\n\r\n" * 10, wire.FRAME.pack(0, b"") + b"x"])
def test_those_who_say_nothing_or_nonsense_change_nothing_for_others(trees, said):
    """They have one of two threads until they are late, or all of them."""
    for max_clients in (1, 2):
        with server(timeout=0.3, max_clients=max_clients) as learner:
            publish(learner, trees[0], 1)
            with socket.create_connection(("127.0.0.1", learner.port)) as other:
                wire.receive(other, 10_000, time.monotonic() + 20)  # it has a thread
                other.sendall(said)
                worker = client(learner)
                assert_same(in_time(lambda: worker.fetch(1, like(trees[0]))), trees[0])


def test_a_worker_that_reads_nothing_delays_neither_the_learner_nor_others(monkeypatch):
    monkeypatch.setattr(tcp, "CHUNK", 1 << 20)
    big = {"a": np.arange(4 << 20, dtype=np.int32)}
    with server() as learner:
        publish(learner, big, 1)
        with socket.create_connection(("127.0.0.1", learner.port)) as connection:
            slow = client(learner)
            peer = tcp.Peer(connection, 20.0, 20.0)
            tcp.introduce(peer, slow._token, slow._facts)
            peer.tell(after=None, wait=None, fetch=1)
            peer.hear("digest", "format")
            start = time.monotonic()
            publish(learner, big, 2)
            assert client(learner).latest() == 2
            assert_same(client(learner).fetch(2, like(big)), big)
            assert time.monotonic() - start < 10


def test_no_tree_that_lies_about_itself_is_returned(trees):
    with server() as learner:
        learner.publish(trees[0], 1, transport.tree_digest(trees[1]))
        with pytest.raises(Unavailable, match="version 1 has digest .*, published was"):
            client(learner).fetch(1, like(trees[0]))
