"""Consumers that are killed at every step, on real brokers and databases: nothing lost, nothing done twice that is not counted.
Each strategy is killed at each step at each broker; SEMEL_CRASHES=all: with each of its databases, too."""
import os
import random
import signal
import time

import pytest

import consumers
from consumers import Orders, Rows, consumer, happens, message, settles
from harness import eventually

CONCURRENCY = 4
LEASE = {"lease": "1s"}  # what a killed process had claimed waits for its end
# In the order in which a message passes them.
POINTS = ["claim.before=kill", "claim.after=kill", "effect.before=kill", "effect.after=kill", "record.after=kill", "letter.after=kill",
          "settle.after=kill"]
SETUPS = ["store-rocksdb", "store-redis", "table-postgres", "table-mysql", "transaction-postgres", "transaction-mysql", "state-postgres",
          "state-mysql"]
ALL = os.environ.get("SEMEL_CRASHES") == "all"


def points_of(setup, broker):
    """The two setups of a strategy take turns with the points, the other way round at the other broker: each has all of them, in sum."""
    return POINTS if ALL else POINTS[(SETUPS.index(setup) + (broker == "rabbitmq")) % 2::2]


class Setup:
    """One strategy with its effects, and what a message must look like to fail for good."""

    def __init__(self, name, request):
        self.strategy, where = name.split("-")
        self.store = None
        if self.strategy == "store":
            self.effects = request.getfixturevalue("service")
            self.effects.rule = lambda asked: 422 if asked.id.startswith("bad") else None
            self.parts = [self.effects.handler]
            if where == "redis":
                self.store = request.getfixturevalue("redis_servers")("--appendonly", "yes")
            return
        server = request.getfixturevalue("databases")(where)
        if self.strategy == "table":
            self.effects = request.getfixturevalue("service")
            self.effects.rule = lambda asked: 422 if asked.id.startswith("bad") else None
            self.parts = [self.effects.handler, {"strategy": "table", "database": {where: {"url": server.url()}}}]
        else:
            self.effects = (Rows if self.strategy == "transaction" else Orders)(server)
            self.parts = [self.effects.handler]

    def messages(self, ids):
        """Bad ones: the transaction's row breaks a constraint, the state machine's order does not exist."""
        good = [id for id in ids if not id.startswith("bad")]
        if self.strategy == "state":
            self.effects.open(*good)
        return [message(id, k="k", amount=-1 if id.startswith("bad") else 1, transaction=f"t-{id}") for id in ids]

    @property
    def exact(self):
        return self.strategy in ("transaction", "state")


@pytest.mark.parametrize("setup", SETUPS)
def test_a_kill_at_any_step_loses_nothing_and_what_is_doubled_is_counted(setup, place, run, request):
    points, setup = points_of(setup, place.kind), Setup(setup, request)
    # A static member takes its partitions over without waiting for the end of its own session.
    source = place.source(instance_id="one") if place.kind == "kafka" else place.source()
    semel = run(consumer(place, *setup.parts, source=source, concurrency=CONCURRENCY, retry={"attempts": 1}, breaker={"dead_share": "0%"}),
                store=setup.store, started=False, engine=LEASE)
    bad = []
    for step, point in enumerate(points):
        good = [f"m{step}-{i}" for i in range(10)]
        bad.append(f"bad{step}")
        batch = setup.messages([*good, bad[-1]])
        place.send(*batch, *random.Random(step).sample(batch[:10], 3))
        semel.launch(fault=f"consumer.{point}")
        assert semel.wait_dead(30) == -9, f"{point} was not passed"
        semel.start()
        effects = happens(setup.effects, good)
        settles(place)
        doubled = {id: effects[id] for id in good if effects[id] != 1}
        if setup.exact:
            assert not doubled, point
        else:
            extra = sum(doubled.values()) - len(doubled)
            assert extra <= CONCURRENCY and extra <= semel.metric("semel_message_unknown_outcomes_total"), (point, doubled)
        semel.kill()
    letters = place.letters()
    assert {letter.header("semel-message-id") for letter in letters} == set(bad)
    # A letter may be there twice, under the same id: it is published again unless its mark is durable.
    assert len({letter.header("semel-letter-id") for letter in letters}) == len(bad) and len(letters) <= len(bad) + len(points)
    if setup.strategy in ("state", "transaction"):
        assert not any(id.startswith("bad") for id in setup.effects.effects())


def test_ten_kills_with_good_messages_in_flight_make_no_dead_letter(place, service, run):
    """`attempts` counts answers of the handler: deaths of the process are not the messages'."""
    ids = [f"m{i}" for i in range(120)]
    begun = []

    def rule(asked):
        begun.append(asked.id)
        time.sleep(0.1)
    service.rule = rule
    source = place.source(instance_id="one") if place.kind == "kafka" else place.source()
    semel = run(consumer(place, service.handler, source=source, concurrency=100, retry={"attempts": 3, "crashes": 5}), started=False,
                engine=LEASE)
    place.send(*[message(id) for id in ids])
    for _ in range(10):
        before = len(begun)
        semel.launch()
        eventually(lambda: len(begun) > before, 20, "a handler runs")
        semel.kill()
    semel.start()
    happens(service, ids, 60)
    settles(place)
    assert not place.letters()


def test_a_message_that_kills_the_process_is_given_up_and_its_neighbours_are_not(place, service, run):
    """Each time it runs, the process dies: among others it is suspected, alone it is charged."""
    ids = [f"m{i}" for i in range(99)]
    source = place.source(instance_id="one") if place.kind == "kafka" else place.source()
    semel = run(consumer(place, service.handler, source=source, concurrency=100, retry={"attempts": 3, "crashes": 2}), started=False)

    def rule(asked):
        if asked.id == "poison":
            semel.process.send_signal(signal.SIGSEGV)
            semel.process.wait(20)  # or it could still hear an answer
            return 500
        return None
    service.rule = rule
    place.send(*[message(id) for id in ids[:50]], message("poison"), *[message(id) for id in ids[50:]])

    def dead():
        return semel.process.poll() is not None
    for _ in range(20):
        semel.launch()  # and not start(): it may be dead before anybody has seen it ready
        eventually(lambda: dead() or place.letters(), 40, "it dies, or gives up")
        if not dead():
            break
    happens(service, ids)
    settles(place)
    letters = place.letters()
    assert {letter.header("semel-message-id") for letter in letters} == {"poison"}
    assert letters[0].header("semel-error-class") == "crashes"
    assert service.asked["poison"] == 4  # twice among others, twice alone


def test_a_clean_end_leaves_no_unknown_outcome_and_no_second_run(place, service, run):
    """SIGTERM to one process after another while messages come: what runs ends, the rest is given back."""
    service.rule = lambda asked: time.sleep(0.02)
    ids = [f"m{i}" for i in range(400)]
    source = place.source(instance_id="one") if place.kind == "kafka" else place.source()
    semel = run(consumer(place, service.handler, source=source, concurrency=8))
    place.send(*[message(id) for id in ids])
    unknown = 0
    for stop in range(3):
        eventually(lambda: len(service.effects()) >= 80 * (stop + 1), 20, f"enough for end {stop + 1}")
        unknown += semel.metric("semel_message_unknown_outcomes_total")
        assert semel.stop() == 0
        semel.start()
    found = happens(service, ids)
    assert set(found.values()) == {1} and unknown + semel.metric("semel_message_unknown_outcomes_total") == 0


def test_members_that_are_ended_in_turn_hand_over_and_no_outcome_is_unknown(kafka, redis_servers, service, run):
    """A rolling restart beside handlers of 5 ms and of 2 s, twice."""
    topic, store = consumers.Topic(kafka, partitions=6), redis_servers("--appendonly", "yes")
    service.rule = lambda asked: time.sleep(2 if asked.id.startswith("slow") else 0.005)
    entry = consumer(topic, service.handler, source=topic.source(drain="10s"), concurrency=8)
    members = [run(entry, store=store) for _ in range(3)]
    ids, unknown = [], 0
    for step, member in enumerate(members * 2):
        ids += (new := [f"slow{step}-{i}" for i in range(6)] + [f"m{step}-{i}" for i in range(300)])
        topic.send(*[message(id) for id in new])
        eventually(lambda: service.running > 0 and service.effects()[f"m{step}-0"], 30, "it works")
        unknown += member.metric("semel_message_unknown_outcomes_total")
        assert member.stop() == 0
        member.start()
    found = happens(service, ids, 60)
    settles(topic)
    unknown += sum(member.metric("semel_message_unknown_outcomes_total") for member in members)
    assert set(found.values()) == {1} and unknown == 0 and not topic.letters()
