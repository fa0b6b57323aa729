"""Stand-ins of the places that models come from: Hugging Face's hub, and S3."""
import contextlib
import hashlib
import http.server
import json
import threading
import urllib.parse

from moto.server import ThreadedMotoServer


class Hub:
    """A hub with one repository. `files` are those of its only commit, by their path. Files come from another host, by a redirect,
    as they do from the real hub. `broken` downloads end in the middle. Speaks as much as our server and `snapshot_download` ask for."""

    def __init__(self, repository="org/net", files=None):
        self.repository, self.files, self.broken, self.is_up, self.requests = repository, files or {}, 0, True, []
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                hub.requests.append((self.path, {name.lower(): value for name, value in self.headers.items()}))
                hub.answer(self)

            do_HEAD = do_GET

            def log_message(self, *_):
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def commit(self):
        return hashlib.sha1(b"".join(name.encode() + content for name, content in sorted(self.files.items()))).hexdigest()

    def answer(self, request):
        path = urllib.parse.urlsplit(request.path).path
        api = f"/api/models/{self.repository}"
        name = path.split(f"/resolve/{self.commit}/")[-1]
        if not self.is_up:
            return self.send(request, 503, b"")
        if path.startswith(f"{api}/revision/"):
            siblings = [{"rfilename": name, "size": len(content), "lfs": lfs(content)} for name, content in self.files.items()]
            return self.send_json(request, {"id": self.repository, "sha": self.commit, "siblings": siblings})
        if path.startswith(f"{api}/tree/"):
            return self.send_json(request, [{"type": "file", "path": name, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}
                                            for name, content in self.files.items()])
        if path.startswith(f"/{self.repository}/resolve/"):
            about = {}
            if name in self.files:
                content = self.files[name]
                about = {"X-Repo-Commit": self.commit, "X-Linked-Etag": f'"{sha256(content)}"', "X-Linked-Size": str(len(content))}
            return self.send(request, 302, b"", Location=f"http://localhost:{self.port}/cdn{path}", **about)
        if not path.startswith("/cdn/") or name not in self.files:
            return self.send(request, 404, b"", **{"X-Error-Code": "RepoNotFound"})
        content = self.files[name]
        start = int(request.headers.get("Range", "bytes=0-")[len("bytes="):-1])
        headers = {"Content-Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if start else {}
        return self.send(request, 206 if start else 200, content[start:], **headers)

    def send_json(self, request, body):
        self.send(request, 200, json.dumps(body).encode(), **{"Content-Type": "application/json"})

    def send(self, request, status, body, **headers):
        request.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            request.send_header(name, value)
        request.end_headers()
        if request.command == "HEAD":
            return
        if self.broken and request.path.startswith("/cdn/"):
            self.broken -= 1
            request.wfile.write(body[:len(body) // 2])
            request.close_connection = True
        else:
            request.wfile.write(body)

    def downloads(self):
        return [headers.get("range") for path, headers in self.requests if path.startswith("/cdn/")]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


def sha256(content):
    return hashlib.sha256(content).hexdigest()


def lfs(content):
    """What the hub says of a file that git-lfs keeps. The pointer is the file of some 130 bytes that git has in its place."""
    return {"size": len(content), "sha256": sha256(content), "pointerSize": 134}


@contextlib.contextmanager
def s3():
    """A local S3. Gives its address."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()
