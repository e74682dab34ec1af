"""What tests of consumers have in common: where messages come from, what handles them, where its effects are counted."""
import collections
import itertools
import json
import threading

import harness
from harness import eventually
from kafka_server import Message
from sql_server import USER
from upstream import Upstream

LEASE = "2s"
# A member that is killed keeps its partitions until its session is over: the shortest that the tests' brokers allow, about.
QUICK_GROUP = {"session.timeout.ms": 1500, "heartbeat.interval.ms": 300}
# For a topic that is not there a producer waits for its news before it gives up: 30 s otherwise.
QUICK_NEWS = {"topic.metadata.propagation.max.ms": 1000}
QUICK_RETRY = {"attempts": 3, "backoff": {"initial": "50ms", "max": "200ms"}}
_numbers = itertools.count(1)
places = []  # of the test that runs: where to look if it fails


def message(id, key=None, headers=(), partition=-1, **body):
    """A message whose payload is {"id": id, **body}."""
    text = json.dumps({"id": id, **body}).encode()
    return Message(text, None if key is None else key.encode(), list(headers), partition, id)


def raw(value, key=None, headers=(), partition=-1, id=None):
    return Message(value, key, list(headers), partition, id)


# ---- where messages come from --------------------------------------------------------------------------------------------------

class Topic:
    """A topic of its own and a group that reads it."""

    kind = "kafka"

    def __init__(self, server, partitions=4, **settings):
        self.server = server
        self.name = server.topic(partitions, **settings)
        self.group = f"group-{next(_numbers)}"
        self.letters_name = f"{self.name}.{self.group}.dlq"
        places.append(self)

    def source(self, properties=None, **more):
        return {"kafka": {"brokers": self.server.address, "topics": [self.name], "group": self.group,
                          "properties": {**QUICK_GROUP, **(properties or {})}, **more}}

    def send(self, *messages):
        self.server.send(self.name, messages)

    def unsettled(self):
        return self.server.lag(self.group, self.name)

    def letters(self):
        return self.server.read(self.letters_name)


class Queue:
    """A queue of its own."""

    kind = "rabbitmq"

    def __init__(self, server, partitions=None, **arguments):
        self.server = server
        self.name = self.group = server.queue(**arguments)
        self.letters_name = f"{self.name}.dlq"
        places.append(self)

    def source(self, **more):
        return {"rabbitmq": {"url": self.server.url, "queue": self.name, **more}}

    def send(self, *messages):
        self.server.send(self.name, messages)

    def unsettled(self):
        return self.server.unsettled(self.name)

    def letters(self):
        return self.server.read(self.letters_name)


class Arrivals:
    """Messages that arrive in shares: to(0.3) sends the first 30 %, to(1) what is left. A key is what stands before its id's "-"."""

    def __init__(self, place, ids):
        self.place, self.ids, self.sent = place, ids, 0

    def to(self, share):
        new, self.sent = self.ids[self.sent:int(len(self.ids) * share)], int(len(self.ids) * share)
        self.place.send(*[message(id, key=id.partition("-")[0]) for id in new])


# ---- what handles them ---------------------------------------------------------------------------------------------------------

class Asked:
    """One request to a Service: `number` counts those of its message, from 1."""

    def __init__(self, call, number):
        self.call, self.number = call, number
        self.id = call.header("Idempotency-Key")

    @property
    def json(self):
        return self.call.json


class Service(Upstream):
    """A handler behind HTTP. `rule(asked)` may wait, and gives None (the effect happens, 200) or a status, or (status, headers),
    under which nothing happens. Effects are counted under the message's id, in their order."""

    def __init__(self):
        self.rule = None
        self.happened = []
        self.asked = collections.Counter()
        self.running = 0
        self.running_most = 0
        self._state = threading.Lock()
        super().__init__()
        self.default = self._handle

    @property
    def handler(self):
        return {"handler": {"http": {"url": f"{self.url}/handle", "timeout": "20s"}}}

    def effects(self):
        """id -> how often it happened."""
        with self._state:
            return collections.Counter(self.happened)

    def _handle(self, call, reply):
        asked = Asked(call, 0)
        with self._state:
            self.asked[asked.id] += 1
            asked.number = self.asked[asked.id]
            self.running += 1
            self.running_most = max(self.running_most, self.running)
        try:
            said = self.rule(asked) if self.rule else None
            if said is None:
                with self._state:
                    self.happened.append(asked.id)
        finally:
            with self._state:
                self.running -= 1
        status, headers = said if isinstance(said, tuple) else (said or 200, ())
        if not self.keep_alive:
            headers = [*headers, ("Connection", "close")]  # else its client may be writing the next one when it closes
        reply.answer(status, b"", headers=headers)


def in_database(server, text):
    """As the owner of the tables."""
    return server.sql(text, user=USER) if server.kind == "postgres" else server.sql(text)


class Rows:
    """Effects of the strategy `transaction`: a row for each run, with nothing that would keep two apart from one."""

    def __init__(self, server):
        self.server = server
        number = "bigserial PRIMARY KEY" if server.kind == "postgres" else "bigint AUTO_INCREMENT PRIMARY KEY"
        in_database(server, f"CREATE TABLE effects (n {number}, message_id varchar(100) NOT NULL, k varchar(100), "
                            "amount int NOT NULL CHECK (amount >= 0))")

    @property
    def database(self):
        return {"database": {self.server.kind: {"url": self.server.url()}}}

    @property
    def handler(self):
        return {**self.database, "strategy": "transaction", "handler": {"sql": {
            "params": {"id": {"json": "/id"}, "k": {"json": "/k"}, "amount": {"json": "/amount"}},
            "statements": ["INSERT INTO effects (message_id, k, amount) VALUES (:id, :k, :amount)"]}}}

    def effects(self):
        return collections.Counter({id: int(n) for id, n in
                                    in_database(self.server, "SELECT message_id, count(*) FROM effects GROUP BY message_id")})

    def count(self):
        return int(in_database(self.server, "SELECT count(*) FROM effects")[0][0])

    def of_key(self, key):
        return [row[0] for row in in_database(self.server, f"SELECT message_id FROM effects WHERE k = '{key}' ORDER BY n")]


class Orders:
    """Effects of the strategy `state`: an order's version counts its transitions."""

    def __init__(self, server):
        self.server = server
        in_database(server, "CREATE TABLE orders (order_no varchar(100) PRIMARY KEY, status varchar(20) NOT NULL, "
                            "version int NOT NULL, transaction_id varchar(100), paid_amount int)")

    @property
    def handler(self):
        return {"database": {self.server.kind: {"url": self.server.url()}}, "strategy": "state", "state": {
            "table": "orders", "key": {"column": "order_no", "value": {"json": "/id"}}, "status": "status", "version": "version",
            "from": ["PENDING", "PROCESSING"], "to": "PAID", "terminal": ["PAID", "CLOSED"],
            "set": {"transaction_id": {"json": "/transaction"}, "paid_amount": {"json": "/amount"}}, "on_superseded": "dead_letter"}}

    def open(self, *numbers, status="PENDING"):
        rows = ", ".join(f"('{number}', '{status}', 1)" for number in numbers)
        in_database(self.server, f"INSERT INTO orders (order_no, status, version) VALUES {rows}")

    def effects(self):
        return collections.Counter({number: int(version) - 1 for number, version in
                                    in_database(self.server, "SELECT order_no, version FROM orders WHERE version > 1")})

    def of(self, number):
        return in_database(self.server, f"SELECT status, version, transaction_id, paid_amount FROM orders WHERE order_no = '{number}'")[0]


# ---- the consumer --------------------------------------------------------------------------------------------------------------

def consumer(place, *parts, name="under-test", source=None, **more):
    """An entry of `consumers:`; `parts` are merged over the defaults of these tests."""
    entry = {"name": name, "source": source or place.source(), "id": {"json": "/id"}, "dead_letter": {"create": True},
             "retry": QUICK_RETRY, "ordering": "none"}
    for part in (*parts, more):
        entry.update(part)
    return {key: value for key, value in entry.items() if value is not None}


def process(folder, *consumers, store=None, **config):
    """A process with these consumers and no upstream, not started. Without `store`: an embedded one of its own."""
    if store is not None:
        config["store"] = store if isinstance(store, dict) else {store.kind: {"url": store.url()}}
    config.setdefault("engine", {"lease": LEASE})
    return harness.Semel(folder, None, consumers=list(consumers), **config)


def state_of(semel, name="under-test"):
    """How a consumer stands, as `semel consumer list` and the admin address tell it."""
    answer = semel.ask_admin("/admin/consumers")
    assert answer.status == 200, answer
    return next(one for one in answer.json["consumers"] if one["name"] == name)


def happens(effects, ids, seconds=30):
    """Waits until each of the ids has its effect; then the effects."""
    wanted = set(ids)
    eventually(lambda: wanted <= set(effects.effects()), seconds, f"effects of {len(wanted)} messages")
    return effects.effects()


def settles(place, seconds=20):
    eventually(lambda: place.unsettled() == 0, seconds, f"all of {place.name} is settled")


def told(place):
    """What is left of a place, in words: for a test that failed."""
    try:
        letters = [f"  {letter.header('semel-message-id')}: {letter.header('semel-error-class')} after {letter.header('semel-failed-runs')} runs"
                   for letter in place.letters()]
        return "\n".join([f"unsettled {place.unsettled()}, letters {len(letters)}", *letters[:50]])
    except Exception as problem:  # its broker may be what failed
        return f"cannot be looked into: {problem!r}"


def dies(place, count=1, seconds=30):
    """Waits for so many letters; then the letters."""
    return eventually(lambda: (found := place.letters()) and len(found) >= count and found, seconds, f"{count} dead letters")
