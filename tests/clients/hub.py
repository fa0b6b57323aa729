"""A stand-in of Hugging Face's hub: as much of its protocol as `snapshot_download` asks for."""
import contextlib
import hashlib
import http.server
import json
import threading


@contextlib.contextmanager
def hub(repository, files):
    """Serves `files`, {path: bytes}, as the only repository. Its address is given."""
    commit = hashlib.sha1(repository.encode()).hexdigest()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, body, status=200, **headers):
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

        def do_GET(self):
            path = self.path.partition("?")[0]
            prefix = f"/{repository}/resolve/{commit}/"
            if path.startswith(f"/api/models/{repository}/tree/"):
                rows = [{"type": "file", "path": name, "size": len(body), "oid": hashlib.sha1(body).hexdigest()} for name, body in files.items()]
                self.answer(json.dumps(rows).encode(), **{"Content-Type": "application/json"})
            elif path.startswith(f"/api/models/{repository}/revision/"):
                about = {"id": repository, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
                self.answer(json.dumps(about).encode(), **{"Content-Type": "application/json"})
            elif path.startswith(prefix) and path.removeprefix(prefix) in files:
                body = files[path.removeprefix(prefix)]
                self.answer(body, **{"ETag": f'"{hashlib.sha1(body).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"})
            else:
                self.answer(b'{"error": "not found"}', 404, **{"X-Error-Code": "RepoNotFound"})

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
