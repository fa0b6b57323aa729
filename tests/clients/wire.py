"""HTTP/1.1 and HTTP/2 by hand: what no client library would send."""
import contextlib
import json
import socket
import struct

TIMEOUT_S = 60
# Of Linux; Python has no name for it before 3.12.
IP_BIND_ADDRESS_NO_PORT = 24


def connect(port):
    return socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S)


# HTTP/2's preface with empty settings, and the answer to the server's.
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\x04\0\0\0\0\0"
ACKNOWLEDGED = b"\0\0\0\x04\x01\0\0\0\0"


def idle_client(server, protocol, is_used, number=0):
    """A connection that asks for nothing more: over HTTP it has had an answer if it `is_used`, over gRPC both sides have said how they speak HTTP/2.
    Its number says its own address, as each of these has some 28,000 ports."""
    client = socket.socket()
    client.settimeout(TIMEOUT_S)
    # The port is chosen when it connects: ports of connections to others do not count then.
    client.setsockopt(socket.IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, 1)
    client.bind((f"127.0.0.{2 + number // 20_000}", 0))
    client.connect(("127.0.0.1", server.grpc_port if protocol == "grpc" else server.http_port))
    if is_used and protocol == "grpc":
        client.sendall(PREFACE + ACKNOWLEDGED)
        assert client.recv(1 << 12), "the server says nothing"
    elif is_used:
        client.sendall(head("GET", "/v2/health/live"))
        assert client.recv(1 << 12).startswith(b"HTTP/1.1 200")
    return client


def head(method, path, *headers):
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *headers, "", ""]).encode()


def post(path, body, *headers):
    """A whole request; `body` is bytes or becomes JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return head("POST", path, f"Content-Length: {len(data)}", *headers) + data


def read_response(stream):
    """(status, headers, body) of the next answer on a socket's `makefile("rb")`; None if the connection ends before it."""
    line = stream.readline()
    if not line:
        return None
    status, headers = int(line.split()[1]), {}
    while (line := stream.readline().strip()):
        name, _, value = line.decode().partition(":")
        headers[name.lower()] = value.strip()
    body = stream.read(int(headers.get("content-length", 0)))
    return status, headers, body


def is_closed(connection):
    """Reads until the other side closes; False if that takes longer than the socket's timeout."""
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


class Http2:
    """A client of HTTP/2 that sends frames and minds the windows."""

    DATA, HEADERS, RST_STREAM, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8

    def __init__(self, port):
        self.socket = connect(port)
        self.buffer = b""
        self.window, self.initial, self.streams = 65_535, 65_535, {}
        self.ended, self.next_stream = False, 1
        # By stream: the (compressed) head of the first answer, or nothing where there is none.
        self.answers = {}
        self.socket.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + self.frame(self.SETTINGS, 0, 0))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()

    @staticmethod
    def frame(kind, flags, stream, payload=b""):
        return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload

    def open(self, path):
        """A gRPC call whose message is to follow; its stream."""
        stream, self.next_stream = self.next_stream, self.next_stream + 2
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost"),
                  ("content-type", "application/grpc"), ("te", "trailers")]
        block = b"".join(b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode() for name, value in fields)
        self.socket.sendall(self.frame(self.HEADERS, 4, stream, block))
        self.streams[stream] = self.initial
        return stream

    def read(self, wait_s):
        """Takes in what the server says; False if it says nothing for so long, or has ended."""
        self.socket.settimeout(wait_s)
        try:
            data = self.socket.recv(1 << 16)
        except TimeoutError:
            return False
        except OSError:
            data = b""
        finally:
            self.socket.settimeout(TIMEOUT_S)
        self.ended = not data
        self.buffer += data
        while len(self.buffer) >= 9 and len(self.buffer) >= (end := 9 + int.from_bytes(self.buffer[:3])):
            kind, flags, stream = self.buffer[3], self.buffer[4], int.from_bytes(self.buffer[5:9])
            payload, self.buffer = self.buffer[9:end], self.buffer[end:]
            self.handle(kind, flags, stream, payload)
        return bool(data)

    def handle(self, kind, flags, stream, payload):
        if kind == self.WINDOW_UPDATE:
            grown = int.from_bytes(payload)
            if stream == 0:
                self.window += grown
            elif stream in self.streams:
                self.streams[stream] += grown
        elif kind == self.SETTINGS and not flags & 1:
            for name, value in struct.iter_unpack(">HI", payload):
                if name == 4:
                    self.streams = {open_: window + value - self.initial for open_, window in self.streams.items()}
                    self.initial = value
            self.socket.sendall(self.frame(self.SETTINGS, 1, 0))
        elif kind in (self.HEADERS, self.RST_STREAM):
            self.answers.setdefault(stream, payload if kind == self.HEADERS else b"")
        elif kind == self.PING and not flags & 1:
            self.socket.sendall(self.frame(self.PING, 1, 0, payload))

    def send(self, stream, data, wait_s=2):
        """Sends on a stream until it is answered, as far as the server takes it within `wait_s` of silence; the bytes that went."""
        sent = 0
        with contextlib.suppress(OSError):
            while sent < len(data) and not self.ended and stream not in self.answers:
                room = min(16_384, self.window, self.streams[stream], len(data) - sent)
                if room <= 0:
                    if not self.read(wait_s):
                        break
                    continue
                self.socket.sendall(self.frame(self.DATA, 0, stream, data[sent:sent + room]))
                self.window -= room
                self.streams[stream] -= room
                sent += room
        return sent
