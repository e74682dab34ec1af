"""Order: by key (the default on Kafka), by partition, none; with failures in the middle."""
import collections
import random
import time

import pytest

import consumers
from consumers import Rows, consumer, happens, message, settles
from harness import eventually


def keyed(service):
    """key -> the ids of its effects, in their order."""
    found = collections.defaultdict(list)
    for id in list(service.happened):
        found[id.partition("-")[0]].append(id)
    return found


def test_each_keys_messages_are_handled_in_order_whatever_fails_in_between(topic, service, run):
    chosen = random.Random(5)
    failing = {f"k{k}-{n}": chosen.randrange(1, 3) for k in range(10) for n in range(30) if chosen.random() < 0.15}

    def rule(asked):
        time.sleep(chosen.random() / 200)
        return 500 if asked.number <= failing.get(asked.id, 0) else None
    service.rule = rule
    run(consumer(topic, service.handler, ordering="key", concurrency=8))
    ids = [f"k{k}-{n}" for n in range(30) for k in range(10)]
    topic.send(*[message(id, key=id.partition("-")[0]) for id in ids])
    happens(service, ids, 60)
    settles(topic)
    assert keyed(service) == {f"k{k}": [f"k{k}-{n}" for n in range(30)] for k in range(10)}
    assert service.running_most > 1 and not topic.letters()


def test_the_order_of_each_key_outlives_failures_and_members_that_come_and_go(topic, redis_servers, service, run):
    """Messages wait behind failed ones while others arrive and partitions move: a second member joins, the first one leaves and comes back."""
    chosen, store = random.Random(8), redis_servers()
    ids = [f"k{k}-{n}" for n in range(60) for k in range(12)]
    failing = {id: chosen.randrange(1, 4) for id in ids if chosen.random() < 0.08}

    def rule(asked):
        time.sleep(0.005)
        return 500 if asked.number <= failing.get(asked.id, 0) else None
    service.rule = rule
    entry = consumer(topic, service.handler, ordering="key", concurrency=8, retry={"attempts": 5, "backoff": {"initial": "200ms", "max": "500ms"}})
    first = run(entry, store=store)
    arrivals = consumers.Arrivals(topic, ids)
    arrivals.to(0.3)
    eventually(lambda: len(service.effects()) >= len(ids) // 8, 20, "it works")
    eventually(lambda: consumers.state_of(first)["parked"] > 0, 20, "some wait behind failed ones")
    arrivals.to(0.5)
    second = run(entry, store=store)
    arrivals.to(0.7)
    eventually(lambda: topic.server.working_members(topic.group) == 2, 20, "both have partitions")
    assert first.stop() == 0
    arrivals.to(0.9)
    first.start()
    arrivals.to(1)
    found = happens(service, ids, 60)
    settles(topic)
    assert set(found.values()) == {1} and not topic.letters() and second.process.poll() is None
    assert keyed(service) == {f"k{k}": [f"k{k}-{n}" for n in range(60)] for k in range(12)}


def test_a_failed_message_holds_its_own_key_and_no_other(topic, service, run):
    stuck = {"now": True}
    service.rule = lambda asked: 500 if asked.id == "a-1" and stuck["now"] else None
    semel = run(consumer(topic, service.handler, ordering="key", retry={"attempts": 1000, "backoff": {"initial": "50ms", "max": "100ms"}}))
    a, b = [f"a-{n}" for n in range(20)], [f"b-{n}" for n in range(20)]
    topic.send(*[message(id, key=id[0], partition=0) for pair in zip(a, b) for id in pair])  # one partition
    happens(service, ["a-0", *b])
    eventually(lambda: consumers.state_of(semel)["parked"] == 18, what="18 wait behind the failed one")
    assert keyed(service)["a"] == ["a-0"]
    semel.stop()  # a restart does not lose the order
    semel.start()
    stuck["now"] = False
    happens(service, a)
    settles(topic)
    assert keyed(service)["a"] == a and keyed(service)["b"] == b


def test_a_message_that_is_given_up_lets_its_followers_go_in_order(topic, service, run):
    service.rule = lambda asked: 422 if asked.id == "a-1" else None
    run(consumer(topic, service.handler, ordering="key"))
    topic.send(*[message(f"a-{n}", key="a") for n in range(5)])
    happens(service, ["a-0", "a-2", "a-3", "a-4"])
    settles(topic)
    assert keyed(service)["a"] == ["a-0", "a-2", "a-3", "a-4"]
    assert [letter.header("semel-message-id") for letter in topic.letters()] == ["a-1"]


def test_when_too_many_wait_behind_a_failed_one_their_partition_pauses_and_the_others_flow(topic, service, run):
    stuck = {"now": True}
    service.rule = lambda asked: 500 if asked.id == "a-0" and stuck["now"] else None
    semel = run(consumer(topic, service.handler, ordering="key", park_limit=10,
                         retry={"attempts": 1000, "backoff": {"initial": "50ms", "max": "100ms"}}))
    a = [f"a-{n}" for n in range(400)]
    topic.send(*[message(id, key="a", partition=0) for id in a], *[message(f"b-{n}", key="b", partition=1) for n in range(50)])
    happens(service, [f"b-{n}" for n in range(50)])
    eventually(lambda: consumers.state_of(semel)["alarms"], what="an alarm")
    stuck["now"] = False
    happens(service, a)
    settles(topic)
    assert keyed(service)["a"] == a


@pytest.mark.parametrize("kind", ["postgres", "mysql"])
def test_by_partition_effects_and_position_are_one_transaction_in_order(kind, topic, databases, run):
    rows = Rows(databases(kind))
    ids = [f"m{n}" for n in range(300)]
    topic.send(*[message(id, k="p", amount=1, partition=0) for id in ids])
    semel = run(consumer(topic, rows.handler, source=topic.source(instance_id="one"), ordering="partition"), store=rows.server)
    eventually(lambda: rows.count() > 0, 20, "some are done")
    semel.kill()
    semel.start()
    happens(rows, ids)
    settles(topic)
    assert rows.of_key("p") == ids
    column = "partition" if kind == "postgres" else "`partition`"
    assert consumers.in_database(rows.server, f"SELECT next_offset FROM semel_offsets WHERE topic = '{topic.name}' AND {column} = 0") == [["300"]]


def test_two_members_whose_lanes_hold_each_others_messages_do_not_wait_for_ever(topic, redis_servers, service, run):
    """The same two ids in opposite orders on two partitions, again and again."""
    store = redis_servers()
    for _ in range(2):
        run(consumer(topic, service.handler, ordering="partition"), store=store)
    eventually(lambda: topic.server.working_members(topic.group) == 2, 20, "both have partitions")
    ids = []
    for n in range(40):
        x, y = f"x{n}", f"y{n}"
        ids += [x, y]
        for partition in range(4):
            topic.send(*[message(id, partition=partition) for id in ((x, y) if partition % 2 else (y, x))])
    found = happens(service, ids, 60)
    settles(topic, 60)
    assert set(found.values()) == {1}
