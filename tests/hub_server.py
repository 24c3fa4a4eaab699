"""A local HTTP server on 127.0.0.1 with the API of the Hugging Face Hub.

It serves folders as repositories, accepts uploads without Xet, and can simulate failures.
"""

import base64
import hashlib
import json
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import close_session, constants

MAIN_COMMIT = "c0ffee" + "0" * 34
STORED_AS_LFS = {".safetensors", ".bin", ".parquet", ".onnx"}


@dataclass
class Failures:
    """Simulated failures, by default none.

    Args:
        gated: Repositories whose terms the user has not accepted.
        read_only: Repositories that no token can create.
        down: Whether every request gets status 503.
        delay_seconds: Time before each response.
        cut_after_bytes: For each file name, the bytes after which the transfer is interrupted.
    """

    gated: set[str] = field(default_factory=set)
    read_only: set[str] = field(default_factory=set)
    down: bool = False
    delay_seconds: float = 0.0
    cut_after_bytes: dict[str, int] = field(default_factory=dict)


class HubServer:
    """Serve folders as model and dataset repositories while the context is open.

    Any commit hash is accepted as the commit of the folder. ``main`` is ``MAIN_COMMIT``. Other
    revisions exist if there is a folder for ``id@revision``.

    Args:
        models: Folder of each model repository, by its id.
        datasets: Folder of each dataset repository, by its id.
        uploads: The folder in which new model repositories are created.
    """

    def __init__(
        self,
        models: dict[str, Path] | None = None,
        datasets: dict[str, Path] | None = None,
        *,
        uploads: Path | None = None,
    ) -> None:
        self.uploads = uploads
        self.private: set[str] = set()
        self.messages: list[str] = []  # of commits
        self.large_files: dict[str, bytes] = {}  # uploaded, by sha256
        self.folders = {"models": models or {}, "datasets": datasets or {}}
        self.failures = Failures()
        self.requests: list[tuple[str, str]] = []
        self.closing = threading.Event()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.hub = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    @property
    def endpoint(self) -> str:
        """The URL for ``HF_ENDPOINT``."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def downloads(self) -> list[str]:
        """Return the names of the downloaded files, in the order of the requests."""
        return [
            Path(path).name
            for method, path in self.requests
            if method == "GET" and "/resolve/" in path
        ]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def hub_client(
    *, endpoint: str, home: Path, offline: bool = False, timeout_seconds: float = 60
) -> Iterator[None]:
    """Point the ``huggingface_hub`` of this process at a server and an empty cache.

    The library reads its environment variables on import and stores them in these constants. Child
    processes can use the environment variables.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        patch.setattr(constants, "HF_ASSETS_CACHE", str(home / "assets"))
        patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        patch.setattr(constants, "HF_HUB_OFFLINE", offline)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", timeout_seconds)
        patch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", timeout_seconds)
        patch.delenv("HF_TOKEN", raising=False)
        yield
        close_session()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    hub: HubServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect, for instance after a timeout."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        self._handle()

    do_HEAD = do_POST = do_PUT = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Suppress the access log."""

    def _handle(self) -> None:
        hub = self.server.hub
        path = unquote(urlsplit(self.path).path)
        hub.requests.append((self.command, path))
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if hub.closing.wait(hub.failures.delay_seconds):
            self.close_connection = True
        elif hub.failures.down:
            self._reject(503)
        elif self.command in ("POST", "PUT"):
            self._receive(path, body)
        elif match := re.fullmatch(
            r"/api/(models|datasets)/(.+?)/tree/(refs/[^/]+/[^/]+|[^/]+)(/.+)?", path
        ):
            self._list_files(*match.groups())
        elif match := re.fullmatch(r"/api/(models|datasets)/(.+?)(?:/revision/(.+))?", path):
            self._describe_repository(*match.groups())
        elif match := re.fullmatch(
            r"/(datasets/)?(.+?)/resolve/(refs/[^/]+/[^/]+|[^/]+)/(.+)", path
        ):
            kind, repository, revision, name = match.groups()
            self._send_file("datasets" if kind else "models", repository, revision, name)
        else:
            self._reject(404)

    def _receive(self, path: str, body: bytes) -> None:
        """Receive a part of an upload."""
        hub = self.server.hub
        if stored := re.fullmatch("/large/([0-9a-f]{64})", path):
            hub.large_files[stored[1]] = body
            self._send_json({})
            return
        lines = [json.loads(line) for line in body.splitlines()]
        if path in ("/api/validate-yaml", "/verify"):
            self._send_json({"errors": [], "warnings": []})
        elif path == "/api/repos/create":
            self._create(**lines[0])
        elif path.endswith(".git/info/lfs/objects/batch"):
            self._send_json({"objects": list(map(self._place, lines[0]["objects"]))})
        elif "/preupload/" in path:
            self._send_json({"files": [_upload_mode(file["path"]) for file in lines[0]["files"]]})
        elif match := re.fullmatch(r"/api/models/(.+)/branch/(.+)", path):
            own = hub.folders["models"][match[1]]
            branch = own.with_name(f"{own.name}@{match[2]}")
            hub.folders["models"]["@".join(match.groups())] = shutil.copytree(own, branch)
            self._send_json({})
        elif match := re.fullmatch(r"/api/models/(.+)/commit/(.+)", path):
            self._commit("@".join(match.groups()).removesuffix("@main"), lines)

    def _create(self, *, organization: str, name: str, visibility: str, **_: Any) -> None:
        hub, full_name = self.server.hub, f"{organization}/{name}"
        if full_name in hub.failures.read_only:
            self._reject(403, headers={"X-Error-Message": "You don't have the rights"})
            return
        assert hub.uploads is not None
        hub.folders["models"][full_name] = hub.uploads / full_name
        (hub.uploads / full_name).mkdir(parents=True)
        if visibility == "private":
            hub.private.add(full_name)
        self._send_json({"url": f"{hub.endpoint}/{full_name}"})

    def _place(self, file: dict[str, Any]) -> dict[str, Any]:
        """Return the upload URL of a large file, unless the server already has the file."""
        hub = self.server.hub
        if file["oid"] in hub.large_files:
            return file
        upload = {"href": f"{hub.endpoint}/large/{file['oid']}?X-Amz-Signature=secret"}
        return file | {"actions": {"upload": upload, "verify": {"href": f"{hub.endpoint}/verify"}}}

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        hub = self.server.hub
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                hub.messages.append(value["summary"])
                continue
            is_large = line["key"] == "lfsFile"
            content = (
                hub.large_files[value["oid"]] if is_large else base64.b64decode(value["content"])
            )
            (hub.folders["models"][name] / value["path"]).write_bytes(content)
        self._send_json({"commitUrl": f"{hub.endpoint}/{name}", "commitOid": MAIN_COMMIT})

    def _describe_repository(self, kind: str, repository: str, revision: str | None) -> None:
        folder, commit = self._open(kind, repository, revision or "main")
        if folder is not None:
            siblings = [{"rfilename": file["path"]} for file in _files_in(folder)]
            is_private = repository in self.server.hub.private
            self._send_json(
                {"id": repository, "sha": commit, "private": is_private, "siblings": siblings}
            )

    def _list_files(self, kind: str, repository: str, revision: str, under: str | None) -> None:
        folder, _ = self._open(kind, repository, revision)
        if folder is not None and under:
            self._reject(404, code="EntryNotFound")
        elif folder is not None:
            self._send_json(_files_in(folder))

    def _send_file(self, kind: str, repository: str, revision: str, name: str) -> None:
        folder, commit = self._open(kind, repository, revision)
        if folder is None:
            return
        path = folder / name
        if not path.is_file():
            self._reject(404, code="EntryNotFound", headers={"X-Repo-Commit": commit})
            return
        body = path.read_bytes()
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if path.suffix in STORED_AS_LFS:
            headers["X-Linked-Etag"] = f'"{hashlib.sha256(body).hexdigest()}"'
            headers["X-Linked-Size"] = str(len(body))
        git_object = b"blob %d\0%b" % (len(body), body)
        headers["ETag"] = f'"{hashlib.sha1(git_object).hexdigest()}"'
        # A client that resumes a download asks for bytes=100-.
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")[0])
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
        self._start(206 if start else 200, length=len(body) - start, headers=headers)
        if self.command == "GET":
            end = self.server.hub.failures.cut_after_bytes.get(path.name, len(body))
            self.wfile.write(body[start:end])
            self.close_connection = end < len(body)

    def _send_json(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self._start(200, length=len(body), headers={"Content-Type": "application/json"})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _open(self, kind: str, repository: str, revision: str) -> tuple[Path | None, str]:
        """Return the folder and commit of a repository, or reject the request as the Hub does."""
        hub = self.server.hub
        has_token = "Authorization" in self.headers
        commit = MAIN_COMMIT if revision == "main" else revision
        folder = hub.folders[kind].get(repository)
        for name, other_folder in hub.folders[kind].items():
            own, _, own_revision = name.partition("@")
            own_commit = hashlib.sha1(own_revision.encode()).hexdigest()
            if own == repository and own_revision and revision in (own_revision, own_commit):
                folder, commit = other_folder, own_commit
        if folder is None:
            self._reject(404 if has_token else 401, code="RepoNotFound")
        elif repository in hub.failures.gated:
            self._reject(403 if has_token else 401, code="GatedRepo")
            folder = None
        elif not re.fullmatch("[0-9a-f]{40}", commit):
            self._reject(404, code="RevisionNotFound")
            folder = None
        return folder, commit

    def _reject(
        self, status: int, *, code: str | None = None, headers: dict[str, str] | None = None
    ) -> None:
        self._start(
            status, length=0, headers=(headers or {}) | ({"X-Error-Code": code} if code else {})
        )

    def _start(self, status: int, *, length: int, headers: dict[str, str]) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()


def _upload_mode(path: str) -> dict[str, Any]:
    mode = "lfs" if Path(path).suffix in STORED_AS_LFS else "regular"
    return {"path": path, "uploadMode": mode, "shouldIgnore": False}


def _files_in(folder: Path) -> list[dict[str, Any]]:
    return [
        {"type": "file", "path": name, "size": (folder / name).stat().st_size, "oid": ""}
        for name in sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
        if (folder / name).is_file()
    ]
