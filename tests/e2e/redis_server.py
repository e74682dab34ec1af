"""A real redis-server for one test, and a pretended one that answers what no server here says."""
import os
import pathlib
import signal
import socket
import subprocess
import threading

from harness import eventually, free_port


class RedisServer:
    """redis-server on a free port, without persistence unless `arguments` say otherwise. `.url(user, password)` names it; `at` is
    another port, of what is in front of it."""

    kind = "redis"

    def __init__(self, folder, *arguments, env=None):
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.arguments = arguments
        self.env = env or {}
        self.process = None
        self.start()

    def start(self):
        with open(self.folder / "redis.log", "ab") as log:
            self.process = subprocess.Popen(
                ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.folder), "--save", "",
                 "--repl-diskless-sync-delay", "0", *self.arguments], stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                env={**os.environ, **self.env})
        eventually(self.answers, 20, "redis-server answers")
        return self

    def answers(self):
        try:
            return self.command("PING") in ("PONG",) or "NOAUTH" in str(self.command("PING"))
        except OSError:
            return False

    def url(self, user="", password="", database=0, at=None):
        who = f"{user}:{password}@" if user or password else ""
        return f"redis://{who}127.0.0.1:{at or self.port}/{database}"

    def command(self, *words, password=None):
        """One command on a connection of its own. Errors come back as text that begins with '-'."""
        with socket.create_connection(("127.0.0.1", self.port), 10) as connection:
            file = connection.makefile("rb")
            for line in ([("AUTH", password)] if password else []) + [words]:
                connection.sendall(encode(line))
                reply = read_reply(file)
            return reply

    def info(self, field):
        for line in self.command("INFO").splitlines():
            if line.startswith(field + ":"):
                return line.split(":", 1)[1]
        return ""

    def keys(self, pattern="*"):
        found, cursor = set(), "0"
        while True:
            cursor, page = self.command("SCAN", cursor, "MATCH", pattern, "COUNT", "1000")
            found.update(page)
            if cursor == "0":
                return sorted(found)

    def intents(self):
        """How many records it holds."""
        return len(self.keys("semel:*:r:*"))

    def freeze(self):
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self):
        self.process.send_signal(signal.SIGCONT)

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(20)

    def clean_up(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.kill()


def encode(words):
    out = f"*{len(words)}\r\n".encode()
    for word in words:
        data = str(word).encode()
        out += f"${len(data)}\r\n".encode() + data + b"\r\n"
    return out


def read_reply(file):
    line = file.readline().rstrip(b"\r\n")
    if not line:
        raise ConnectionError("closed")
    kind, rest = line[:1], line[1:].decode()
    if kind == b"$":
        return None if rest == "-1" else file.read(int(rest) + 2)[:-2].decode("latin-1")
    if kind == b"*":
        return None if rest == "-1" else [read_reply(file) for _ in range(int(rest))]
    if kind == b":":
        return int(rest)
    return rest if kind == b"+" else "-" + rest


class PretendedRedis:
    """Answers INFO with `info`, TIME with a time, and everything else with OK."""

    def __init__(self, info):
        self.info = info
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection):
        file = connection.makefile("rb")
        try:
            while True:
                words = read_reply(file)
                name = words[0].upper()
                if name == "INFO":
                    text = self.info.encode()
                    connection.sendall(b"$%d\r\n%s\r\n" % (len(text), text))
                elif name == "TIME":
                    connection.sendall(encode(["1700000000", "0"]))
                else:
                    connection.sendall(b"+OK\r\n")
        except (OSError, ValueError, TypeError):
            connection.close()

    def close(self):
        self.listener.close()
