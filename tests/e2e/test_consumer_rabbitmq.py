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
