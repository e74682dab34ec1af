"""What stands in a topic beside messages, and positions that are gone: nothing is skipped, nothing stays behind."""
import json

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

import consumers
from consumers import Rows, consumer, happens, message, settles
from harness import eventually


@pytest.fixture(params=["store", "transaction-postgres", "transaction-mysql"])
def effects(request, databases, service):
    return service if request.param == "store" else Rows(databases(request.param.partition("-")[2]))


def in_transactions(topic, *parts):
    """parts: (messages, whether they are committed)."""
    producer = Producer({"bootstrap.servers": topic.server.address, "transactional.id": f"{topic.name}-pen", "log_level": 0})
    producer.init_transactions(20)
    for messages, committed in parts:
        producer.begin_transaction()
        for one in messages:
            producer.produce(topic.name, one.value, one.key, one.partition)
        producer.flush(20)
        producer.commit_transaction(20) if committed else producer.abort_transaction(20)


def lag_of(semel):
    done = semel.command_line("consumer", "lag", "under-test", "--config", semel.config_file, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["lag"]


def test_markers_aborted_records_and_holes_of_compaction_leave_no_lag(effects, kafka, run):
    topic = consumers.Topic(kafka, partitions=2, cleanup_policy="compact", segment_ms=100, min_cleanable_dirty_ratio=0.01, delete_retention_ms=0)

    def numbered(*ids, partition):
        return [message(id, key=id, partition=partition, k="k", amount=1) for id in ids]
    # Of a key's copies all but the last are cleaned away: holes in front of, between and behind what stays.
    for round_ in range(20):
        topic.send(*numbered(*[f"hole{i}" for i in range(5)], partition=0), *numbered(f"m{round_}", partition=0))
    in_transactions(topic, (numbered("t1", "t2", partition=0), True), (numbered("gone1", partition=0), False),
                    (numbered("gone2", "gone3", partition=1), False), (numbered("t3", partition=1), True), (numbered("gone4", partition=1), False))
    ids = [*[f"hole{i}" for i in range(5)], *[f"m{i}" for i in range(20)], "t1", "t2", "t3"]

    def compacted():
        topic.send(*numbered("roll", partition=0))  # the segment that is written to is not cleaned
        return len(topic.server.read(topic.name)) < 80
    eventually(compacted, 60, "the log was cleaned")
    semel = run(consumer(topic, effects.handler, source=topic.source(instance_id="one")))
    found = happens(effects, [*ids, "roll"])
    settles(topic)
    assert set(found) == {*ids, "roll"} and set(found.values()) == {1}
    assert eventually(lambda: lag_of(semel) == 0, 20, "no lag")
    semel.kill()
    semel.start()  # where it stands is behind markers
    topic.send(*numbered("after", partition=1))
    happens(effects, ["after"])
    settles(topic)
    assert set(effects.effects().values()) == {1} and not topic.letters()


def test_a_position_that_has_expired_is_an_alarm_and_nobody_guesses(effects, topic, run):
    """Retention passed what was not read. The partition waits for a person; the others go on."""
    semel = run(consumer(topic, effects.handler))
    topic.send(*[message(f"a{i}", partition=0, k="k", amount=1) for i in range(10)])
    settles(topic)
    semel.stop()
    eventually(lambda: not topic.server.members(topic.group), 20, "the group is empty")
    topic.send(*[message(f"b{i}", partition=0, k="k", amount=1) for i in range(20)])
    [deleted] = topic.server.admin.delete_records([TopicPartition(topic.name, 0, 25)]).values()
    deleted.result(20)
    semel.start()
    eventually(lambda: any("reset" in alarm and f"{topic.name}" in alarm for alarm in consumers.state_of(semel)["alarms"]), 30, "an alarm")
    topic.send(message("c", partition=1, k="k", amount=1))
    happens(effects, ["c"])
    assert "b19" not in effects.effects() and semel.ask_admin("/readyz").status == 200
    semel.stop()
    eventually(lambda: not topic.server.members(topic.group), 20, "the group is empty")
    done = semel.command_line("consumer", "reset", "under-test", "--config", semel.config_file, "--to", "earliest", "--yes")
    assert done.returncode == 0, done.stderr
    semel.start()
    found = happens(effects, [f"b{i}" for i in range(15, 20)])
    settles(topic)
    assert set(found) == {"c", *[f"a{i}" for i in range(10)], *[f"b{i}" for i in range(15, 20)]} and set(found.values()) == {1}


def visit(topic):
    """A member that is no consumer of ours joins the group, has partitions for a moment, and leaves: two rebalances."""
    guest = Consumer({"bootstrap.servers": topic.server.address, "group.id": topic.group, "enable.auto.commit": False, "log_level": 0,
                      "session.timeout.ms": 1500, "heartbeat.interval.ms": 50})
    guest.subscribe([topic.name])
    eventually(lambda: guest.poll(0.02) or guest.assignment(), 20, "the guest has partitions")
    guest.close()


def test_positions_of_a_quiet_topic_outlive_fifty_rebalances(effects, topic, run):
    """Nothing is read again, and nothing is skipped afterwards."""
    store = effects.server if isinstance(effects, Rows) else None
    more = {"accept": ["unshared_store"], "source": topic.source({"heartbeat.interval.ms": 50})}
    first = run(consumer(topic, effects.handler, **more), store=store)
    topic.send(*[message(f"m{i}", partition=i % 4, k="k", amount=1) for i in range(20)])
    happens(effects, [f"m{i}" for i in range(20)])
    settles(topic)
    stands = topic.server.committed(topic.group, topic.name)
    second = run(consumer(topic, effects.handler, **more), store=store, started=False)
    for _ in range(20):
        visit(topic)
        eventually(lambda: len(consumers.state_of(first)["partitions"]) == 4, 20, "the first one has all again")
        assert topic.server.committed(topic.group, topic.name) == stands
    for _ in range(5):
        second.start()
        eventually(lambda: topic.server.working_members(topic.group) == 2, 20, "two have partitions")
        second.stop()
        eventually(lambda: len(topic.server.members(topic.group)) == 1, 20, "it has left")
        assert topic.server.committed(topic.group, topic.name) == stands
    topic.send(*[message(f"n{i}", partition=i % 4, k="k", amount=1) for i in range(8)])
    found = happens(effects, [f"n{i}" for i in range(8)])
    settles(topic)
    assert len(found) == 28 and set(found.values()) == {1}
    assert first.metric("semel_duplicates_suppressed_total") == 0
