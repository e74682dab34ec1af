"""Numbered messages, copies of a fifth of them, three consumer processes that are killed and stopped in turn, and a broker that is killed:
every number once, the order of each key kept. SEMEL_BOUNCE_MESSAGES says how many (20,000)."""
import os
import random

import pytest

import consumers
from consumers import Rows, consumer, message
from harness import background, eventually
from kafka_server import KafkaServer

MESSAGES = int(os.environ.get("SEMEL_BOUNCE_MESSAGES", 20_000))
KEYS = 50
MEMBERS = 3
SECONDS = 120 + MESSAGES // 200


@pytest.fixture
def broker():
    server = KafkaServer()
    yield server
    server.clean_up()


def numbered(chosen):
    """Half of them keyed, their copies behind them under the same key; half without, their copies anywhere. (number, key) each."""
    sequence, copies = [], []
    for number in range(MESSAGES):
        key = f"k{chosen.randrange(KEYS)}" if number % 2 else None
        sequence.append((number, key))
        if chosen.random() < 0.2:
            copies.append((number, key))
        if len(copies) > 100:
            chosen.shuffle(copies)
            sequence += copies
            copies = []
    return sequence + copies


def test_every_number_once_and_every_key_in_order_while_consumers_and_broker_are_bounced(broker, databases, run):
    chosen = random.Random(20261130)
    topic, rows = consumers.Topic(broker, partitions=8), Rows(databases("postgres"))
    sequence = numbered(chosen)
    sent = background(topic.send, *[message(f"m{n}", key, k=key or "none", amount=n) for n, key in sequence])
    members = [run(consumer(topic, rows.handler, ordering="key", concurrency=16), store=rows.server) for _ in range(MEMBERS)]
    bounces = [(member, clean) for clean in (False, True) for member in range(MEMBERS)] + [(None, None)]
    for step, (member, clean) in enumerate(bounces):
        goal = MESSAGES * (step + 1) // (len(bounces) + 2)
        eventually(lambda: rows.count() >= goal, SECONDS, f"{goal} effects before bounce {step + 1}")
        if member is None:
            broker.restart()
            continue
        if clean:
            assert members[member].stop() == 0
        else:
            members[member].kill()
        members[member].start()
    sent.result(SECONDS)
    eventually(lambda: rows.count() >= MESSAGES, SECONDS, "all effects")
    consumers.settles(topic, 60)
    found = rows.effects()
    assert len(found) == MESSAGES and set(found.values()) == {1}
    assert not topic.letters()
    for key in range(KEYS):
        numbers = [int(id[1:]) for id in rows.of_key(f"k{key}")]
        assert numbers == sorted(numbers), f"k{key}"
    assert sum(member.metric("semel_message_unknown_outcomes_total") for member in members) == 0


@pytest.mark.parametrize("setup", ["store-redis", "table-postgres"])
def test_with_a_handler_elsewhere_clean_ends_and_a_broker_that_is_killed_double_nothing(setup, broker, databases, redis_servers, service, run):
    topic = consumers.Topic(broker, partitions=6)
    store = redis_servers("--appendonly", "yes") if setup == "store-redis" else databases("postgres")
    part = {} if setup == "store-redis" else {"strategy": "table", "database": {"postgres": {"url": store.url()}}}
    chosen = random.Random(3)
    count = MESSAGES // 10
    ids = [f"m{i}" for i in range(count)]
    topic.send(*[message(id) for id in ids + chosen.sample(ids, count // 5)])
    members = [run(consumer(topic, service.handler, part, concurrency=8), store=store) for _ in range(2)]
    for step, member in enumerate(members):
        eventually(lambda: sum(service.effects().values()) >= count * (step + 1) // 4, SECONDS, f"enough before end {step + 1}")
        assert member.stop() == 0
        member.start()
    broker.restart()
    found = consumers.happens(service, ids, SECONDS)
    consumers.settles(topic, 60)
    assert set(found.values()) == {1} and not topic.letters()
