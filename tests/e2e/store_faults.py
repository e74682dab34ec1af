"""What the tests of faults of a shared store have in common: a cable that can be cut, clients under load."""
import itertools
import random
import socket
import threading
import time

import upstream
from harness import Lost, background, eventually

LEASE = 3.0
GRACE = LEASE / 3


def on(server, url=None, **settings):
    """Config of a gateway on this server, with a short lease."""
    return {"store": {server.kind: {"url": url or server.url(), **settings}}, "engine": {"lease": f"{int(LEASE)}s"}}


def ready(semel):
    try:
        return semel.ask_admin("/readyz", timeout=10).status == 200
    except (OSError, Lost):
        return False


def records(semel):
    """intent -> record, all of the store's."""
    return {r["intent"]: r for r in semel.ask_admin("/admin/records?limit=1000").json["records"]}


def record(semel, answer):
    return semel.ask_admin("/admin/records/" + answer.headers["semel-intent"]).json


def in_all(gateways, name, **labels):
    return sum(one.metric(name, **labels) for one in gateways)


def assert_each_paid_once(up, load):
    """Whatever the clients of a load met, no id of theirs was paid for twice."""
    assert load.answers
    paid = [c.json["messages"][0]["content"] for c in up.paid(containing="text of load-")]
    assert sorted(paid) == sorted(f"text of {key}." for key in load.answers)


def held_calls(up, gateways, count, gate):
    """Starts calls that wait for the gate, a duplicate of each at the next gateway -> [(owner, duplicate)], all under way."""
    up.on("held", upstream.plain(gate=gate))
    calls = []
    for i in range(count):
        owner, other = gateways[i % len(gateways)], gateways[(i + 1) % len(gateways)]
        first = background(owner.chat, f"run-{i}", model="held")
        gate.wait_until_entered()
        calls.append((first, background(other.chat, f"run-{i}", model="held")))
    eventually(lambda: in_all(gateways, "semel_peer_connections") == (count if len(gateways) > 1 else 0))
    return calls


def assert_paid_once(up, gateways, calls):
    """All ended with one answer each, and ask again for the same without a call."""
    for i, (first, duplicate) in enumerate(calls):
        mine, other = first.result(30), duplicate.result(30)
        assert (mine.status, other.status) == (200, 200), (mine, other)
        assert mine.body == other.body and mine.attempt == other.attempt == 1
        for one in gateways:
            assert one.chat(f"run-{i}", model="held").body == mine.body
    assert len(up.paid(model="held")) == len(calls)
    assert in_all(gateways, "semel_paid_maybe_twice_total") == in_all(gateways, "semel_takeovers_total") == 0


class Cable:
    """A TCP relay between a gateway and a server: `url` is the server's through it. `cut()` holds back everything in both directions
    and lets connections stand, as a lost route does; `mend()` lets it flow again, what was under way included. `lead_to()` breaks all
    connections and leads new ones elsewhere, as an address that moves does."""

    def __init__(self, server):
        self.target = server.port
        self._flows = threading.Event()
        self._flows.set()
        self._lock = threading.Lock()
        self._open = []
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]
        self.url = server.url(at=self.port)
        threading.Thread(target=self._accept, daemon=True).start()

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
            threading.Thread(target=self._pump, args=(source, sink, source is near), daemon=True).start()

    def flow(self, source):
        """What comes from it, as it may pass."""
        while data := source.recv(1 << 16):
            self._flows.wait()
            yield data

    def pump(self, source, sink, outward):
        """One direction of a connection, until it ends; `outward`: from the gateway to the server."""
        for data in self.flow(source):
            sink.sendall(data)

    def _pump(self, source, sink, outward):
        try:
            self.pump(source, sink, outward)
        except OSError:
            pass
        for one in (source, sink):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass


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
