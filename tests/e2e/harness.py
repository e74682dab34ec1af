"""A gateway under test as a process, and an HTTP client that sees every byte.

Nothing here knows the product's sources: it starts the binary, talks to its sockets, reads its files.
"""
import json
import os
import pathlib
import random
import re
import signal
import socket
import struct
import subprocess
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass

ROOT = pathlib.Path(__file__).resolve().parents[2]
BINARY = pathlib.Path(os.environ.get("SEMEL_BIN", ROOT / "build/release/semel"))
CREDENTIAL = "Bearer sk-test-credential"
START_SECONDS = 20
SHORT_LEASE = "2500ms"
SHORT = {"lease": SHORT_LEASE, "retention": {"completed": "3s", "failed": "3s"}}  # for tests that outlive a record


_ports_given = set()


def free_port():
    """A port that nobody listens on and that these tests have not given before: each of pytest's workers has its own. Below the range
    from which the system takes ports by itself (32768 on), so that neither port 0 nor an outgoing connection can take it meanwhile."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    while True:
        port = random.randrange(10_000 + worker, 32_000, workers)
        if port in _ports_given:
            continue
        _ports_given.add(port)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:  # taken
            continue


BUSY = 90  # seconds that anything may take where other tests and compilers run beside it


def eventually(condition, seconds=15, what=""):
    """Waits until `condition()` is true and returns its value; fails after `seconds`, or BUSY if that is more: late is not wrong."""
    seconds = max(seconds, BUSY)
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise AssertionError(f"did not become true within {seconds} s: {what or condition}")
        time.sleep(0.02)


def background(function, *args, **kwargs):
    """Runs it on a thread; `.result(seconds)` gives its value or raises what it raised."""
    future = Future()

    def run():
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as problem:  # the caller's to judge
            future.set_exception(problem)
    threading.Thread(target=run, daemon=True).start()
    return future


def together(count, function):
    """Calls function(i) from `count` threads released at the same moment; exceptions are raised."""
    barrier = threading.Barrier(count)

    def run(i):
        barrier.wait(60)
        return function(i)
    return [f.result(120) for f in [background(run, i) for i in range(count)]]


# ---- client --------------------------------------------------------------------------------------------------------------------

@dataclass
class Answer:
    status: int
    headers: dict  # lower-case names; the last line of a name wins
    body: bytes
    whole: bool    # the framing said that this was all
    head: bytes = b""

    @property
    def json(self):
        return json.loads(self.body)

    @property
    def replayed(self):
        return self.headers.get("x-idempotent-replayed")

    @property
    def outcome(self):
        return self.headers.get("semel-outcome")

    @property
    def attempt(self):
        return int(self.headers["semel-attempt"])

    @property
    def code(self):
        """The slug of an error, whatever its shape: `key_reused` and `…/problems/key-reused` are both key-reused."""
        value = self.json
        if isinstance(value.get("error"), dict):
            return str(value["error"].get("code")).replace("_", "-")
        return str(value.get("type", "")).rsplit("/", 1)[-1]

    def __repr__(self):
        return f"<{self.status} whole={self.whole} {self.headers} {self.body[:300]!r}>"


class Lost(Exception):
    """The connection ended before a whole head was there."""


class Exchange:
    """One request on one connection; the answer can be read bit by bit."""

    def __init__(self, port, method="GET", path="/", body=None, headers=None, timeout=60, raw=None, host="127.0.0.1",
                 receive_buffer=None):
        self.socket = socket.socket()
        if receive_buffer:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.socket.settimeout(timeout)
        self.socket.connect((host, port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.method = method
        self._in = b""
        self._eof = False
        self.status = None
        self.headers = {}
        self.head_bytes = b""
        self.body = b""
        self.whole = False
        self._left = None  # bytes of a body or chunk still to come
        self._mode = None
        if raw is None:
            raw = format_request(port, method, path, body, headers)
        try:
            self.socket.sendall(raw)
        except OSError:  # refused early: the answer is what counts
            pass

    def send(self, data):
        self.socket.sendall(data)

    def _fill(self):
        if self._eof:
            return False
        try:
            data = self.socket.recv(1 << 18)
        except TimeoutError:
            raise
        except OSError:
            data = b""
        if not data:
            self._eof = True
            return False
        self._in += data
        return True

    def read_head(self):
        """Reads the head of the final answer (1xx are skipped)."""
        if self._mode is not None:
            return self
        while self.status is None:
            while b"\r\n\r\n" not in self._in:
                if not self._fill():
                    raise Lost(self._in)
            head, _, self._in = self._in.partition(b"\r\n\r\n")
            lines = head.decode("latin-1").split("\r\n")
            status = int(lines[0].split(" ")[1])
            if 100 <= status < 200 and status != 101:
                continue
            self.status, self.head_bytes = status, head
            for line in lines[1:]:
                name, _, value = line.partition(":")
                self.headers[name.strip().lower()] = value.strip()
        if self.method == "HEAD" or self.status in (204, 304):
            self.whole, self._mode = True, "done"
        elif "chunked" in self.headers.get("transfer-encoding", "").lower():
            self._mode = "chunked"
        elif "content-length" in self.headers:
            self._mode, self._left = "length", int(self.headers["content-length"])
            if self._left == 0:
                self.whole, self._mode = True, "done"
        else:
            self._mode = "close"
        return self

    def read_some(self):
        """The next bytes of the body; b"" at its end (look at `whole`)."""
        if self._mode is None:
            self.read_head()
        while self._mode != "done":
            piece = b""
            if self._mode == "chunked" and not self._left:
                line, found, rest = self._in.partition(b"\r\n")
                if found and line == b"" and self._left == 0:  # the end of the chunk before
                    self._in, self._left = rest, None
                    continue
                if found:
                    size = int(line.split(b";")[0], 16)
                    if size == 0:
                        while b"\r\n\r\n" not in found + rest and self._fill():
                            _, found, rest = self._in.partition(b"\r\n")
                        self.whole = b"\r\n\r\n" in found + rest
                        self._in = (found + rest).partition(b"\r\n\r\n")[2]
                        self._mode = "done"
                        break
                    self._in, self._left = rest, size
                    continue
            elif self._in and self._mode == "close":
                piece, self._in = self._in, b""
            elif self._in:
                piece, self._in = self._in[:self._left], self._in[self._left:]
                self._left -= len(piece)
                if self._mode == "length" and self._left == 0:
                    self.whole, self._mode = True, "done"
            if piece:
                self.body += piece
                return piece
            if not self._fill():
                self.whole = self._mode == "close"
                self._mode = "done"
        return b""

    def read_events(self, count):
        """Reads until `count` SSE events are there (counted by their blank lines)."""
        while self.body.count(b"\n\n") < count:
            if not self.read_some():
                raise Lost(self.body)
        return self.body

    def rest(self):
        """Everything until the end, as an Answer. Raises Lost if no head came."""
        self.read_head()
        pieces = [self.body]
        self.body = b""
        while piece := self.read_some():
            pieces.append(piece)
            self.body = b""
        self.body = b"".join(pieces)
        self.socket.close()
        return Answer(self.status, self.headers, self.body, self.whole, self.head_bytes)

    def read_to_close(self, seconds):
        """Raw bytes until the peer closes; fails if it does not within `seconds`."""
        end = time.monotonic() + seconds
        while not self._eof:
            self.socket.settimeout(max(0.01, end - time.monotonic()))
            self._fill()
        return self._in

    def close(self):
        try:
            self.socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self.socket.close()

    def reset(self):
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()


def format_request(port, method, path, body=None, headers=None):
    """The bytes of a request. `headers` override the defaults; None removes one; a list sends several lines."""
    if body is not None and not isinstance(body, bytes):
        body = json.dumps(body).encode()
    lines = {"Host": f"127.0.0.1:{port}", "Authorization": CREDENTIAL}
    if body is not None:
        lines["Content-Type"] = "application/json"
        lines["Content-Length"] = str(len(body))
    for name, value in (headers or {}).items():
        present = next((n for n in lines if n.lower() == name.lower()), name)
        lines[present] = value
    text = f"{method} {path} HTTP/1.1\r\n"
    for name, value in lines.items():
        for one in value if isinstance(value, list) else [value]:
            if one is not None:
                text += f"{name}: {one}\r\n"
    return text.encode("latin-1") + b"\r\n" + (body or b"")


def chat_body(text="hi", model="fast", stream=False, **more):
    body = {"model": model, "messages": [{"role": "user", "content": text}], **more}
    if stream:
        body["stream"] = True
    return body


# ---- the gateway ---------------------------------------------------------------------------------------------------------------

class Died(Exception):
    """The gateway ended while starting: its exit code and what it said."""

    def __init__(self, code, text):
        super().__init__(f"semel ended with {code}: {text[-800:]}")
        self.code, self.text = code, text


class Semel:
    """`semel serve` with its own ports and folder. Keyword arguments become top-level config keys; `routes` and `engine` are
    merged over the defaults of these tests."""

    def __init__(self, folder, upstream, *, upstream_options=None, env=None, durability="sync", command=None, **config):
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port, self.admin = free_port(), free_port()
        self.data = self.folder / "data"
        self.env = env or {}
        self.command = command or []
        self.process = None
        self.log = self.folder / "stderr.log"
        self.out = self.folder / "stdout.log"
        self.config = {
            "listen": f"127.0.0.1:{self.port}",
            "admin": f"127.0.0.1:{self.admin}",
            "store": {"rocksdb": {"path": str(self.data), "durability": durability}},
            "routes": {"/api/chat": {"key": "required", "on_running": "accept", "model": "fast"}},
        }
        if upstream is not None:
            url = upstream if isinstance(upstream, str) else upstream.url
            self.config["upstreams"] = [{"name": "mock", "dialect": "openai", "base_url": url, "models": ["*"],
                                         "stream_usage": "inject", **(upstream_options or {})}]
        for key, value in config.items():
            if key == "routes":
                for route, dials in value.items():
                    self.config["routes"].setdefault(route, {}).update(dials)
            else:
                self.config[key] = value
        self.config_file = self.folder / "semel.yaml"
        self.write_config()

    def write_config(self):
        # JSON is YAML, too.
        self.config_file.write_text(json.dumps(self.config, indent=2) + "\n")

    def launch(self, *arguments, fault=None, env=None):
        """Starts the process without waiting for it."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SEMEL_FAULT")}
        environment.update(self.env)
        environment.update(env or {})
        if fault:
            environment["SEMEL_FAULT_POINTS"] = fault
        with open(self.log, "ab") as log, open(self.out, "ab") as out:
            self.process = subprocess.Popen(
                [*self.command, str(BINARY), "serve", "--config", str(self.config_file), *arguments],
                stdin=subprocess.DEVNULL, stdout=out, stderr=log, env=environment, cwd=self.folder)
        return self

    def start(self, *arguments, fault=None, env=None):
        self.launch(*arguments, fault=fault, env=env)
        end = time.monotonic() + START_SECONDS
        while True:
            if self.process.poll() is not None:
                raise Died(self.process.returncode, self.said())
            try:
                if self.ask_admin("/readyz", timeout=5).status == 200:
                    return self
            except (OSError, Lost):
                pass
            if time.monotonic() > end:
                raise AssertionError(f"not ready after {START_SECONDS} s: {self.said()[-800:]}")
            time.sleep(0.02)

    def said(self):
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait_dead(self, seconds=60):
        return self.process.wait(seconds)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(20)

    def stop(self, seconds=60):
        """SIGTERM; returns the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(seconds)

    def clean_up(self):
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()

    @property
    def rss_kib(self):
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1])

    @property
    def rss_peak_kib(self):
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])

    # ---- asking

    def open(self, method, path, body=None, headers=None, **kw):
        return Exchange(self.port, method, path, body, headers, **kw)

    def ask(self, method, path, body=None, headers=None, **kw):
        return self.open(method, path, body, headers, **kw).rest()

    def raw(self, data, **kw):
        return Exchange(self.port, raw=data, **kw)

    def ask_admin(self, path, method="GET", timeout=20):
        return Exchange(self.admin, method, path, headers={"Authorization": None}, timeout=timeout).rest()

    def open_chat(self, key, text="hi", *, model="fast", stream=False, headers=None, more=None, timeout=60, **kw):
        h = dict(headers or {})
        if key is not None:
            h["Idempotency-Key"] = key
        return self.open("POST", "/v1/chat/completions", chat_body(text, model, stream, **(more or {})), h,
                         timeout=timeout, **kw)

    def chat(self, key, text="hi", **kw):
        return self.open_chat(key, text, **kw).rest()

    def try_chat(self, key, text="hi", **kw):
        """The answer, or None if the connection ended without one."""
        try:
            return self.chat(key, text, **kw)
        except (Lost, OSError):
            return None

    def say(self, request_id, content="hi", session="s1", user="u1", headers=None, timeout=60, **more):
        """POST /api/chat."""
        h = {"X-Request-Id": request_id, "X-User-Id": user, **(headers or {})}
        return self.ask("POST", "/api/chat", {"content": content, "sessionId": session, **more}, h, timeout=timeout)

    def status_of(self, request_id, session="s1", user="u1", headers=None):
        return self.ask("GET", f"/api/chat/status/{request_id}?sessionId={session}", headers={"X-User-Id": user, **(headers or {})})

    # ---- looking inside

    def metrics(self):
        """[(name, labels, value)]"""
        found = []
        for line in self.ask_admin("/metrics").body.decode().splitlines():
            m = re.match(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})? ([^ ]+)$", line)
            if m:
                labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', m[2] or ""))
                found.append((m[1], labels, float(m[3])))
        return found

    def metric(self, name, **labels):
        """The sum over all lines of that name with these labels; 0 if there are none."""
        return sum(v for n, l, v in self.metrics() if n == name and all(l.get(k) == w for k, w in labels.items()))

    def command_line(self, *arguments, timeout=60, env=None, input=None):
        return run_semel(*arguments, timeout=timeout, env={**self.env, **(env or {})}, cwd=self.folder, input=input)


    def record(self, answer_or_intent):
        """The record as `semel record get --json` tells it; None if there is none."""
        intent = answer_or_intent if isinstance(answer_or_intent, str) else answer_or_intent.headers["semel-intent"]
        done = self.command_line("record", "get", intent, "--config", self.config_file, "--json")
        assert done.returncode in (0, 3), done.stderr
        return json.loads(done.stdout) if done.returncode == 0 else None

    def files_holding(self, secret):
        """Files of its folder (data, logs; not the config) in which the bytes occur."""
        needle = secret.encode()
        return [str(p) for p in sorted(self.folder.rglob("*"))
                if p.is_file() and p != self.config_file and needle in p.read_bytes()]


def run_semel(*arguments, timeout=60, env=None, cwd=None, input=None):
    environment = {**os.environ, **(env or {})}
    return subprocess.run([str(BINARY), *map(str, arguments)], capture_output=True, text=True, timeout=timeout,
                          env=environment, cwd=cwd, input=input, stdin=subprocess.DEVNULL if input is None else None)
