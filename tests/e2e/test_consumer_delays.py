"""Failed messages that wait at the broker (`retry.wait: broker`): the originals are settled, the copies come when they are due."""
import json
import time

import pytest

import consumers
from consumers import Orders, Rows, consumer, dies, happens, message, raw, settles
from harness import Died, eventually
from kafka_server import KafkaServer
from rabbitmq_server import RabbitServer

AT_BROKER = {"attempts": 1, "backoff": {"initial": "50ms", "max": "200ms"}, "delays": ["1s"], "wait": "broker", "create": True}
SLACK = 30  # seconds that a busy machine may be late


def names(place, delays=("1s",)):
    """Where copies of the consumer `under-test` wait."""
    who = place.group if place.kind == "kafka" else "under-test"
    return [f"{place.name}.{who}.retry.{delay}" for delay in delays]


def waiting(place, delays=("1s",)):
    """How many copies wait."""
    count = place.server.unsettled if place.kind == "rabbitmq" else lambda name: place.server.lag(place.group, name)
    return sum(count(name) for name in names(place, delays))


def all_away(semel, count):
    """So many copies wait at the broker, and no message is in hand. Asked of the process: the brokers tell it too late."""
    eventually(lambda: semel.metric("semel_retry_copies_total") == count and consumers.state_of(semel)["in_hand"] == 0, what=f"{count} copies wait")


def all_settled(place, delays=("1s",), seconds=30):
    eventually(lambda: place.unsettled() == 0 and waiting(place, delays) == 0, seconds, f"all of {place.name} and its copies is settled")


# ---- what happens to one message -----------------------------------------------------------------------------------------------

def test_a_message_runs_its_attempts_and_then_once_after_each_delay(place, service, run):
    """In order and not early; while a copy waits nothing is unsettled; at last the letter says where the original lay."""
    times = []

    def rule(asked):
        times.append(time.monotonic())
        return 500
    service.rule = rule
    semel = run(consumer(place, service.handler, retry={**AT_BROKER, "attempts": 2, "delays": ["1s", "2s"]}))
    delays = ("1s", "2s")
    place.send(message("m", key="k", partition=2, headers=[("trace", b"a b")]))
    all_away(semel, 1)
    assert len(times) >= 2
    [letter] = dies(place)
    all_settled(place, delays)
    assert len(times) == 4 and service.asked["m"] == 4
    assert 0.99 <= times[2] - times[1] < 1 + SLACK and 1.99 <= times[3] - times[2] < 2 + SLACK
    assert json.loads(letter.value) == {"id": "m"} and letter.header("trace") == "a b" and letter.header("semel-failed-runs") == "4"
    assert letter.header("semel-original-source") == letter.header("semel-original-topic") == place.name
    assert letter.header("semel-due-timestamp") is None and letter.header("semel-copy-of") is None
    if place.kind == "kafka":
        assert letter.key == b"k"
        assert (letter.header("semel-original-partition"), letter.header("semel-original-offset")) == ("2", "0")
        headers = dict(letter.headers)
        assert headers["kafka_dlt-original-topic"] == place.name.encode()
        assert int.from_bytes(headers["kafka_dlt-original-partition"], "big") == 2
        assert int.from_bytes(headers["kafka_dlt-original-offset"], "big") == 0
    assert semel.metric("semel_retry_copies_total") == 2 and semel.metric("semel_retry_copies_failed_total") == 0
    assert semel.metric("semel_message_retries_total") == 3


def test_a_copy_reaches_the_handler_with_every_byte_and_under_the_same_id(place, service, run):
    service.rule = lambda asked: 500 if asked.number == 1 else None
    value = b'\x00\xff{"not": "utf-8"}'
    run(consumer(place, service.handler, payload="bytes", id={"header": "message-id"}, retry=AT_BROKER))
    place.send(raw(value, b"\x01key" if place.kind == "kafka" else None, [("message-id", b"m"), ("trace", b"a b")], partition=1))
    assert happens(service, ["m"]) == {"m": 1}
    all_settled(place)
    first, second = service.calls
    assert first.body == second.body == value
    for name in ("Idempotency-Key", "Semel-Topic", "Semel-Partition", "Semel-Offset", "Semel-Key"):
        assert first.header(name) == second.header(name), name
    assert (first.header("Semel-Attempt"), second.header("Semel-Attempt")) == ("1", "2")


def test_without_an_id_the_position_of_the_original_stands_for_it_in_its_copies(topic, service, run):
    service.rule = lambda asked: 500 if asked.number == 1 else None
    run(consumer(topic, service.handler, on_missing_id="offset", retry=AT_BROKER))
    topic.send(raw(b"{}", partition=3))
    assert happens(service, [f"{topic.name}-3-0"]) == {f"{topic.name}-3-0": 1}
    all_settled(topic)
    assert len(service.asked) == 1


def test_a_producers_duplicate_of_a_waiting_message_has_no_second_effect(place, service, run):
    service.rule = lambda asked: 500 if asked.number == 1 else None
    semel = run(consumer(place, service.handler, retry=AT_BROKER))
    place.send(message("m"))
    all_away(semel, 1)
    place.send(message("m"), message("m"))
    happens(service, ["m"])
    all_settled(place)
    assert service.effects() == {"m": 1} and service.asked["m"] == 2


@pytest.mark.parametrize("strategy", ["table-postgres", "transaction-postgres", "transaction-mysql", "state-mysql"])
def test_every_strategy_finds_its_message_again_in_the_copy(strategy, place, databases, service, run):
    """What is missing at first is there when the copy comes; what breaks each time is a letter with the original's position."""
    kind, where = strategy.split("-")
    server = databases(where)
    if kind == "table":
        service.rule = lambda asked: 500 if asked.id == "bad" or asked.number == 1 else None
        effects, parts = service, [service.handler, {"strategy": "table", "database": {where: {"url": server.url()}}}]
    elif kind == "transaction":
        effects = Rows(server)
        parts = [effects.handler]
    else:
        effects = Orders(server)
        parts = [effects.handler]
    semel = run(consumer(place, *parts, retry={**AT_BROKER, "attempts": 1, "delays": ["1s", "1s"]}, breaker={"dead_share": "0%"}), store=server)
    ids = [f"m{i}" for i in range(20)]
    place.send(*[message(id, k="k", amount=1, transaction=f"t-{id}") for id in ids], message("bad", k="k", amount=-1, partition=1))
    if kind == "state":
        eventually(lambda: semel.metric("semel_retry_copies_total") >= 21, what="none of the orders exists")
        effects.open(*ids)
    [letter] = dies(place)
    happens(effects, ids)
    all_settled(place)
    assert letter.header("semel-message-id") == "bad" and letter.header("semel-failed-runs") == "3"
    assert letter.header("semel-original-topic") == place.name
    assert {id: n for id, n in effects.effects().items() if id != "bad"} == dict.fromkeys(ids, 1)


# ---- what goes on meanwhile ----------------------------------------------------------------------------------------------------

def test_while_copies_wait_the_committed_position_moves_on_and_a_restart_reads_nothing_again(topic, service, run):
    service.rule = lambda asked: 500 if asked.id.startswith("bad") else None
    semel = run(consumer(topic, service.handler, retry={**AT_BROKER, "delays": ["1m"]}, breaker={"dead_share": "0%"}))
    topic.send(*[message(f"bad{i}", partition=0) for i in range(50)], *[message(f"m{i}", partition=0) for i in range(200)])
    happens(service, [f"m{i}" for i in range(200)])
    settles(topic)
    assert waiting(topic, ["1m"]) == 50
    state = consumers.state_of(semel)
    assert state["in_hand"] == 0 and state["waiting"] == 0
    asked = sum(service.asked.values())
    semel.stop()
    semel.start()
    topic.send(message("after"))
    happens(service, ["after"])
    assert sum(service.asked.values()) == asked + 1
    eventually(lambda: semel.metric("semel_retry_copies_waiting") == 50, 30, "copies are not lag, they wait")
    assert semel.metric("semel_consumer_lag") == 0


def test_waiting_copies_do_not_stand_in_the_way_of_fresh_messages(topic, service, run):
    """More than the window holds (10,000 messages) wait, and take no part of it."""
    [copies] = names(topic, ["1h"])
    topic.server.topic(4, copies, retention_ms=7 * 86_400_000)
    due = str(int(time.time() * 1000) + 3_600_000).encode()
    headers = [("semel-original-source", topic.name.encode()), ("semel-due-timestamp", due)]
    topic.server.send(copies, [message(f"w{i}", headers=headers, partition=i % 4) for i in range(15_000)])
    semel = run(consumer(topic, service.handler, retry={**AT_BROKER, "delays": ["1h"]}))
    for group in range(3):
        ids = [f"m{group}-{i}" for i in range(300)]
        topic.send(*[message(id) for id in ids])
        happens(service, ids)
        settles(topic)
        time.sleep(0.5)
    state = consumers.state_of(semel)
    assert state["in_hand"] == 0 and state["condition"] == "running" and waiting(topic, ["1h"]) == 15_000
    assert len(service.asked) == 900


def test_copies_that_are_due_together_come_together(place, service, run):
    """Many, due over some time: none early, none left, and not one by one."""
    times, first = {}, {}

    def rule(asked):
        (times if asked.number == 2 else first)[asked.id] = time.monotonic()
        return 500 if asked.number == 1 else None
    service.rule = rule
    run(consumer(place, service.handler, retry=AT_BROKER))
    ids = [f"m{i}" for i in range(600)]
    place.send(*[message(id) for id in ids])
    assert happens(service, ids, 60) == dict.fromkeys(ids, 1)
    all_settled(place)
    assert min(times[id] - first[id] for id in ids) >= 0.99


# ---- what goes wrong -----------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("point", ["copy.before", "copy.after", "copy.after:3"])
def test_a_kill_around_the_copy_loses_nothing_and_doubles_nothing(point, place, service, run):
    service.rule = lambda asked: 500 if asked.number == 1 else None
    source = place.source(instance_id="one") if place.kind == "kafka" else place.source()
    semel = run(consumer(place, service.handler, source=source, retry=AT_BROKER), started=False)
    ids = [f"m{i}" for i in range(12)]
    place.send(*[message(id) for id in ids])
    name, _, nth = point.partition(":")
    semel.launch(fault=f"consumer.{name}=kill" + (f":{nth}" if nth else ""))
    assert semel.wait_dead(30) == -9, f"{point} was not passed"
    semel.start()
    assert happens(service, ids) == dict.fromkeys(ids, 1)
    all_settled(place)
    assert service.effects() == dict.fromkeys(ids, 1) and not place.letters()


def test_a_missing_topic_or_queue_refuses_the_start_by_name(place, service, run):
    with pytest.raises(Died) as died:
        run(consumer(place, service.handler, retry={**AT_BROKER, "create": False}))
    assert names(place)[0] in died.value.text and "retry.create: true" in died.value.text


def test_a_topic_that_would_lose_copies_refuses_the_start(topic, service, run):
    for settings in ({"cleanup_policy": "compact"}, {"retention_ms": 3_600_000}, {"retention_bytes": 1_000_000}):
        place = consumers.Topic(topic.server)
        place.server.topic(1, names(place)[0], **settings)
        with pytest.raises(Died) as died:
            run(consumer(place, service.handler, retry=AT_BROKER))
        assert names(place)[0] in died.value.text and "vanish" in died.value.text


def test_a_queue_that_is_made_otherwise_refuses_the_start(rabbitmq, service, run):
    place = consumers.Queue(rabbitmq)
    rabbitmq.queue(names(place)[0])
    for create in (True, False):
        with pytest.raises(Died) as died:
            run(consumer(place, service.handler, retry={**AT_BROKER, "create": create}))
        assert names(place)[0] in died.value.text and "made otherwise" in died.value.text


def test_where_copies_cannot_be_written_messages_stay_in_hand_with_an_alarm(topic, service, run):
    service.rule = lambda asked: 500 if asked.number == 1 else None
    semel = run(consumer(topic, service.handler, source=topic.source(consumers.QUICK_NEWS), retry={**AT_BROKER, "delays": ["8s"]}))
    [copies] = names(topic, ["8s"])
    topic.server.delete_topic(copies)
    topic.send(message("m"))
    eventually(lambda: any(copies in alarm for alarm in consumers.state_of(semel)["alarms"]), 40, "an alarm")
    assert topic.unsettled() == 1
    assert happens(service, ["m"], 60) == {"m": 1}
    settles(topic)


def test_a_copy_whose_queue_is_full_waits_until_there_is_room(service, run, delay_rabbit):
    """The queue takes no more (x-max-length, reject-publish): what is due stays where it waits."""
    place = consumers.Queue(delay_rabbit, **{"x-max-length": 10, "x-overflow": "reject-publish"})
    service.rule = lambda asked: 500 if asked.number == 1 else None
    semel = run(consumer(place, service.handler, retry={**AT_BROKER, "delays": ["3s"]}))
    bad = [f"m{i}" for i in range(10)]
    place.send(*[message(id) for id in bad])
    all_away(semel, 10)
    semel.kill()
    fresh = [f"f{i}" for i in range(10)]
    fill(place, fresh)
    assert fresh, "there was room for some before copies were due"
    time.sleep(5)  # all copies are due, and refused but for as many as there was room for
    # At least once: a copy that is in the queue may wait as well until its confirm is known.
    assert place.unsettled() == 10 and waiting(place, ["3s"]) >= len(fresh)
    semel.start()
    happens(service, [*bad, *fresh], 60)
    all_settled(place, ["3s"])
    assert service.effects() == dict.fromkeys([*bad, *fresh], 1)


def fill(place, ids):
    """As many of these as the queue takes are in it afterwards; `ids` is cut to them."""
    import pika
    taken = []
    for id in ids:
        try:
            place.send(message(id))
            taken.append(id)
        except (pika.exceptions.NackError, pika.exceptions.UnroutableError):
            break
    ids[:] = taken


@pytest.fixture(scope="module")
def delay_rabbit():
    """A node that tries a refused dead letter again soon (three minutes otherwise)."""
    server = RabbitServer(rabbit="{dead_letter_worker_publisher_confirm_timeout, 1000}")
    yield server
    server.clean_up()


@pytest.mark.parametrize("kind", ["kafka", "rabbitmq"])
def test_a_broker_that_is_killed_while_copies_wait_and_expire_loses_none(kind, service, run):
    server = KafkaServer() if kind == "kafka" else RabbitServer()
    try:
        place = consumers.Topic(server) if kind == "kafka" else consumers.Queue(server, **{"x-queue-type": "quorum"})
        service.rule = lambda asked: 500 if asked.number == 1 else None
        run(consumer(place, service.handler, retry={**AT_BROKER, "delays": ["3s"]}))
        if kind == "rabbitmq":
            server.sync_queues()
        ids = [f"m{i}" for i in range(60)]
        for part in (ids[:30], ids[30:]):
            place.send(*[message(id) for id in part])
            eventually(lambda: all(service.asked[id] for id in part) and place.unsettled() == 0, 30, "their copies wait")
            time.sleep(1.2)
        server.kill()  # the first are about to expire
        time.sleep(1.5)
        server.start()
        assert happens(service, ids, 90) == dict.fromkeys(ids, 1)
        all_settled(place, ["3s"], 60)
        assert not place.letters()
    finally:
        server.clean_up()
