"""Google Cloud Storage on 127.0.0.1: as much of its JSON protocol as gcsfs and TensorStore use."""

import base64
import contextlib
import email
import http.server
import json
import os
import re
import threading
import urllib.parse
import zlib
from collections.abc import Iterator

from tests import web

TIME = "2026-01-01T00:00:00.000Z"


class Storage:
    """`objects` is {name: (bytes, generation)} of the only bucket, called "bucket"; `before` is
    called with every request's method and object, to inject faults: what it returns, an HTTP
    status, is the answer."""

    def __init__(self):
        self.objects, self.lock, self.generation = {}, threading.RLock(), 0
        self.before = lambda method, name: None
        self.sessions = {}

    def put(self, name: str, data: bytes) -> dict:
        with self.lock:
            self.generation += 1
            self.objects[name] = data, self.generation
            return describe(name, data, self.generation)

    def names(self, prefix: str = "") -> list[str]:
        with self.lock:
            return sorted(name for name in self.objects if name.startswith(prefix))


def describe(name: str, data: bytes, generation: int) -> dict:
    crc = base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
    return {"kind": "storage#object", "id": name, "name": name, "bucket": "bucket",
            "size": f"{len(data)}", "generation": f"{generation}", "metageneration": "1",
            "timeCreated": TIME, "updated": TIME, "etag": crc, "contentType": "text/plain"}


@contextlib.contextmanager
def serving() -> Iterator[tuple[Storage, dict[str, str]]]:
    """Yields the storage and the environment in which gs://bucket is it."""
    storage = Storage()
    handler = type("Handler", (_Handler,), {"storage": storage})
    server = _Server(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield storage, {
            "STORAGE_EMULATOR_HOST": url, "TENSORSTORE_GCS_HTTP_URL": url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none", "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }
    finally:
        server.shutdown()
        server.server_close()


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_) -> None:
        """A client that is gone is none of ours."""


class _Handler(web.Answering):
    wbufsize = 1 << 16  # a response in one packet
    storage: Storage

    def _serve(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        query = {k: v[-1] for k, v in urllib.parse.parse_qs(url.query).items()}
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if os.environ.get("GCS_SERVER_LOG"):
            print(self.command, self.path, len(body), flush=True)
        path = url.path.replace("//", "/")
        if found := re.fullmatch(r"/upload/storage/v1/b/bucket/o", path):
            self._upload(query, body)
        elif re.fullmatch(r"/storage/v1/b/bucket/?", path):
            self._json({"kind": "storage#bucket", "name": "bucket", "id": "bucket",
                        "timeCreated": TIME, "updated": TIME})
        elif re.fullmatch(r"/storage/v1/b/bucket/o/?", path):
            self._list(query)
        elif found := re.fullmatch(r"(?:/download)?/storage/v1/b/bucket/o/([^/]+)", path):
            self._object(urllib.parse.unquote(found[1]), query)
        elif found := re.fullmatch(
            r"/storage/v1/b/bucket/o/([^/]+)/(?:rewriteTo|copyTo)/b/bucket/o/([^/]+)", path
        ):
            self._copy(*map(urllib.parse.unquote, found.groups()))
        elif found := re.fullmatch(r"/storage/v1/b/bucket/o/([^/]+)/moveTo/o/([^/]+)", path):
            source, target = map(urllib.parse.unquote, found.groups())
            self._copy(source, target)
            with self.storage.lock:
                self.storage.objects.pop(source, None)
        else:
            self._json({"error": {"code": 404, "message": f"no such thing {path}"}}, 404)

    do_GET = do_POST = do_PUT = do_DELETE = do_HEAD = _serve

    def _is_refused(self, name: str) -> bool:
        status = self.storage.before(self.command, name)
        if status is not None:
            self._json({"error": {"code": status, "message": "refused by the test"}}, status)
        return status is not None

    def _upload(self, query: dict, body: bytes) -> None:
        kind = query["uploadType"]
        if "upload_id" in query:
            name = self.storage.sessions[query["upload_id"]]
        elif kind == "multipart":
            head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
            meta, content = email.message_from_bytes(head + body).get_payload()
            name, body = json.loads(meta.get_payload())["name"], content.get_payload(decode=True)
        elif kind == "resumable":
            name = json.loads(body)["name"] if body else query["name"]
            session = f"{len(self.storage.sessions)}"
            self.storage.sessions[session] = name
            where = f"http://{self.headers['Host']}{self.path}&upload_id={session}"
            self._send(200, b"{}", {"Location": where})
            return
        else:
            name = query["name"]
        if self._is_refused(name):
            return
        with self.storage.lock:
            wanted = query.get("ifGenerationMatch")
            held = self.storage.objects.get(name, (b"", 0))[1]
            if wanted is not None and int(wanted) != held:
                self._json({"error": {"code": 412, "message": "generation"}}, 412)
                return
            self._json(self.storage.put(name, body))

    def _list(self, query: dict) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        items, prefixes = [], set()
        with self.storage.lock:
            for name in self.storage.names(prefix):
                rest = name[len(prefix):]
                if delimiter and delimiter in rest:
                    prefixes.add(prefix + rest[: rest.index(delimiter) + 1])
                elif query.get("startOffset", "") <= name:
                    items.append(describe(name, *self.storage.objects[name]))
        self._json({"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)})

    def _object(self, name: str, query: dict) -> None:
        if self._is_refused(name):
            return
        with self.storage.lock:
            if name not in self.storage.objects:
                self._json({"error": {"code": 404, "message": f"no object {name}"}}, 404)
                return
            data, generation = self.storage.objects[name]
            if self.command == "DELETE":
                del self.storage.objects[name]
                self._send(204, b"")
                return
        if query.get("alt") != "media":
            self._json(describe(name, data, generation))
            return
        headers = {"X-Goog-Generation": f"{generation}", "X-Goog-Stored-Content-Length": f"{len(data)}"}
        found = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers["Range"] or "")
        if not found or not data:
            self._send(200, data, headers)
            return
        if found[1]:
            first, last = int(found[1]), min(int(found[2] or len(data)), len(data) - 1)
        else:
            first, last = max(0, len(data) - int(found[2])), len(data) - 1
        if first >= len(data):
            self._send(416, b"", headers)
            return
        headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
        self._send(206, data[first : last + 1], headers)

    def _copy(self, source: str, target: str) -> None:
        with self.storage.lock:
            if source not in self.storage.objects:
                self._json({"error": {"code": 404, "message": f"no object {source}"}}, 404)
                return
            resource = self.storage.put(target, self.storage.objects[source][0])
        self._json({"kind": "storage#rewriteResponse", "done": True, "resource": resource})

    def _json(self, value: dict, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})
