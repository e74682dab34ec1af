"""A scripted upstream: an OpenAI-like server under the test's control, byte by byte. It counts what it was asked.

What it does with a request is a function `behaviour(call, reply)`, chosen by path (`at`), by the body's model (`on`), else by
the body's `stream` flag. Each call remembers its request and the events that it sent.
"""
import functools
import hashlib
import json
import socket
import ssl
import struct
import threading
import time
from dataclasses import dataclass, field

BODY_KEPT_MAX_BYTES = 64 << 20
GATE_SECONDS = 60


@dataclass
class Call:
    number: int
    method: str
    target: str
    headers: list  # of (name as sent, value)
    body: bytes = b""
    length: int = 0
    sha256: str = ""
    complete: bool = True  # the whole body arrived
    events: list = field(default_factory=list)
    client_left: bool = False

    @property
    def path(self):
        return self.target.split("?")[0]

    @functools.cached_property
    def json(self):
        """The body, parsed; {} if it is no JSON object."""
        try:
            value = json.loads(self.body)
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}

    @property
    def model(self):
        return self.json.get("model")

    def header(self, name):
        return next((v for n, v in self.headers if n.lower() == name.lower()), None)

    def all(self, name):
        return [v for n, v in self.headers if n.lower() == name.lower()]

    @property
    def sent(self):
        return b"".join(self.events)

    @property
    def visible(self):
        """The stream as its client must see it when it did not ask for usage."""
        return b"".join(e for e in self.events if b'"choices": [], "usage"' not in e)


class Gone(Exception):
    """The peer closed while we were sending."""


class Reply:
    def __init__(self, connection, call):
        self.connection = connection
        self.call = call
        self.keep = True

    def bytes(self, data):
        try:
            self.connection.sendall(data)
        except OSError as error:
            self.call.client_left = True
            raise Gone from error

    def head(self, status, headers=()):
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
        self.bytes(f"HTTP/1.1 {status} Whatever\r\n{lines}\r\n".encode("latin-1"))

    def answer(self, status, body, content_type="application/json", headers=()):
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
        head = f"HTTP/1.1 {status} Whatever\r\nContent-Type: {content_type}\r\nContent-Length: {len(body)}\r\n{lines}\r\n"
        self.bytes(head.encode("latin-1") + (b"" if self.call.method == "HEAD" else body))

    def json(self, status, value, headers=()):
        self.answer(status, json.dumps(value).encode(), headers=headers)

    def start(self, headers=(), status=200):
        self.head(status, [("Content-Type", "text/event-stream"), ("Transfer-Encoding", "chunked"), *headers])

    def chunk(self, data):
        self.bytes(b"%x\r\n" % len(data) + data + b"\r\n")

    def event(self, data):
        """One SSE event in one chunk; `data` is bytes as they are, or an object for a data line."""
        if not isinstance(data, bytes):
            data = b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"
        self.call.events.append(data)
        self.chunk(data)

    def end(self):
        self.bytes(b"0\r\n\r\n")

    def close(self):
        """Ends the connection in order (FIN), however far the answer has got."""
        self.keep = False
        try:
            self.connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass

    def reset(self):
        """Ends the connection with RST."""
        self.keep = False
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()

    def peer_left(self):
        """True once the peer has closed its side; never waits."""
        try:
            self.connection.settimeout(0)
            return self.connection.recv(1, socket.MSG_PEEK) == b""
        except (BlockingIOError, ssl.SSLWantReadError):
            return False
        except OSError:
            return True
        finally:
            self.connection.settimeout(None)


class Gate:
    """Holds behaviours until the test opens it."""

    def __init__(self):
        self._open = threading.Event()
        self._entered = threading.Semaphore(0)

    def open(self):
        self._open.set()

    @property
    def opened(self):
        return self._open.is_set()

    def wait(self):
        self._entered.release()
        if not self._open.wait(GATE_SECONDS):
            raise AssertionError("a gate of the upstream was never opened")

    def wait_until_entered(self, seconds=15):
        assert self._entered.acquire(timeout=seconds), "the upstream was not called in time"


# ---- behaviours ----------------------------------------------------------------------------------------------------------------

def completion(call, content=None, prompt_tokens=11, completion_tokens=7):
    return {"id": f"chatcmpl-{call.number}", "object": "chat.completion", "created": 1, "model": call.model,
            "choices": [{"index": 0, "finish_reason": "stop",
                         "message": {"role": "assistant", "content": content or f"answer of call {call.number} é中🙂"}}],
            "usage": {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens,
                      "total_tokens": prompt_tokens + completion_tokens}}


def delta(call, text, finish=None, role=None):
    d = {"content": text} if text is not None else {}
    if role:
        d["role"] = role
    return {"id": f"chatcmpl-{call.number}", "object": "chat.completion.chunk", "created": 1, "model": call.model,
            "choices": [{"index": 0, "delta": d, "finish_reason": finish}]}


def usage_chunk(call, completion_tokens):
    return {"id": f"chatcmpl-{call.number}", "object": "chat.completion.chunk", "created": 1, "model": call.model,
            "choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": completion_tokens,
                                     "total_tokens": 11 + completion_tokens}}


DONE = b"data: [DONE]\n\n"


def plain(content=None, headers=(), delay=0.0, gate=None, status=200):
    def run(call, reply):
        if gate:
            gate.wait()
        time.sleep(delay)
        reply.json(status, completion(call, content), headers)
    return run


def error(status, headers=(), gate=None, delay=0.0, message="the upstream says no"):
    def run(call, reply):
        if gate:
            gate.wait()
        time.sleep(delay)
        reply.json(status, {"error": {"message": message, "type": "upstream_error", "param": None, "code": None}}, headers)
    return run


def finish_stream(call, reply, tokens):
    reply.event(delta(call, None, finish="stop"))
    if (call.json.get("stream_options") or {}).get("include_usage"):
        reply.event(usage_chunk(call, tokens))
    reply.event(DONE)
    reply.end()


def stream(events=5, gap=0.0, gate=None, gate_after=0, headers=(), pad=""):
    """`events` pieces of text, then a proper end. The gate is waited for after `gate_after` events."""
    def run(call, reply):
        reply.start(headers)
        for i in range(events):
            if gate and i == gate_after:
                gate.wait()
            reply.event(delta(call, f"call{call.number} w{i} é中🙂 {pad}", role="assistant" if i == 0 else None))
            if gap:
                time.sleep(gap)
        if gate and gate_after >= events:
            gate.wait()
        finish_stream(call, reply, events)
    return run


def raw_stream(pieces, headers=()):
    """Exactly these bytes as body, each piece in a chunk of its own, then a clean end of the chunked body."""
    def run(call, reply):
        reply.start(headers)
        for piece in pieces:
            call.events.append(piece)
            reply.chunk(piece)
        reply.end()
    return run


def broken_stream(events, how):
    """A stream that does not end as it should: cut | reset | error_event | error_event_clean | no_terminator | half_event."""
    def run(call, reply):
        reply.start()
        for i in range(events):
            reply.event(delta(call, f"call{call.number} w{i} "))
        if how == "cut":
            reply.close()
        elif how == "reset":
            time.sleep(0.05)
            reply.reset()
        elif how == "error_event":
            reply.event(b'event: error\ndata: {"error":{"message":"overloaded","type":"overloaded_error"}}\n\n')
            reply.end()
        elif how == "error_data":
            reply.event({"error": {"message": "overloaded", "type": "overloaded_error"}})
            reply.end()
        elif how == "no_terminator":
            reply.end()
        elif how == "half_event":
            reply.event(b'data: {"choices":[{"del')
            reply.end()
        else:
            raise AssertionError(how)
    return run


def in_turn(*behaviours):
    """The first call gets the first behaviour, and so on; the last one stays."""
    state = {"next": 0}
    lock = threading.Lock()

    def run(call, reply):
        with lock:
            i = min(state["next"], len(behaviours) - 1)
            state["next"] += 1
        behaviours[i](call, reply)
    return run


def default_behaviour(call, reply):
    if call.method != "POST":
        reply.json(200, {"object": "list", "data": [{"id": "gpt-4o-mini", "object": "model"}]})
    elif call.json.get("stream"):
        stream()(call, reply)
    else:
        plain()(call, reply)


# ---- the server ----------------------------------------------------------------------------------------------------------------

class Upstream:
    def __init__(self, tls=None, keep_alive=True):
        """`tls`: a (certificate, key) pair of files; then it speaks HTTPS."""
        self.calls = []
        self.connections = 0
        self.keep_alive = keep_alive
        self._by_model = {}
        self._by_path = {}
        self._lock = threading.Lock()
        self._tls = None
        if tls:
            self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            self._tls.load_cert_chain(*tls)
        self.default = default_behaviour
        self.port = 0
        self.open()
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}"

    def open(self):
        """On the port that it had before close(), if it had one."""
        self._listener = socket.create_server(("127.0.0.1", self.port), backlog=1024)
        self.port = self._listener.getsockname()[1]
        self._closing = False
        threading.Thread(target=self._accept, daemon=True).start()

    def on(self, model, behaviour):
        self._by_model[model] = behaviour

    def at(self, path, behaviour):
        self._by_path[path] = behaviour

    def paid(self, containing=None, model=None):
        """The POSTs seen so far, in order; with `containing` only those whose body holds that text."""
        with self._lock:
            calls = list(self.calls)
        needle = None if containing is None else containing.encode()
        return [c for c in calls if c.method == "POST" and (needle is None or needle in c.body)
                and (model is None or c.model == model)]

    def close(self):
        self._closing = True
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._listener.close()

    def _accept(self):
        while not self._closing:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self.connections += 1
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls:
                connection = self._tls.wrap_socket(connection, server_side=True)
            with connection, connection.makefile("rb", buffering=1 << 16) as source:
                while self._one(connection, source):
                    pass
        except (OSError, Gone, ValueError):
            return

    def _one(self, connection, source):
        line = source.readline(1 << 16)
        if not line.strip():
            return False
        method, target, _ = line.decode("latin-1").split(" ", 2)
        headers = []
        while (line := source.readline(1 << 16)) not in (b"\r\n", b"\n", b""):
            name, _, value = line.decode("latin-1").partition(":")
            headers.append((name, value.strip()))
        call = Call(0, method, target, headers)
        if (call.header("expect") or "").lower() == "100-continue":
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._read_body(call, source)
        with self._lock:
            self.calls.append(call)
            call.number = len(self.calls)
        reply = Reply(connection, call)
        behaviour = self._by_path.get(call.path) or self._by_model.get(call.model) or self.default
        behaviour(call, reply)
        if not self.keep_alive and reply.keep:
            reply.close()
        return reply.keep

    def _read_body(self, call, source):
        digest = hashlib.sha256()
        kept = []

        def take(n):
            while n > 0:
                piece = source.read1(min(n, 1 << 20))
                if not piece:
                    call.complete = False
                    return False
                n -= len(piece)
                call.length += len(piece)
                digest.update(piece)
                if call.length <= BODY_KEPT_MAX_BYTES:
                    kept.append(piece)
            return True

        if "chunked" in (call.header("transfer-encoding") or "").lower():
            while True:
                size = source.readline(1 << 10)
                if not size:
                    call.complete = False
                    break
                size = int(size.split(b";")[0], 16)
                if size == 0:
                    while source.readline(1 << 16) not in (b"\r\n", b"\n", b""):
                        pass
                    break
                if not take(size):
                    break
                source.readline()
        else:
            take(int(call.header("content-length") or 0))
        call.body = b"".join(kept)
        call.sha256 = digest.hexdigest()
