"""Servers of a test's own, on free ports of 127.0.0.1 and in temporary folders: Redis, PostgreSQL, MariaDB; and a bad network."""
import contextlib
import glob
import os
import pathlib
import pwd
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time

DOWN_FOR = 0.15
EPHEMERAL = 32768  # from here on the system gives ports away by itself


class Failed(Exception):
    pass


def free_port():
    for port in random.sample(range(20000, EPHEMERAL), 200):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise Failed("no free port between 20000 and 32767")


class Server:
    """One process in a folder of its own. Subclasses say how it is made, started and asked."""

    name = user = None
    end_by = "TERM"
    ready_within = 30
    settles = 0.0  # seconds after it is back in which connections that it had are used again and found to be broken

    def __init__(self):
        self.folder = tempfile.mkdtemp(prefix="semel-histories-")
        self.port = free_port()
        self.process = None

    def __enter__(self):
        try:
            self.make()
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def make(self):
        pass

    def as_user(self):
        """What begins a command: some servers refuse root, and none outlives this script."""
        begin = ["setpriv", "--pdeathsig", self.end_by]
        if self.user is None or os.geteuid() != 0:
            return begin
        os.chown(self.folder, pwd.getpwnam(self.user).pw_uid, pwd.getpwnam(self.user).pw_gid)
        return [*begin, f"--reuid={self.user}", f"--regid={self.user}", "--init-groups"]

    def run(self, command):
        done = subprocess.run([*self.as_user(), *command], cwd=self.folder, capture_output=True, text=True)
        if done.returncode:
            raise Failed(f"{command[0]} failed: {(done.stderr or done.stdout).strip()[-400:]}")
        return done.stdout

    def start(self):
        with open(f"{self.folder}/log", "a") as log:
            self.process = subprocess.Popen([*self.as_user(), *self.command()], stdout=log, stderr=log, cwd=self.folder)
        until = time.monotonic() + self.ready_within
        while time.monotonic() < until and self.process.poll() is None:
            if self.answers():
                return
            time.sleep(0.01)
        raise Failed(f"{self.name} did not start: {pathlib.Path(self.folder, 'log').read_text(errors='replace')[-600:]}")

    def kill(self):
        if self.process:
            self.process.kill()
            self.process.wait()

    def kill_and_start(self):
        """The time in which it was away, by the clock of the history."""
        away = time.monotonic_ns()
        self.kill()
        time.sleep(DOWN_FOR)
        self.start()
        time.sleep(self.settles)
        return {"outage": {"from": away, "to": time.monotonic_ns()}}


def needs(program, found):
    if not found:
        raise Failed(f"{program} is not installed; run scripts/install-deps --tests")
    return found


class Redis(Server):
    """What it acknowledged is on the disk."""

    name = "redis-server"

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}/0"

    def command(self):
        return [needs(self.name, shutil.which(self.name)), "--bind", "127.0.0.1", "--port", str(self.port), "--dir", self.folder,
                "--save", "", "--appendonly", "yes", "--appendfsync", "always"]

    def answers(self):
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as link:
                link.sendall(b"PING\r\n")
                return link.recv(64).startswith(b"+PONG")
        except OSError:
            return False


class Postgres(Server):
    name, user, end_by = "postgres", "postgres", "INT"
    settles = 0.1

    def __init__(self):
        super().__init__()
        found = sorted(glob.glob("/usr/lib/postgresql/*/bin/postgres"), key=lambda p: int(p.split("/")[4]))
        self.programs = pathlib.Path(needs("postgres", found and found[-1])).parent

    @property
    def url(self):
        return self.url_at(self.port)

    def url_at(self, port):
        return f"postgresql://semel@127.0.0.1:{port}/postgres?sslmode=disable"

    def make(self):
        self.run([self.programs / "initdb", "-D", f"{self.folder}/db", "-U", "semel", "-A", "trust", "-E", "UTF8", "--locale=C", "-N"])

    def command(self):
        settings = {"port": self.port, "listen_addresses": "127.0.0.1", "unix_socket_directories": self.folder,
                    "synchronous_commit": "on", "shared_buffers": "64MB", "recovery_init_sync_method": "syncfs"}
        return [self.programs / "postgres", "-D", f"{self.folder}/db", *(w for n, v in settings.items() for w in ("-c", f"{n}={v}"))]

    def answers(self):
        return subprocess.run([self.programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port)]).returncode == 0

    def kill(self):
        """All of its processes: a new one refuses to start while old ones hold its memory."""
        if not self.process:
            return
        pid = self.process.pid
        self.process.send_signal(signal.SIGSTOP)  # it would start new ones
        try:
            children = [int(c) for c in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except OSError:
            children = []
        super().kill()
        for child in children:
            try:
                os.kill(child, signal.SIGKILL)
            except ProcessLookupError:
                pass
        while any(running(child) for child in children):
            time.sleep(0.002)


def running(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class Mysql(Server):
    """A MariaDB server, durable at each commit."""

    name, user = "mariadbd", "mysql"
    settles = 0.1

    @property
    def url(self):
        return self.url_at(self.port)

    def url_at(self, port):
        return f"mysql://semel:semel@127.0.0.1:{port}/semel"

    def make(self):
        self.run([needs("mariadb-install-db", shutil.which("mariadb-install-db")), "--no-defaults", f"--datadir={self.folder}/db",
                  "--auth-root-authentication-method=normal", "--skip-test-db", "--innodb-log-file-size=32M",
                  f"--tmpdir={self.folder}"])
        (pathlib.Path(self.folder) / "init.sql").write_text(
            "CREATE DATABASE IF NOT EXISTS semel;\nCREATE USER IF NOT EXISTS 'semel'@'127.0.0.1' IDENTIFIED BY 'semel';\n"
            "GRANT ALL ON semel.* TO 'semel'@'127.0.0.1';\n")

    def command(self):
        return [needs(self.name, shutil.which(self.name)), "--no-defaults", f"--datadir={self.folder}/db", f"--port={self.port}",
                f"--tmpdir={self.folder}", "--bind-address=127.0.0.1", f"--socket={self.folder}/s", f"--pid-file={self.folder}/pid", "--skip-log-bin",
                "--skip-name-resolve", "--innodb-flush-log-at-trx-commit=1", "--innodb-buffer-pool-size=64M",
                "--innodb-log-file-size=32M", f"--init-file={self.folder}/init.sql"]

    def answers(self):
        return subprocess.run(["mariadb-admin", "--no-defaults", "-h", "127.0.0.1", "-P", str(self.port), "-usemel", "-psemel", "ping"],
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


class LosingNetwork:
    """A proxy that now and then drops the answers of one connection and then breaks it: the server has done what it was asked, or
    has rolled it back, and nobody was told."""

    EVERY, DROPS_FOR, SETTLED = 0.2, 0.02, 0.05

    def __init__(self, port, seed):
        self.to, self.random, self.links, self.lines = port, random.Random(seed), [], []
        self.lock = threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.over = threading.Event()

    def __enter__(self):
        threading.Thread(target=self.accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.listener.close()
        for link in list(self.links):
            link.close()

    def accept(self):
        while not self.over.is_set():
            try:
                client, _ = self.listener.accept()
                server = socket.create_connection(("127.0.0.1", self.to))
            except OSError:
                continue
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = Link(client, server)
            with self.lock:
                self.links = [other for other in self.links if not other.closed] + [link]

    @contextlib.contextmanager
    def breaking(self):
        breaker = threading.Thread(target=self.break_links, daemon=True)
        breaker.start()
        try:
            yield
        finally:
            self.over.set()
            breaker.join()

    def break_links(self):
        while not self.over.wait(self.EVERY):
            with self.lock:
                open_ones = [link for link in self.links if not link.closed]
            if not open_ones:
                continue
            link = self.random.choice(open_ones)
            begin = time.monotonic_ns()
            link.dropping = True
            time.sleep(self.DROPS_FOR)
            link.close()
            time.sleep(self.SETTLED)
            self.lines.append({"outage": {"from": begin, "to": time.monotonic_ns()}})


class Link:
    def __init__(self, client, server):
        self.client, self.server, self.closed, self.dropping = client, server, False, False
        threading.Thread(target=self.copy, args=(client, server, False), daemon=True).start()
        threading.Thread(target=self.copy, args=(server, client, True), daemon=True).start()

    def copy(self, source, target, answers):
        try:
            while data := source.recv(65536):
                if not (answers and self.dropping):
                    target.sendall(data)
        except OSError:
            pass
        self.close()

    def close(self):
        self.closed = True
        for end in (self.client, self.server):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            end.close()
