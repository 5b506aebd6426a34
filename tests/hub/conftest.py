"""A small stand-in for the Hub on 127.0.0.1: as much of its API as huggingface_hub 2.4 calls for a model."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

SHA = "0123456789abcdef0123456789abcdef01234567"


class Hub:
    """A running stand-in.

    Attributes:
        url: its address, for ``HF_ENDPOINT``.
        files: what was committed to the repository: name -> content.
        private: the flag that the repository was created with.
        tokens: every Authorization header seen.
        broken: whether commits fail.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.objects: dict[str, bytes] = {}
        self.private: bool | None = None
        self.tokens: set[str | None] = set()
        self.broken = False
        self.url = ""

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        """``POST /api/repos/create``."""
        self.private = body.get("visibility") == "private" or bool(body.get("private"))  # new and old spelling
        return {"url": f"{self.url}/me/{body['name'].rpartition('/')[2]}", "name": body["name"], "id": "1"}

    def preupload(self, body: dict[str, Any]) -> dict[str, Any]:
        """``POST .../preupload/main``: weights go the LFS way, all else inside the commit."""
        modes = {file["path"]: "lfs" if file["path"].endswith(".safetensors") else "regular" for file in body["files"]}
        return {"files": [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in modes.items()]}

    def batch(self, body: dict[str, Any]) -> dict[str, Any]:
        """``POST .../info/lfs/objects/batch``."""
        objects = [{**one, "actions": {"upload": {"href": f"{self.url}/lfs/{one['oid']}"}}} for one in body["objects"]]
        return {"transfer": "basic", "objects": objects}

    def commit(self, lines: list[bytes]) -> dict[str, Any]:
        """``POST .../commit/main``: one JSON object per line."""
        for line in lines:
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                self.files[value["path"]] = self.objects[value["oid"]]
        return {"commitUrl": f"{self.url}/me/model/commit/{SHA}", "commitOid": SHA, "pullRequestUrl": None}

    def info(self) -> dict[str, Any]:
        """``GET /api/models/NAME``."""
        siblings = [{"rfilename": name, "size": len(content)} for name, content in self.files.items()]
        return {"id": "me/model", "_id": "1", "sha": SHA, "siblings": siblings, "private": False, "tags": []}

    def tree(self) -> list[dict[str, Any]]:
        """``GET /api/models/NAME/tree/main``."""
        return [
            {"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
            for name, content in self.files.items()
        ]


class Handler(BaseHTTPRequestHandler):
    """Routes requests to a ``Hub``."""

    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        """Quiet."""

    def _answer(self, code: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _json(self, value: object) -> None:
        self._answer(200, json.dumps(value).encode(), Content_Type="application/json")

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            content = b""
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return content
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_POST(self) -> None:
        """The calls that write."""
        body, path = self._body(), self.path.partition("?")[0]
        self.hub.tokens.add(self.headers.get("Authorization"))
        if path == "/api/repos/create":
            self._json(self.hub.create(json.loads(body)))
        elif "/preupload/" in path:
            self._json(self.hub.preupload(json.loads(body)))
        elif path.endswith("/info/lfs/objects/batch"):
            self._json(self.hub.batch(json.loads(body)))
        elif "/commit/" in path and not self.hub.broken:
            self._json(self.hub.commit(body.splitlines()))
        else:
            self._answer(403 if self.hub.broken else 404, b'{"error": "no"}')

    def do_PUT(self) -> None:
        """An object of the LFS store."""
        content = self._body()
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(content).hexdigest() == oid
        self.hub.objects[oid] = content
        self._answer(200)

    def do_GET(self) -> None:
        """The calls that read, HEAD as well."""
        path = self.path.partition("?")[0]
        self.hub.tokens.add(self.headers.get("Authorization"))
        if path.startswith("/me/model/resolve/"):
            name = path.split("/", 5)[5]
            content = self.hub.files.get(name)
            if content is None:
                self._answer(404, X_Error_Code="EntryNotFound")
            else:
                self._answer(200, content, ETag=f'"{hashlib.sha1(content).hexdigest()}"', X_Repo_Commit=SHA)
        elif "/tree/" in path:
            self._json(self.hub.tree())
        elif path.startswith("/api/models/me/model"):
            self._json(self.hub.info())
        else:
            self._answer(404, b'{"error": "no"}', X_Error_Code="RepoNotFound")

    do_HEAD = do_GET  # noqa: N815 - the name that http.server calls


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A fresh stand-in."""
    made = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OwnHandler", (Handler,), {"hub": made}))
    made.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield made
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def environment(hub: Hub, tmp_path: Path) -> dict[str, str]:
    """Variables that make huggingface_hub talk to the stand-in, with a cache of its own."""
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(tmp_path / "hf-home"),
        "HF_TOKEN": "hf_secret",
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "NO_PROXY": "*",
    }
