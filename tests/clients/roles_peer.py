"""A process of a cluster by hand: what no frontend, scheduler or backend would send.

Written from docs/protocol.md alone. Messages are bytes in postcard's form; this side decodes of a frame only the numbers
before its messages.
"""
import binascii
import contextlib
import hashlib
import hmac
import os
import socket
import struct
import threading
import time

PROTOCOL = 12
MAGIC = b"downbeat"
DIALLER = b"downbeat cluster: dialler\0"
TIMEOUT_S = 30
HEARTBEAT_S = 0.1

FRONTEND, BACKEND = b"\0", b"\2"
# Numbers of the messages.
QUEUE, REQUESTS, CANCEL, REFUSED, MODELS, LEADS, STANDING, TAKEN, MEET, PLAN, OFFER, ASSIGN, DELAYS, UNDER_WAY, COMPLETED, LEAVE, \
    LET_GO, CLAIM, INPUTS, RELEASE, ANSWERS, ORDER, ROLLOUT, ORDERED, ASK, TELL, TOLD, READY, STREAMED, ROOM = range(30)
MOST = (1 << 64) - 1


def number(value):
    """A number in postcard's form."""
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def text(value):
    data = value if isinstance(value, bytes) else value.encode()
    return number(len(data)) + data


def many(items):
    items = list(items)
    return number(len(items)) + b"".join(items)


def scheduler(rank):
    return b"\1" + number(rank)


def epoch(value, rank=0):
    return number(value) + number(rank)


def batch(of, value):
    """The name of a batch: its epoch, and its number in it."""
    return of + number(value)


def message(kind, *parts):
    return number(kind) + b"".join(parts)


def standing(of, leads=False):
    return message(STANDING, of, bytes([leads]))


def claim(of, backend, numbers):
    return message(CLAIM, of, number(backend), many(map(number, numbers)))


def read_number(data, at):
    value, shift = 0, 0
    while True:
        byte = data[at]
        value, at, shift = value | (byte & 0x7F) << shift, at + 1, shift + 7
        if byte < 0x80:
            return value, at


def opening(protocol=PROTOCOL, trust=1, nonce=None):
    return MAGIC + struct.pack("<H", protocol) + bytes([trust]) + (nonce or os.urandom(32))


def hello(role, node, name="stranger", address="", protocol=PROTOCOL):
    body = number(protocol) + number(node) + role + text(name) + text(address)
    return struct.pack("<H", len(body)) + body


def proof(secret, transcript, label=DIALLER):
    return hmac.new(secret.encode(), label + transcript, hashlib.sha256).digest()


def prefixed(head, checksum=None):
    """A frame as bytes: the length of its head, the checksum, the head."""
    return struct.pack("<II", len(head), binascii.crc32(head) if checksum is None else checksum) + head


def connect(address):
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=TIMEOUT_S)


def read_exactly(stream, count):
    data = b""
    while len(data) < count:
        piece = stream.recv(count - len(data))
        if not piece:
            raise ConnectionError(f"closed after {len(data)} of {count} bytes")
        data += piece
    return data


def greet(stream, role, node, secret, name="stranger", address=""):
    """Greets a listener with the cluster's secret. Raises ConnectionError if it is refused."""
    mine = opening(trust=1 if secret else 0)
    stream.sendall(mine)
    theirs = read_exactly(stream, len(mine))
    introduction = hello(role, node, name, address)
    transcript = mine + theirs + introduction
    stream.sendall(introduction + (proof(secret, transcript) if secret else b""))
    if read_exactly(stream, 1) != b"\1":
        raise ConnectionError("the listener's answer is 0")
    (length,) = struct.unpack("<H", read_exactly(stream, 2))
    read_exactly(stream, length + (32 if secret else 0))
    # Neither end reads the other's memory.
    stream.sendall(b"\0")
    read_exactly(stream, 1)


class Peer:
    """A connection to a process, with its link. Heartbeats go on until the peer is closed."""

    def __init__(self, address, role, secret=None, node=None, name="stranger", listens="", heartbeat_s=HEARTBEAT_S):
        self.heartbeat_s = heartbeat_s
        self.node = node or int.from_bytes(os.urandom(7), "little")
        self.stream = connect(address)
        self.theirs, self.come, self.said = 0, 0, 0
        self.is_up, self.is_closed = threading.Event(), threading.Event()
        self.lock, self.begin = threading.Lock(), time.monotonic_ns()
        greet(self.stream, role, self.node, secret, name, listens)
        for task in (self._read, self._beat):
            threading.Thread(target=task, daemon=True).start()
        deadline = time.monotonic() + TIMEOUT_S
        while not self.is_up.wait(0.02):
            if self.is_closed.is_set() or time.monotonic() > deadline:
                self.close()
                raise ConnectionError("the link never came up")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.is_closed.set()
        with contextlib.suppress(OSError):
            self.stream.shutdown(socket.SHUT_RDWR)
        self.stream.close()

    def head(self, messages, count=None, node=None):
        head = number(node or self.node) + number(1) + number(self.theirs) + number(self.said)
        head += number(len(messages) if count is None else count) + b"".join(messages)
        return head + number(self.come) + number(time.monotonic_ns() - self.begin) + b"\0"

    def _send(self, messages, **changes):
        with self.lock, contextlib.suppress(OSError):
            self.stream.sendall(prefixed(self.head(messages, **changes)))
            self.said += len(messages)

    def say(self, *messages, **changes):
        """Sends messages, at most 100 in a frame. `changes` make the frame wrong."""
        for begin in range(0, len(messages), 100):
            self._send(messages[begin:begin + 100], **changes)

    def raw(self, data):
        with self.lock, contextlib.suppress(OSError):
            self.stream.sendall(data)

    def _beat(self):
        self._send([])
        while not self.is_closed.wait(self.heartbeat_s):
            self._send([])

    def _read(self):
        with contextlib.suppress(OSError, ConnectionError, IndexError):
            while True:
                length, _ = struct.unpack("<II", read_exactly(self.stream, 8))
                self._hear(read_exactly(self.stream, length))
        self.is_closed.set()

    def _hear(self, head):
        _, at = read_number(head, 0)
        theirs, at = read_number(head, at)
        of, at = read_number(head, at)
        first, at = read_number(head, at)
        count, at = read_number(head, at)
        self.theirs = theirs
        if of != 1:
            return self._send([])
        if count and first <= self.come:
            self.come = max(self.come, first + count)
        if not self.is_up.is_set():
            self.is_up.set()
            self._send([])

    def closed_within(self, seconds=TIMEOUT_S):
        """Whether the process ends the connection."""
        return self.is_closed.wait(seconds)
