"""A small server of the Hugging Face Hub's API: enough for the real client to up- and download."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

Files = dict[str, bytes]


class FakeHub:
    """Repositories in memory: name -> revision -> files. Every commit has a number as its hash."""

    def __init__(self) -> None:
        self.repos: dict[str, dict[str, Files]] = {}
        self.gated: set[str] = set()
        self.private: dict[str, bool] = {}
        self.large: Files = {}  # by their SHA-256
        self.requests: list[str] = []
        self.url = ""

    def commit(self, repo: str, files: Files, revision: str = "main") -> str:
        """Add files to a revision. Returns the hash of the commit."""
        revisions = self.repos.setdefault(repo, {})
        content = revisions.get(revision, {}) | files
        digest = hashlib.sha1(repr(sorted(content.items())).encode()).hexdigest()
        revisions[revision] = revisions[digest] = content
        return digest

    def sha(self, repo: str, revision: str) -> str:
        content = self.repos[repo][revision]
        return hashlib.sha1(repr(sorted(content.items())).encode()).hexdigest()


class _Refused(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def reply(self, body: bytes, status: int = 200, **headers: str) -> None:
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key.replace("_", "-"), value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def json(self, value: object) -> None:
            self.reply(json.dumps(value).encode(), Content_Type="application/json")

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            path = unquote(urlsplit(self.path).path)
            hub.requests.append(f"{self.command} {path}")
            parts = path.strip("/").split("/")
            try:
                if parts[0] == "api":
                    self.api(parts[1:], body)
                elif parts[0] == "large":
                    hub.large[parts[1]] = body
                    self.reply(b"")
                elif path.endswith("/info/lfs/objects/batch"):
                    self.batch(json.loads(body))
                elif len(parts) > 3 and parts[2] == "resolve":
                    self.resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
                else:
                    raise _Refused(404, "NotFound")
            except _Refused as error:
                self.reply(b"{}", error.status, X_Error_Code=error.code)

        do_GET = do_HEAD = do_POST = do_PUT = handle_any

        def files(self, repo: str, revision: str) -> Files:
            if repo in hub.gated:
                raise _Refused(403, "GatedRepo")
            if repo not in hub.repos:
                raise _Refused(404, "RepoNotFound")
            if revision not in hub.repos[repo]:
                raise _Refused(404, "RevisionNotFound")
            return hub.repos[repo][revision]

        def resolve(self, repo: str, revision: str, name: str) -> None:
            files = self.files(repo, revision)
            if name not in files:
                raise _Refused(404, "EntryNotFound")
            etag = hashlib.sha1(files[name]).hexdigest()
            sha = hub.sha(repo, revision)
            self.reply(files[name], ETag=f'"{etag}"', X_Repo_Commit=sha)

        def api(self, parts: list[str], body: bytes) -> None:
            if parts == ["repos", "create"]:
                given = json.loads(body)
                repo = f"{given['organization']}/{given['name']}"
                if repo in hub.repos:
                    return self.reply(json.dumps({"url": f"{hub.url}/{repo}"}).encode(), 409)
                hub.commit(repo, {})
                hub.private[repo] = given.get("visibility") == "private" or bool(
                    given.get("private")
                )
                return self.json({"url": f"{hub.url}/{repo}"})
            if parts == ["validate-yaml"]:
                return self.json({"errors": [], "warnings": []})
            if parts[0] != "models" or len(parts) < 5:
                raise _Refused(404, "NotFound")
            repo, action, revision = "/".join(parts[1:3]), parts[3], "/".join(parts[4:])
            if action == "branch":
                hub.repos[repo][revision] = dict(hub.repos[repo]["main"])
                return self.json({})
            files = self.files(repo, revision)
            if action == "revision":
                names = [{"rfilename": name} for name in files]
                return self.json(
                    {"id": repo, "modelId": repo, "sha": hub.sha(repo, revision), "siblings": names}
                )
            if action == "tree":
                return self.json(
                    [
                        {"type": "file", "path": name, "size": len(content)}
                        | {"oid": hashlib.sha1(content).hexdigest()}
                        for name, content in files.items()
                    ]
                )
            if action == "preupload":
                return self.json({"files": [self.mode(f) for f in json.loads(body)["files"]]})
            if action == "commit":
                return self.commit(repo, revision, body)
            raise _Refused(404, "NotFound")

        def mode(self, file: dict[str, str]) -> dict[str, object]:
            mode = "lfs" if file["path"].endswith(".safetensors") else "regular"
            return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None}

        def batch(self, body: dict[str, list[dict[str, object]]]) -> None:
            objects = [
                {**item, "actions": {"upload": {"href": f"{hub.url}/large/{item['oid']}"}}}
                for item in body["objects"]
            ]
            self.json({"transfer": "basic", "objects": objects})

        def commit(self, repo: str, revision: str, body: bytes) -> None:
            new: Files = {}
            for line in body.decode().splitlines():
                item = json.loads(line)
                value = item["value"]
                if item["key"] == "file":
                    new[value["path"]] = base64.b64decode(value["content"])
                elif item["key"] == "lfsFile":
                    new[value["path"]] = hub.large[value["oid"]]
            if "create_pr=1" in urlsplit(self.path).query:
                revision = "refs/pr/1"
                hub.repos[repo][revision] = dict(hub.repos[repo]["main"])
            sha = hub.commit(repo, new, revision)
            found = {"commitOid": sha, "commitUrl": f"{hub.url}/{repo}/commit/{sha}"}
            if revision == "refs/pr/1":
                found["pullRequestUrl"] = f"{hub.url}/{repo}/discussions/1"
            self.json({"success": True, "hookOutput": "", **found})

    return Handler


@contextmanager
def running() -> Iterator[FakeHub]:
    """A server on a free port of this machine."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(hub))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
