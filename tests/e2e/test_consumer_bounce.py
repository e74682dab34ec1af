"""Numbered messages, copies of a fifth of them, three consumer processes that are killed and stopped in turn, and a broker that is killed:
every number once, the order of each key kept. SEMEL_BOUNCE_MESSAGES says how many (20,000), SEMEL_BOUNCES how often each of the three is
killed, how often stopped, and how often the broker is killed (3)."""
import collections
import os
import random
import time

import pytest

import consumers
from consumers import Rows, consumer, message
from harness import background, eventually
from kafka_server import KafkaServer

MESSAGES = int(os.environ.get("SEMEL_BOUNCE_MESSAGES", 20_000))
BOUNCES = int(os.environ.get("SEMEL_BOUNCES", 3))
KEYS = 50
MEMBERS = 3
CONCURRENCY = 16
SECONDS = 120 + MESSAGES // 200


@pytest.fixture(scope="module")
def broker():
    """Each of these tests kills it, and leaves it running."""
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


class Numbers:
    """Where effects are counted: rows in one transaction with their ids, or a service elsewhere and its ids in Redis."""

    def __init__(self, setup, request):
        self.exact = setup == "transaction-postgres"
        if self.exact:
            self.effects = Rows(request.getfixturevalue("databases")("postgres"))
            self.store = self.effects.server
            self.count = self.effects.count
        else:
            self.effects = request.getfixturevalue("service")
            self.store = request.getfixturevalue("redis_servers")("--appendonly", "yes")
            self.count = lambda: len(self.effects.happened)  # those that happened twice make no difference

    def by_key(self, keys):
        """key -> the numbers in the order in which their effects first happened."""
        if self.exact:
            return {key: [int(id[1:]) for id in self.effects.of_key(key)] for key in set(keys.values())}
        found = collections.defaultdict(list)
        for id in dict.fromkeys(self.effects.happened):
            found[keys.get(number := int(id[1:]))].append(number)
        found.pop(None, None)
        return found


@pytest.mark.parametrize("setup", ["transaction-postgres", "store-redis"])
def test_every_number_once_and_every_key_in_order_while_consumers_and_broker_are_bounced(setup, broker, run, request):
    """With a service elsewhere those that a killed process had in work may happen twice, no others."""
    numbers, topic = Numbers(setup, request), consumers.Topic(broker, partitions=8)
    sequence = numbered(random.Random(20261130))
    sent = background(topic.send, *[message(f"m{n}", key, k=key or "none", amount=n) for n, key in sequence])
    entry = consumer(topic, numbers.effects.handler, ordering="key", concurrency=CONCURRENCY)
    members = [run(entry, store=numbers.store) for _ in range(MEMBERS)]
    one_round = [(member, how) for how in ("kill", "stop") for member in range(MEMBERS)] + [(None, "broker")]
    bounces, unknown, begun = one_round * BOUNCES, 0, time.monotonic()
    for step, (member, how) in enumerate(bounces):
        goal = MESSAGES * (step + 1) // (len(bounces) + 2)
        eventually(lambda: numbers.count() >= goal, SECONDS, f"{goal} effects before bounce {step + 1}")
        print(f"{time.monotonic() - begun:.1f} s, {goal} effects: {how} {'' if member is None else member}")
        if how == "broker":
            broker.restart()
            continue
        unknown += members[member].metric("semel_message_unknown_outcomes_total")
        if how == "kill":
            members[member].kill()
        else:
            assert members[member].stop() == 0
        members[member].start()
    sent.result(SECONDS)
    eventually(lambda: numbers.count() >= MESSAGES, SECONDS, "all effects")
    consumers.settles(topic, 120)
    unknown += sum(member.metric("semel_message_unknown_outcomes_total") for member in members)
    found = numbers.effects.effects()
    doubled = sum(found.values()) - len(found)
    print(f"{setup}: {MESSAGES} numbers in {len(sequence)} messages, {len(bounces)} bounces: lost {MESSAGES - len(found)}, doubled {doubled}, "
          f"unknown outcomes {unknown}")
    assert len(found) == MESSAGES and not topic.letters()
    if numbers.exact:
        assert doubled == 0 and unknown == 0
    else:
        assert doubled <= BOUNCES * MEMBERS * CONCURRENCY
    keys = {n: key for n, key in sequence if key}
    for key, of_it in numbers.by_key(keys).items():
        assert of_it == sorted(n for n in keys if keys[n] == key), key


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
