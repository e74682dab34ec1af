"""What the tests of Redis' faults share: a cable that can be cut, a master with replicas and sentinels, clients under load."""
import itertools
import pathlib
import random
import socket
import subprocess
import threading
import time

from harness import Lost, background, eventually, free_port
from redis_server import RedisServer

KEEPS = ("--appendonly", "yes", "--appendfsync", "always")
LEASE = 3.0
GRACE = LEASE / 3


def on(server, url=None, **settings):
    """Config of a gateway on this server, with a short lease."""
    return {"store": {"redis": {"url": url or server.url(), **settings}}, "engine": {"lease": f"{int(LEASE)}s"}}


def ready(semel):
    try:
        return semel.ask_admin("/readyz", timeout=10).status == 200
    except (OSError, Lost):
        return False


def record_keys(server):
    return server.keys("semel:*:r:*")


def records(semel):
    """intent -> record, all of the store's."""
    return {r["intent"]: r for r in semel.ask_admin("/admin/records?limit=1000").json["records"]}


def record(semel, answer):
    return semel.ask_admin("/admin/records/" + answer.headers["semel-intent"]).json


class Cable:
    """A TCP relay between a gateway and a server. `cut()` holds back everything in both directions and lets connections stand, as a
    lost route does; `mend()` lets it flow again, what was under way included. `lead_to()` breaks all connections and leads new ones
    elsewhere, as an address that moves does."""

    def __init__(self, port):
        self.target = port
        self._flows = threading.Event()
        self._flows.set()
        self._lock = threading.Lock()
        self._open = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}"

    def cut(self):
        self._flows.clear()

    def mend(self):
        self._flows.set()

    def lead_to(self, port):
        self.target = port
        with self._lock:
            ended, self._open = self._open, []
        for one in ended:
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:  # it has ended itself
                pass

    def close(self):
        self._listener.close()
        self.mend()
        self.lead_to(self.target)

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._join, args=(near,), daemon=True).start()

    def _join(self, near):
        self._flows.wait()
        try:
            far = socket.create_connection(("127.0.0.1", self.target), 10)
        except OSError:
            near.close()
            return
        far.settimeout(None)
        with self._lock:
            self._open += [near, far]
        for source, sink in ((near, far), (far, near)):
            source.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source, sink):
        try:
            while data := source.recv(1 << 16):
                self._flows.wait()
                sink.sendall(data)
        except OSError:
            pass
        for one in (source, sink):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


class Replicated:
    """A master, its replicas and three sentinels (`sentinels=0`: none). Replication runs under a user of its own, so that `part()` can
    end it while everybody lives."""

    NAME = "main"

    def __init__(self, folder, replicas=2, sentinels=3, env_of_replicas=None):
        folder = pathlib.Path(folder)
        user = ("--user", "copier", "on", ">copy", "+@all", "~*", "&*", "--masteruser", "copier", "--masterauth", "copy")
        self.master = RedisServer(folder / "master", *user, *KEEPS)
        self.replicas = [RedisServer(folder / f"replica{i}", *user, "--replicaof", "127.0.0.1", str(self.master.port),
                                     env=env_of_replicas) for i in range(replicas)]
        eventually(self.copied, 30, "the replicas have copied")
        self.ports = [free_port() for _ in range(sentinels)]
        self.processes = []
        for port in self.ports:
            self._start_sentinel(folder / f"sentinel{port}", port)
        for port in self.ports:
            eventually(lambda p=port: self._knows_all(p), 30, "the sentinels know each other and the replicas")

    def _start_sentinel(self, folder, port):
        folder.mkdir()
        file = folder / "sentinel.conf"
        file.write_text(f"port {port}\nbind 127.0.0.1\ndir {folder}\nsentinel monitor {self.NAME} 127.0.0.1 {self.master.port} 2\n"
                        f"sentinel down-after-milliseconds {self.NAME} 1000\nsentinel failover-timeout {self.NAME} 6000\n")
        with open(folder / "log", "ab") as log:
            self.processes.append(subprocess.Popen(["redis-sentinel", str(file)], stdout=log, stderr=log, stdin=subprocess.DEVNULL))

    def _knows_all(self, port):
        try:
            told = ask_sentinel(port, "SENTINEL", "master", self.NAME)
        except OSError:
            return False
        facts = dict(zip(told[::2], told[1::2]))
        return int(facts["num-slaves"]) == len(self.replicas) and int(facts["num-other-sentinels"]) == len(self.ports) - 1

    def copied(self):
        return all(r.info("master_link_status") == "up" for r in self.replicas) and \
            self.master.info("connected_slaves") == str(len(self.replicas))

    @property
    def url(self):
        return "redis-sentinel://" + ",".join(f"127.0.0.1:{p}" for p in self.ports) + f"#{self.NAME}"

    def part(self):
        """From now on no replica gets anything from the master."""
        self.master.command("ACL", "SETUSER", "copier", "off")
        self.master.command("CLIENT", "KILL", "TYPE", "replica")
        eventually(lambda: self.master.info("connected_slaves") == "0", what="no replica is connected")

    def promoted(self):
        """The server that the sentinels name now, if it is another one than the first master."""
        try:
            port = int(ask_sentinel(self.ports[0], "SENTINEL", "get-master-addr-by-name", self.NAME)[1])
        except OSError:
            return None
        server = next((r for r in self.replicas if r.port == port), None)
        return server if server and server.info("role") == "master" else None

    def fail_over(self):
        self.master.kill()
        return eventually(self.promoted, 40, "the sentinels promoted a replica")

    def clean_up(self):
        for process in self.processes:
            process.kill()
            process.wait(20)
        for server in [self.master, *self.replicas]:
            server.clean_up()


def ask_sentinel(port, *words):
    return RedisServer.command(type("Address", (), {"port": port}), *words)


class Load:
    """Clients that ask for ever new ids until `stop()`, each id again until it has a whole answer of status 200, at a gateway chosen
    anew each time; with `duplicates` several clients ask for each id. `answers`: id -> the final answers; `refusals`: what came
    instead; `lost`: connections that ended before."""

    def __init__(self, gateways, clients=6, duplicates=1, streams=False, patience=60, seed=1):
        self.gateways, self.duplicates, self.streams, self.patience = gateways, duplicates, streams, patience
        self.answers, self.refusals, self.lost = {}, [], 0
        self._random = random.Random(seed)
        self._numbers = itertools.count()
        self._stopping = threading.Event()
        self._clients = [background(self._run) for _ in range(clients)]

    def _run(self):
        while not self._stopping.is_set():
            key = f"load-{next(self._numbers)}"
            others = [background(self._settle, key) for _ in range(self.duplicates - 1)]
            answers = [self._settle(key)] + [o.result(self.patience + 30) for o in others]
            self.answers[key] = answers

    def _settle(self, key):
        end = time.monotonic() + self.patience
        while time.monotonic() < end:
            answer = self.ask(key)
            if answer is None:
                self.lost += 1
            elif answer.status == 200 and answer.whole:
                return answer
            elif answer.status != 200:
                self.refusals.append(answer)
            time.sleep(0.02)
        raise AssertionError(f"{key} had no answer within {self.patience} s")

    def ask(self, key, gateway=None):
        """Once; None if the connection ended before the answer had begun."""
        stream = self.streams and int(key.rsplit("-", 1)[1]) % 2 == 0
        gateway = gateway or self._random.choice(self.gateways)
        return gateway.try_chat(key, f"text of {key}.", stream=stream, model="stream" if stream else "load")

    def stop(self):
        self._stopping.set()
        for client in self._clients:
            client.result(self.patience + 30)
        return self
