"""Failed messages that wait beside the records (`retry.wait: store`), and those behind them: the broker may forget them, the order of
their keys does not."""
import collections
import random

import pytest

import consumers
from consumers import Rows, consumer, dies, happens, in_database, message, settles
from harness import Died, eventually

# Longer than what is waited for in hand.
IN_STORE = {"attempts": 1, "delays": ["4s"], "wait": "store"}


def ids_of(key, start, end):
    return [f"{key}-{n}" for n in range(start, end)]


def keyed(service):
    """key -> the ids of its effects, in their order."""
    found = collections.defaultdict(list)
    for id in list(service.happened):
        found[id.partition("-")[0]].append(id)
    return found


def in_store(semel):
    return semel.metric("semel_retry_in_store")


@pytest.fixture(params=["rocksdb", "redis", "postgres", "mysql"])
def store(request, redis_servers, databases):
    """None: the embedded one."""
    if request.param == "rocksdb":
        return None
    return redis_servers("--appendonly", "yes") if request.param == "redis" else databases(request.param)


def test_a_lane_that_waits_is_settled_at_the_broker_and_comes_back_in_its_order_after_a_kill(store, topic, service, run):
    """Its followers with it; what arrives meanwhile goes behind; a process that is killed finds all of it again."""
    service.rule = lambda asked: 500 if asked.id == "a-1" and asked.number == 1 else None
    semel = run(consumer(topic, service.handler, source=topic.source(instance_id="one"), ordering="key", retry={**IN_STORE, "delays": ["10s"]}), store=store)
    pairs = [id for pair in zip(ids_of("a", 0, 30), ids_of("b", 0, 30)) for id in pair]
    topic.send(*[message(id, key=id[0], partition=0) for id in pairs])
    happens(service, ["a-0", *ids_of("b", 0, 30)])
    eventually(lambda: in_store(semel) == 29, what="a-1 and what is behind it wait beside the records")
    settles(topic)
    assert keyed(service)["a"] == ["a-0"]
    semel.kill()
    topic.send(*[message(id, key="a", partition=0) for id in ids_of("a", 30, 40)])
    semel.start()
    happens(service, ids_of("a", 0, 40), 40)
    settles(topic)
    eventually(lambda: in_store(semel) == 0, what="nothing is left beside the records")
    assert keyed(service) == {"a": ids_of("a", 0, 40), "b": ids_of("b", 0, 30)}
    assert service.asked["a-1"] == 2, "it was not due before" and not topic.letters()


@pytest.mark.parametrize("point", ["park.before", "park.after", "park.after:20", "unpark.before"])
@pytest.mark.parametrize("kind", ["store", "transaction"])
def test_a_kill_around_the_parking_loses_and_doubles_nothing_and_keeps_each_keys_order(kind, point, topic, databases, redis_servers, service, run):
    ids = [f"{key}-{n}" for n in range(12) for key in "ab"]
    if kind == "transaction":
        rows = Rows(databases("postgres"))
        # b-3 has no parent yet: its effect breaks the constraint until the row is there.
        in_database(rows.server, "CREATE TABLE parents (id varchar(100) PRIMARY KEY)")
        in_database(rows.server, "INSERT INTO parents SELECT 'x'")
        entry = rows.handler
        entry["handler"]["sql"] = {"params": {"id": {"json": "/id"}, "k": {"json": "/k"}}, "statements": [
            "INSERT INTO effects (message_id, k, amount) SELECT :id, :k, 1 WHERE :id <> 'b-3' OR EXISTS (SELECT 1 FROM parents WHERE id = 'b-3')"]}
        effects, shared = rows, rows.server
    else:
        service.rule = lambda asked: 500 if asked.id == "b-3" and asked.number == 1 else None
        entry, effects, shared = service.handler, service, redis_servers("--appendonly", "yes")
    semel = run(consumer(topic, entry, source=topic.source(instance_id="one"), ordering="key", retry={**IN_STORE, "delays": ["4s", "4s", "4s"]}),
                store=shared, started=False)
    topic.send(*[message(id, key=id[0], partition=0, k=id[0]) for id in ids])
    name, _, nth = point.partition(":")
    semel.launch(fault=f"consumer.{name}=kill" + (f":{nth}" if nth else ""))
    if kind == "transaction" and name == "unpark.before":
        eventually(lambda: "a-11" in rows.effects(), what="the other key is done")
        in_database(rows.server, "INSERT INTO parents SELECT 'b-3'")
    if point == "park.after:20":
        topic.send(*[message(f"b-{n}", key="b", partition=0, k="b") for n in range(12, 40)])
        ids += ids_of("b", 12, 40)
    assert semel.wait_dead(40) == -9, f"{point} was not passed"
    if kind == "transaction" and name != "unpark.before":
        in_database(rows.server, "INSERT INTO parents SELECT 'b-3'")
    semel.start()
    happens(effects, ids, 40)
    settles(topic)
    eventually(lambda: in_store(semel) == 0, what="nothing is left beside the records")
    assert not topic.letters()
    # Of each key one message may have been at the handler when the process died.
    again = sum(effects.effects().values()) - len(ids)
    assert set(effects.effects()) == set(ids) and again <= (0 if kind == "transaction" else 2)
    for key in "ab":
        wanted = [id for id in ids if id[0] == key]
        assert (rows.of_key(key) if kind == "transaction" else list(dict.fromkeys(keyed(service)[key]))) == wanted


def test_each_keys_order_outlives_members_that_come_and_go_while_messages_wait(topic, redis_servers, service, run):
    """Two members; one leaves in order, one is killed; messages arrive all the while and 8 % of them fail once."""
    chosen, store = random.Random(11), redis_servers("--appendonly", "yes")
    ids = [f"k{k}-{n}" for n in range(60) for k in range(12)]
    failing = {id for id in ids if chosen.random() < 0.08}
    service.rule = lambda asked: 500 if asked.id in failing and asked.number == 1 else None
    entry = consumer(topic, service.handler, ordering="key", concurrency=8, retry={**IN_STORE, "delays": ["3s", "3s", "3s"]})
    first = run(entry, store=store)
    arrivals = consumers.Arrivals(topic, ids)
    arrivals.to(0.3)
    eventually(lambda: in_store(first) > 20, 20, "some wait beside the records")
    second = run(entry, store=store)
    arrivals.to(0.5)
    eventually(lambda: topic.server.working_members(topic.group) == 2, 20, "both have partitions")
    arrivals.to(0.7)
    eventually(lambda: in_store(first) + in_store(second) > 0, 20, "some still do")
    assert first.stop() == 0
    arrivals.to(0.9)
    first.start()
    eventually(lambda: topic.server.working_members(topic.group) == 2, 20, "both have partitions again")
    second.kill()
    arrivals.to(1)
    happens(service, ids, 90)
    settles(topic)
    eventually(lambda: in_store(first) == 0, what="nothing is left beside the records")
    order = {key: list(dict.fromkeys(found)) for key, found in keyed(service).items()}  # what ran when `second` died may have run twice
    assert order == {f"k{k}": [f"k{k}-{n}" for n in range(60)] for k in range(12)}
    assert not topic.letters()


def test_one_that_is_given_up_has_its_letter_with_where_it_lay_and_lets_its_followers_go(topic, redis_servers, service, run):
    service.rule = lambda asked: 500 if asked.id == "a-1" else None
    semel = run(consumer(topic, service.handler, ordering="key", retry={**IN_STORE, "delays": ["5s"]}), store=redis_servers())
    topic.send(*[message(id, key="a", headers=[("trace", b"a b")], partition=2) for id in ids_of("a", 0, 4)])
    eventually(lambda: semel.metric("semel_retry_stored_total") == 3, what="three have waited beside the records")
    [letter] = dies(topic)
    happens(service, ["a-0", "a-2", "a-3"])
    settles(topic)
    eventually(lambda: in_store(semel) == 0, what="nothing is left beside the records")
    assert keyed(service)["a"] == ["a-0", "a-2", "a-3"]
    assert letter.header("trace") == "a b" and letter.key == b"a"
    assert int.from_bytes(dict(letter.headers)["kafka_dlt-original-offset"], "big") == 1
    assert int.from_bytes(dict(letter.headers)["kafka_dlt-original-partition"], "big") == 2


def test_while_the_store_is_away_they_wait_in_hand_and_nothing_is_lost(topic, redis_servers, databases, run):
    rows, redis = Rows(databases("postgres")), redis_servers("--appendonly", "yes")
    in_database(rows.server, "CREATE TABLE parents (id varchar(100) PRIMARY KEY)")
    entry = rows.handler
    entry["handler"]["sql"] = {"params": {"id": {"json": "/id"}, "k": {"json": "/k"}}, "statements": [
        "INSERT INTO effects (message_id, k, amount) SELECT :id, :k, 1 WHERE :id <> 'a-1' OR EXISTS (SELECT 1 FROM parents)"]}
    semel = run(consumer(topic, entry, ordering="key", retry={**IN_STORE, "delays": ["4s"] * 20}), store=redis)
    redis.kill()
    topic.send(*[message(id, key="a", k="a", partition=0) for id in ids_of("a", 0, 5)])
    eventually(lambda: any("beside the records" in alarm for alarm in consumers.state_of(semel)["alarms"]), 40, "an alarm")
    assert topic.unsettled() >= 4
    redis.start()
    eventually(lambda: in_store(semel) == 4, 40, "they wait beside the records")
    settles(topic)
    in_database(rows.server, "INSERT INTO parents SELECT 'a-1'")
    happens(rows, ids_of("a", 0, 5), 40)
    eventually(lambda: in_store(semel) == 0, what="nothing is left beside the records")
    assert rows.of_key("a") == ids_of("a", 0, 5)


def test_a_store_that_other_members_do_not_see_is_refused(topic, databases, service, run):
    with pytest.raises(Died) as died:
        run(consumer(topic, Rows(databases("postgres")).handler, ordering="key", retry=IN_STORE))
    assert "retry.wait: store needs a store that every member of the group sees" in died.value.text
