"""Weights over TCP: the learner's end is a server of the newest version, the worker's end asks it.

One connection is one request. Server (S) and client (C) say, in messages of `wire`:

    S  magic, protocol, nonce
    C  nonce, proof that it has the token, facts: its code, packages, model
    S  proof that it has the token, or what it refuses
    C  {"after": version, "wait": seconds}       or  {"fetch": version}
    S  {"version", the latest, or null}              {"digest", "format"}, then every leaf in chunks

The token itself never travels; the weights travel as they are: not over a network that others read.
"""

import errno
import hashlib
import hmac
import itertools
import secrets
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxrl_tis.record import provenance
from jaxrl_tis.rollouts import transport, wire
from jaxrl_tis.rollouts.transport import Unavailable

MAGIC, PROTOCOL = "jaxrl_tis weights", 1
CHUNK = 4 << 20
MESSAGE_BYTES = wire.HEAD_BYTES + wire.START.size
TOKEN_LENGTH = 16  # at least: who listens to a handshake could guess a shorter one


class Refused(ValueError):
    """The two ends do not belong together, now or later."""


class Broken(Unavailable):
    """A connection failed: another may not."""


class Peer:
    """A connection on which each message is through within `timeout` seconds, and all within `total`:
    a peer that is silent or slow costs no more than that."""

    def __init__(self, connection: socket.socket, timeout: float, total: float):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._connection, self._timeout = connection, timeout
        self._end = time.monotonic() + total

    def _deadline(self, wait: float = 0.0) -> float:
        return min(time.monotonic() + self._timeout + wait, self._end)

    def tell(self, **header: Any) -> None:
        wire.send(self._connection, wire.pack(header, {}), self._deadline())

    def hear(self, *names: str, wait: float = 0.0) -> dict[str, Any]:
        """Returns a header with these entries.

        Args:
          wait: seconds that the other end may take beyond `timeout`.

        Raises:
          Refused, Unavailable: the other end refuses; for good, or for now.
        """
        data = wire.receive(self._connection, MESSAGE_BYTES, self._deadline(wait))
        header, _ = wire.unpack(data)
        if header.keys() == {"refused", "for_now"}:
            raise (Unavailable if header["for_now"] else Refused)(str(header["refused"]))
        if header.keys() != set(names):
            raise wire.Damaged(f"a message with {', '.join(header)}; expected {', '.join(names)}")
        return header

    def send(self, data: bytes) -> None:
        wire.send(self._connection, data, self._deadline())

    def receive(self, limit: int) -> bytearray:
        """Returns the bytes of a frame; see wire.receive."""
        return wire.receive(self._connection, limit, self._deadline())

    def send_leaf(self, leaf: np.ndarray) -> Iterator[int]:
        """Sends an array chunk by chunk; yields the bytes of each."""
        data = memoryview(transport.raw(leaf))
        for start in range(0, len(data), CHUNK):
            yield wire.send(self._connection, data[start : start + CHUNK], self._deadline())

    def receive_leaf(self, staging: np.ndarray) -> None:
        """Fills an array with chunks, each of which is verified."""
        data = memoryview(transport.raw(staging))
        for start in range(0, len(data), CHUNK):
            part = data[start : start + CHUNK]
            chunk = wire.receive(self._connection, len(part), self._deadline())
            if len(chunk) != len(part):
                raise wire.Damaged(f"a chunk of {len(chunk)} bytes; expected {len(part)}")
            part[:] = chunk


def _proof(token: str, end: str, *nonces: str) -> str:
    """What only who has the token can say; each end says another, which cannot be sent back to it."""
    return hmac.new(token.encode(), "/".join((end, *nonces)).encode(), hashlib.sha256).hexdigest()


def admit(peer: Peer, token: str, facts: Mapping[str, Any]) -> None:
    """The learner's half of the handshake. Refused: the worker has another token, or other facts."""
    nonce = secrets.token_hex(16)
    peer.tell(magic=MAGIC, protocol=PROTOCOL, nonce=nonce)
    told = peer.hear("nonce", "proof", "facts")
    nonces = nonce, str(told["nonce"])
    expected = _proof(token, "worker", *nonces)
    if not hmac.compare_digest(expected.encode(), str(told["proof"]).encode()):
        raise Refused("the worker's token is not the learner's")
    if not isinstance(told["facts"], dict):
        raise wire.Damaged("a message whose facts have no names")
    different = [
        f"{name}: learner {ours}, worker {theirs}"
        for name, ours, theirs in provenance.differences(facts, told["facts"])
    ]
    if different:
        raise Refused(f"learner and worker differ in {'; '.join(different)}")
    peer.tell(proof=_proof(token, "learner", *nonces))


def introduce(peer: Peer, token: str, facts: Mapping[str, Any]) -> None:
    """The worker's half of the handshake. Refused: by the learner, or it has another token."""
    told = peer.hear("magic", "protocol", "nonce")
    if (told["magic"], told["protocol"]) != (MAGIC, PROTOCOL):
        raise Refused(f"learner speaks {told['magic']} {told['protocol']}, worker {MAGIC} {PROTOCOL}")
    nonces = str(told["nonce"]), secrets.token_hex(16)
    peer.tell(nonce=nonces[1], proof=_proof(token, "worker", *nonces), facts=facts)
    expected = _proof(token, "learner", *nonces)
    if not hmac.compare_digest(expected.encode(), str(peer.hear("proof")["proof"]).encode()):
        raise Refused("the learner's token is not the worker's")


def checked_token(token: str, what: str = "the token of the weights") -> str:
    """Returns the token; ValueError where it is too short."""
    if len(token) < TOKEN_LENGTH:
        raise ValueError(
            f"{what} has {len(token)} characters; learner and workers share one of at least "
            f"{TOKEN_LENGTH}: secrets.token_hex(16) makes one"
        )
    return token


def advice(error: OSError) -> str:
    """Says what to do where an address cannot be listened at."""
    is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
    return "choose another port, or 0" if is_port else "give an address of this machine"


def all_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the versions of packages and code to what has to be the same at both ends."""
    return provenance.identity({}) | dict(facts)


class Listener(socketserver.ThreadingTCPServer):
    """Calls `answer` with every connection, in a thread of its own."""

    allow_reuse_address = daemon_threads = True

    def __init__(self, address: tuple[str, int], answer: Callable[[socket.socket], None]):
        self._answer = answer
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, None)

    def finish_request(self, request, client_address) -> None:
        self._answer(request)


class WeightServer:
    """The learner's end. It serves a host copy of the newest tree, which `publish` replaces: a transfer
    that is under way goes on with the copy that it began with, and no worker delays the learner.

    Args:
      token: shared secret of the learner and its workers.
      facts: what has to be the same at both ends beside code and packages, by name: the model, the
        tokenizer, the format.
      host: address to listen at; the default is reached from this machine alone.
      port: 0 takes a free one.
      max_clients: connections at a time; each may hold a host copy of another version.
      timeout: seconds for each message, and for a worker to wait for news.
      transfer_timeout: seconds for a connection.

    Raises:
      ValueError: the token is too short, or the port is in use.
    """

    def __init__(
        self, token: str, facts: Mapping[str, Any], host: str = "127.0.0.1", port: int = 0,
        max_clients: int = 16, timeout: float = 30.0, transfer_timeout: float = 600.0,
    ):
        self._token, self._facts = checked_token(token), all_facts(facts)
        self._timeout, self._transfer_timeout = timeout, transfer_timeout
        self._max_clients, self._slots = max_clients, threading.Semaphore(max_clients)
        self._news, self._published, self._is_closed = threading.Condition(), None, False
        self.bytes_sent = 0
        try:
            self._listener = Listener((host, port), self._answer)
        except OSError as error:
            raise ValueError(
                f"cannot serve weights at {host}:{port}: {error.strerror}; {advice(error)}"
            ) from error
        self.host, self.port = self._listener.server_address[:2]
        self._thread = threading.Thread(target=self._listener.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def __enter__(self) -> "WeightServer":
        return self

    def __exit__(self, *_) -> None:
        """Serves nobody any more; transfers under way end with their chunk."""
        with self._news:
            self._is_closed = True
            self._news.notify_all()
        self._listener.shutdown()
        self._listener.server_close()
        self._thread.join()

    def publish(self, params_tree: Any, version: int, digest: str) -> None:
        transport.check_newer(version, self.latest())
        about = {"digest": digest, "format": transport.tree_format(params_tree)}
        leaves = transport.host_leaves(params_tree)
        with self._news:
            transport.check_newer(version, self.latest())
            self._published = version, about, leaves
            self._news.notify_all()

    def latest(self) -> int | None:
        published = self._published
        return None if published is None else published[0]

    def _answer(self, connection: socket.socket) -> None:
        try:
            peer = Peer(connection, self._timeout, self._transfer_timeout)
            if not self._slots.acquire(blocking=False):
                peer.tell(refused=f"{self._max_clients} workers are being served", for_now=True)
                return
            try:
                self._converse(peer)
            finally:
                self._slots.release()
        except (OSError, wire.Damaged):
            pass  # it is gone, late, or something else: the end of the connection tells it

    def _converse(self, peer: Peer) -> None:
        try:
            admit(peer, self._token, self._facts)
            self._serve(peer)
        except (Refused, Unavailable) as error:
            peer.tell(refused=str(error), for_now=isinstance(error, Unavailable))

    def _serve(self, peer: Peer) -> None:
        asked = peer.hear("after", "wait", "fetch")
        if asked["fetch"] is None:
            peer.tell(version=self._newer(int(asked["after"]), float(asked["wait"])))
            return
        published = self._published  # the reference keeps this copy until it is sent
        if published is None or published[0] != asked["fetch"]:
            raise Unavailable(f"version {asked['fetch']} is not served; the latest is {self.latest()}")
        _, about, leaves = published
        peer.tell(**about)
        for count in itertools.chain.from_iterable(map(peer.send_leaf, leaves.values())):
            with self._news:
                self.bytes_sent += count
            if self._is_closed:
                return

    def _newer(self, after: int, wait: float) -> int | None:
        """Returns the latest version once it is newer, at most `timeout` seconds from now."""
        is_newer = lambda: self._published is not None and self._published[0] > after
        with self._news:
            wait = max(0.0, min(wait, self._timeout))
            self._news.wait_for(lambda: is_newer() or self._is_closed, wait)
            return self._published[0] if is_newer() else None


class WeightClient:
    """The worker's end. Holds no connection and no weights: `fetch` copies into memory of its own and
    returns it once every chunk and the whole are verified; until then nothing that serves is touched.

    Args:
      host, port: of the learner's `WeightServer`.
      token, facts: see there; facts that differ are refused, by name.
      timeout: seconds for each message.
      transfer_timeout: seconds for one attempt at a tree.
      attempts: how often `fetch` begins before it gives up.
    """

    def __init__(
        self, host: str, port: int, token: str, facts: Mapping[str, Any], timeout: float = 30.0,
        transfer_timeout: float = 600.0, attempts: int = 3,
    ):
        self._address, self._token = (host, port), checked_token(token)
        self._facts = all_facts(facts)
        self._timeout, self._transfer_timeout = timeout, transfer_timeout
        self._attempts = attempts

    def latest(self, after: int = -1, wait: float = 0.0) -> int | None:
        """Returns the newest version if it is newer than `after`, else None.

        Args:
          wait: seconds to wait for one; the learner may answer sooner.

        Raises:
          Unavailable: the learner cannot be reached, or serves others.
          Refused: token, code, packages or facts differ.
        """
        def ask(peer: Peer) -> int | None:
            peer.tell(after=after, wait=wait, fetch=None)
            version = peer.hear("version", wait=wait)["version"]
            if version is not None:
                transport.check_newer(version, after)
            return version

        return self._connected(ask)

    def fetch(self, version: int, like: Any) -> Any:
        for left in reversed(range(self._attempts)):
            try:
                return self._connected(lambda peer: self._receive(peer, version, like))
            except Broken:
                if not left:
                    raise

    def _connected(self, use: Callable[[Peer], Any]) -> Any:
        """Returns what `use` does with a new connection, once both ends have shown the token."""
        try:
            with socket.create_connection(self._address, self._timeout) as connection:
                peer = Peer(connection, self._timeout, self._transfer_timeout)
                introduce(peer, self._token, self._facts)
                return use(peer)
        except (OSError, wire.Damaged) as error:
            host, port = self._address
            raise Broken(f"weights from {host}:{port}: {error}") from error

    def _receive(self, peer: Peer, version: int, like: Any) -> Any:
        peer.tell(after=None, wait=None, fetch=version)
        about, wanted = peer.hear("digest", "format"), transport.tree_format(like)
        transport.check_format(version, about["format"], wanted)
        staging = {
            name: np.empty(shape, wire.DTYPES[dtype])
            for name, (dtype, shape) in wanted["leaves"].items()
        }
        for leaf in staging.values():
            peer.receive_leaf(leaf)
        return transport.assembled(version, staging, about["digest"], like)
