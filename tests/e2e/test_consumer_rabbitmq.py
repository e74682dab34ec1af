"""What only RabbitMQ does to a consumer."""
import time

import pytest

import consumers
from consumers import Rows, consumer, dies, happens, message, settles
from harness import eventually
from rabbitmq_server import RabbitServer
from upstream import Gate


@pytest.fixture
def queue(rabbitmq):
    return consumers.Queue(rabbitmq)


@pytest.mark.parametrize("setup", ["store", "transaction-mysql"])
def test_what_a_killed_consumer_had_not_acknowledged_is_delivered_again_and_done_once(setup, queue, databases, service, run):
    ids = [f"m{i}" for i in range(300)]
    if setup == "store":
        service.rule = lambda asked: time.sleep(0.01)
        semel = run(consumer(queue, service.handler, concurrency=4))
        effects = service
    else:
        effects = Rows(databases("mysql"))
        semel = run(consumer(queue, effects.handler), store=effects.server)
    queue.send(*[message(id, k="k", amount=1) for id in ids])
    for kill in range(2):
        eventually(lambda: len(effects.effects()) >= 50 * (kill + 1), 20, "some are done")
        semel.kill()
        semel.start()
    found = happens(effects, ids)
    settles(queue)
    doubled = sum(found.values()) - len(ids)
    assert doubled == 0 if setup != "store" else doubled <= 8


def test_a_handler_longer_than_the_brokers_patience_runs_once(service, run):
    """The broker takes the message back and closes the channel; the redelivery finds it in progress, then done."""
    server = RabbitServer("consumer_timeout = 1000")
    try:
        queue = consumers.Queue(server)
        service.rule = lambda asked: time.sleep(4) if asked.id == "long" else None
        semel = run(consumer(queue, service.handler, source=queue.source(consumer_timeout="0s")))
        queue.send(message("long"), message("m"))
        happens(service, ["m", "long"])
        settles(queue)
        assert service.asked == {"long": 1, "m": 1}
        queue.send(message("after"))
        happens(service, ["after"])
        assert semel.process.poll() is None
    finally:
        server.clean_up()


def test_a_quorum_queue_without_a_dead_letter_exchange_is_told_at_the_start_and_loses_nothing(rabbitmq, service, run):
    """Its delivery limit would drop a message that is handed back too often; ours waits in hand instead."""
    queue = consumers.Queue.__new__(consumers.Queue)
    queue.server, queue.name, queue.letters_name = rabbitmq, "declared-quorum", "declared-quorum.dlq"
    service.rule = lambda asked: 500 if asked.number < 30 else None
    semel = run(consumer(queue, service.handler, source=queue.source(declare={"type": "quorum", "delivery_limit": 2}),
                         retry={"attempts": 50, "backoff": {"initial": "10ms", "max": "20ms"}}))
    assert "delivery" in semel.said() and "declared-quorum" in semel.said()
    queue.send(message("m"))
    happens(service, ["m"])
    settles(queue)
    assert service.effects() == {"m": 1} and not queue.letters()


def test_a_queue_that_counts_deliveries_is_named_when_a_message_comes_again(rabbitmq, service, run):
    """Of a queue that others declared nobody can be asked for its limit; kills of ours are what counts on it."""
    queue = consumers.Queue(rabbitmq, **{"x-queue-type": "quorum", "x-delivery-limit": 5})
    gate = Gate()
    service.rule = lambda asked: gate.wait() if asked.number == 1 else None
    semel = run(consumer(queue, service.handler))
    queue.send(message("m"))
    eventually(lambda: service.asked["m"] == 1, 20, "it runs")
    semel.kill()
    gate.open()
    semel.start()
    happens(service, ["m"])
    settles(queue)
    eventually(lambda: "it counts deliveries" in semel.said(), 10, "it is said")
    assert "dead-letter exchange" in semel.said() and queue.name in semel.said()


def test_deaths_up_to_the_limit_of_a_queue_leave_the_message_with_its_dead_letter_exchange(rabbitmq, service, run):
    connection = rabbitmq.connect()
    channel = connection.channel()
    channel.exchange_declare("dropped", "fanout", durable=True)
    channel.queue_bind(rabbitmq.queue("kept"), "dropped")
    connection.close()
    queue = consumers.Queue.__new__(consumers.Queue)
    queue.server, queue.name, queue.letters_name = rabbitmq, "limited", "limited.dlq"
    gate = Gate()
    service.rule = lambda asked: gate.wait() if asked.id == "m" else None
    semel = run(consumer(queue, service.handler, retry={"crashes": 50}, source=queue.source(
        declare={"type": "quorum", "delivery_limit": 2, "dead_letter_exchange": "dropped"})))
    assert "drops a message" not in semel.said()
    queue.send(message("m"))
    for death in range(3):
        eventually(lambda: queue.unsettled() == 1, 20, "it is in hand again")
        eventually(lambda: service.asked["m"] > death, 20, "it runs")
        semel.kill()
        semel.start()
    [kept] = eventually(lambda: rabbitmq.read("kept"), 20, "the broker gives up")
    assert kept.value == message("m").value
    gate.open()
    queue.send(message("after"))
    happens(service, ["after"])
    settles(queue)


def test_while_the_broker_takes_no_messages_letters_wait_and_all_else_goes_on(service, run):
    """Its memory alarm stops publishers. That is told, outlasts a kill, and ends with the alarm."""
    server = RabbitServer()
    try:
        queue = consumers.Queue(server)
        gate = Gate()
        service.rule = lambda asked: gate.wait() or (422 if asked.id.startswith("bad") else None)
        semel = run(consumer(queue, service.handler))
        bad, good = [f"bad{i}" for i in range(3)], [f"m{i}" for i in range(60)]
        queue.send(*[message(id) for id in bad + good])
        eventually(lambda: service.running > 0, 20, "some run")
        server.control("set_vm_memory_high_watermark", "0")
        gate.open()
        happens(service, good)
        told = lambda: any("takes no messages" in alarm for alarm in consumers.state_of(semel)["alarms"])
        eventually(told, 20, "an alarm")
        eventually(lambda: queue.unsettled() == len(bad), 20, "the good ones are settled")
        semel.kill()
        semel.start()
        eventually(told, 30, "the alarm again")
        assert queue.unsettled() == len(bad) and not queue.letters()
        server.control("set_vm_memory_high_watermark", "absolute", "1GiB")
        # What the killed one had written into its connection, the broker may take as well: a letter is never lost, but may be there twice.
        ids = lambda: {letter.header("semel-message-id") for letter in queue.letters()}
        eventually(lambda: ids() == set(bad), 60, "all letters")
        settles(queue, 40)
        eventually(lambda: not told(), 10, "the alarm is over")
        assert set(service.effects().values()) == {1} and set(service.effects()) == set(good)
        assert all(service.asked[id] == 1 for id in bad)
    finally:
        server.clean_up()


def test_a_queue_of_letters_that_vanishes_loses_nothing(queue, service, run):
    """The broker gives back what no queue takes."""
    service.rule = lambda asked: 422 if asked.id == "bad" else None
    semel = run(consumer(queue, service.handler))
    queue.server.delete_queue(queue.letters_name)
    queue.send(message("bad"), *[message(f"m{i}") for i in range(20)])
    happens(service, [f"m{i}" for i in range(20)])
    eventually(lambda: any(queue.letters_name in alarm for alarm in consumers.state_of(semel)["alarms"]), 40, "an alarm")
    eventually(lambda: queue.unsettled() == 1)
    queue.server.queue(queue.letters_name)
    assert [letter.header("semel-message-id") for letter in dies(queue, seconds=60)] == ["bad"]
    settles(queue, 40)
    assert service.asked["bad"] == 1


def test_a_queue_that_is_deleted_under_its_consumer_is_told_and_taken_up_again(queue, service, run):
    gate = Gate()
    service.rule = lambda asked: gate.wait() if asked.id == "m" else None
    semel = run(consumer(queue, service.handler))
    queue.send(message("m"))
    eventually(lambda: service.asked["m"] == 1, 20, "it runs")
    queue.server.delete_queue(queue.name)
    eventually(lambda: any("queue was deleted" in alarm for alarm in consumers.state_of(semel)["alarms"]), 20, "an alarm")
    gate.open()
    happens(service, ["m"])
    queue.server.queue(queue.name)
    queue.send(message("m"), message("after"))
    happens(service, ["after"])
    settles(queue)
    assert service.effects() == {"m": 1, "after": 1}


def test_letters_go_to_a_queue_or_through_an_exchange(rabbitmq, service, run):
    service.rule = lambda asked: 422
    queue = consumers.Queue(rabbitmq)
    connection = rabbitmq.connect()
    channel = connection.channel()
    channel.exchange_declare("letters", "topic", durable=True)
    rabbitmq.queue(queue.letters_name)
    channel.queue_bind(queue.letters_name, "letters", queue.name)
    connection.close()
    run(consumer(queue, service.handler, dead_letter={"exchange": "letters"}))
    queue.send(message("bad"))
    [letter] = dies(queue)
    settles(queue)
    assert letter.header("semel-message-id") == "bad" and letter.id


def test_a_broker_that_is_killed_and_comes_back_doubles_nothing(service, run):
    server = RabbitServer()
    try:
        queue = consumers.Queue(server)
        server.sync_queues()
        gate = Gate()
        service.rule = lambda asked: gate.wait() if asked.id == "m0" else None
        run(consumer(queue, service.handler, dead_letter="stop"))
        ids = [f"m{i}" for i in range(100)]
        queue.send(*[message(id) for id in ids])
        happens(service, ids[1:])
        server.restart()
        gate.open()
        happens(service, ids)
        settles(queue, 60)
        assert set(service.effects().values()) == {1}
    finally:
        server.clean_up()


def test_the_property_message_id_names_a_message(queue, service, run):
    run(consumer(queue, service.handler, id=None))
    queue.send(consumers.raw(b"{}", id="one"), consumers.raw(b"{}", id="one"), consumers.raw(b"{}", id="two"))
    happens(service, ["one", "two"])
    settles(queue)
    assert service.effects() == {"one": 1, "two": 1}
