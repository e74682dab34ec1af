"""A consumer that is killed again and again while numbered messages come, half of them twice and some of them failing at first: what is
lost, what is done twice. SEMEL_KILLS says how often (6). SEMEL_ARTICLE=1 runs the consumer that articles teach through the same, once
bench/peers/spring-consumer/setup has built it, and says of it what it says of ours (pytest -s)."""
import collections
import os
import random
import subprocess
import time

import pytest

import consumers
from consumers import Rows, consumer, message
from harness import ROOT, background, eventually

KILLS = int(os.environ.get("SEMEL_KILLS", 6))
ARTICLE = ["article-redis"] if os.environ.get("SEMEL_ARTICLE") else []
SPRING = ROOT / "build/peers-spring-consumer"
PORTION = 240  # ids between two kills
FAILING = 0.02
CONCURRENCY = 8
PARTITIONS = 8


class Ours:
    """The effect is a row of the transaction, or is done by a service elsewhere with its ids in a store or a table."""

    def __init__(self, setup, topic, request):
        self.exact = setup == "transaction-postgres"
        if self.exact:
            server = request.getfixturevalue("databases")("postgres")
            self.effects, store = Rows(server), server
            # A message whose parent is not there yet fails until it is.
            consumers.in_database(server, "CREATE TABLE parents (name varchar(20) PRIMARY KEY)")
            consumers.in_database(server, "INSERT INTO parents VALUES ('there')")
            entry = consumer(topic, self.effects.handler, retry={"attempts": 1000, "backoff": {"initial": "50ms", "max": "200ms"}})
            entry["handler"]["sql"]["statements"] = [
                "INSERT INTO effects (message_id, k, amount) SELECT CAST(:id AS varchar), name, CAST(:amount AS int) FROM parents WHERE name = :k"]
        else:
            self.effects = request.getfixturevalue("service")
            self.effects.rule = lambda asked: 500 if asked.number == 1 and asked.json["quantity"] < 0 else None
            if setup == "store-redis":
                store, part = request.getfixturevalue("redis_servers")("--appendonly", "yes"), {}
            else:
                store = request.getfixturevalue("databases")("postgres")
                part = {"strategy": "table", "database": {"postgres": {"url": store.url()}}}
            entry = consumer(topic, self.effects.handler, part)
        self.unknown = 0
        self.process = request.getfixturevalue("run")({**entry, "concurrency": CONCURRENCY}, store=store)

    def happened(self):
        return self.effects.effects()

    def parent(self, name):
        if self.exact:
            consumers.in_database(self.effects.server, f"INSERT INTO parents VALUES ('{name}')")

    def bounce(self):
        self.unknown += self.process.metric("semel_message_unknown_outcomes_total")
        self.process.kill()
        self.process.start()

    def end(self, topic):
        consumers.settles(topic, 120)
        self.unknown += self.process.metric("semel_message_unknown_outcomes_total")


class Article:
    """SET NX, the effect, SET; an acknowledgement for each message; what fails is marked and not acknowledged."""

    def __init__(self, topic, request):
        self.topic, self.redis, self.unknown = topic, request.getfixturevalue("redis_servers")(), 0
        self.log = request.getfixturevalue("tmp_path") / "article.log"
        self.process, self.former = None, set()  # former: members that were killed
        request.addfinalizer(self.kill)
        self.start()

    def start(self):
        arguments = {"bench.topic": self.topic.name, "bench.group": self.topic.group, "bench.expect": 1 << 30, "bench.effects": "effects",
                     "spring.kafka.bootstrap-servers": self.topic.server.address, "spring.data.redis.port": self.redis.port,
                     "spring.kafka.consumer.properties.session.timeout.ms": 3000,
                     "spring.kafka.consumer.properties.heartbeat.interval.ms": 500}
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                ["java", "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", f"{SPRING}/target/classes:{SPRING}/libraries/*",
                 "bench.App", *[f"--{name}={value}" for name, value in arguments.items()]], stdout=log, stderr=log)

    def kill(self):
        self.process.kill()
        self.process.wait(20)

    def happened(self):
        assert self.process.poll() is None, self.log.read_text()[-2000:]
        return collections.Counter(self.redis.command("LRANGE", "effects", "0", "-1"))

    def parent(self, name):
        pass

    def members(self):
        return {member.member_id for member in self.topic.server.members(self.topic.group) if member.assignment.topic_partitions}

    def bounce(self):
        self.former |= self.members()
        self.kill()
        self.start()

    def end(self, topic):
        """What it never acknowledges keeps a lag for ever, so it is over when nothing has moved for a while."""
        eventually(lambda: self.members() - self.former, 120, "it has partitions")
        seen, since = None, time.monotonic()

        def stands():
            nonlocal seen, since
            now = (topic.unsettled(), sum(self.happened().values()))
            if now != seen:
                seen, since = now, time.monotonic()
            return time.monotonic() > since + 15
        eventually(stands, 300, "nothing moves any more")


@pytest.mark.parametrize("setup", ["transaction-postgres", "table-postgres", "store-redis", *ARTICLE])
def test_kills_and_failures_lose_nothing_and_double_at_most_what_was_in_work_elsewhere(setup, kafka, request):
    topic, chosen = consumers.Topic(kafka, PARTITIONS), random.Random(11)
    it = Article(topic, request) if setup in ARTICLE else Ours(setup, topic, request)
    ids, failing = [], set()
    for kill in range(KILLS):
        new = [f"m{len(ids) + i}" for i in range(PORTION)]
        fail = {id for id in new if chosen.random() < FAILING}
        ids, failing = ids + new, failing | fail
        portion = [message(id, messageId=id, orderNo=id, productId=1, quantity=-1 if id in fail else 1, amount=1,
                           k=f"late-{kill}" if id in fail else "there") for id in new]
        copies = chosen.sample(range(PORTION), PORTION // 2)
        # A copy comes a little behind its original, on any partition.
        order = sorted([*enumerate(portion), *[(at + chosen.randrange(1, 20), portion[at]) for at in copies]], key=lambda one: one[0])
        before = sum(it.happened().values())
        sent = background(topic.send, *[one for _, one in order])
        wanted = before + chosen.randrange(PORTION // 5, PORTION * 4 // 5)
        eventually(lambda: sum(it.happened().values()) >= wanted, 300, f"enough for kill {kill + 1}")
        it.parent(f"late-{kill}")
        it.bounce()
        sent.result(60)
    it.end(topic)
    found = it.happened()
    lost = set(ids) - set(found)
    doubled = sum(found.values()) - len(found)
    print(f"{setup}: {KILLS} kills, {len(ids)} ids, half of them sent twice, {len(failing)} failing at first: lost {len(lost)}, "
          f"of which had failed {len(lost & failing)}; doubled {doubled}; announced as unknown {it.unknown:.0f}; letters {len(topic.letters())}")
    assert found
    if setup in ARTICLE:
        return
    assert not lost and not topic.letters()
    assert doubled == 0 if it.exact else doubled <= min(KILLS * CONCURRENCY, it.unknown)
