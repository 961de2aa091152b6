"""A hub on 127.0.0.1, as much of its protocol as huggingface_hub uses to read."""

import contextlib
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from collections.abc import Iterator

from tests import web


class Hub:
    """Repositories: {"models/owner/name": {"commit": 40 digits, "files": {name: bytes}}}. `asked`
    is every request that came, `token` the only one that opens what is `gated`; `status`, if it is not
    None, is all that it answers."""

    def __init__(self):
        self.repositories, self.asked, self.gated, self.token = {}, [], set(), "hf_right"
        self.status = None

    def put(self, name: str, commit: str, files: dict[str, bytes]) -> None:
        """Makes these files the newest commit, "1" times 40 for commit "1"."""
        entry = self.repositories.setdefault(name, {})
        entry[(commit * 40)[:40]] = files
        entry["main"] = (commit * 40)[:40]


@contextlib.contextmanager
def serving() -> Iterator[tuple[Hub, str]]:
    """Yields a hub and the value of HF_ENDPOINT."""
    hub = Hub()
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield hub, f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class _Handler(web.Answering):
    hub: Hub

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = urllib.parse.unquote(self.path.partition("?")[0])
        self.hub.asked.append(f"{self.command} {path}")
        if self.hub.status is not None:
            self._send(self.hub.status, b"{}")
        elif found := re.fullmatch(r"/api/((?:models|datasets)/[^/]+/[^/]+)(?:/(\w+)/([^/]+))?", path):
            self._describe(found[1], found[2] or "revision", found[3] or "main")
        elif found := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file((found[1] or "models/") + found[2], found[3], found[4])
        else:
            self._send(404, b"{}")

    def _commit(self, repository: str, revision: str) -> str | None:
        """Answers and returns None where there is no such thing."""
        if repository not in self.hub.repositories:
            self._send(404, b"{}", {"X-Error-Code": "RepoNotFound"})
            return None
        is_known = self.headers["Authorization"] == f"Bearer {self.hub.token}"
        if repository in self.hub.gated and not is_known:
            self._send(403, b"{}", {"X-Error-Code": "GatedRepo"})
            return None
        commits = self.hub.repositories[repository]
        if revision == "main":
            return commits["main"]
        if revision not in commits:
            self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
            return None
        return revision

    def _describe(self, repository: str, kind: str, revision: str) -> None:
        commit = self._commit(repository, revision)
        if commit is None:
            return
        files = self.hub.repositories[repository][commit]
        if kind == "tree":
            body = [
                {"type": "file", "path": n, "size": len(data), "oid": _etag(data)}
                for n, data in files.items()
            ]
        else:
            name = repository.split("/", 1)[1]
            body = {"id": name, "modelId": name, "sha": commit, "private": False, "tags": [],
                    "downloads": 0, "likes": 0, "siblings": [{"rfilename": n} for n in files]}
        self._send(200, json.dumps(body).encode())

    def _file(self, repository: str, revision: str, name: str) -> None:
        commit = self._commit(repository, revision)
        if commit is None:
            return
        files = self.hub.repositories[repository][commit]
        if name not in files:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        headers = {"ETag": f'"{_etag(files[name])}"', "X-Repo-Commit": commit}
        self._send(200, files[name], headers)


def _etag(data: bytes) -> str:
    return hashlib.sha1(data).hexdigest()
