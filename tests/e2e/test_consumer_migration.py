"""From a consumer that kept a table by hand to ours: its group, its position and its table are taken over, and what it had lost is found."""
import json

import pytest
from confluent_kafka import Consumer

import consumers
from consumers import Rows, consumer, happens, in_database, message, settles
from harness import eventually

FAILS = {"m3", "m7"}


class Old:
    """The statements that articles teach, each committed by itself; a failure is marked and passed over by the next acknowledgement."""

    def __init__(self, topic, server):
        self.server = server
        postgres = server.kind == "postgres"
        number, small = ("bigserial PRIMARY KEY", "smallint") if postgres else ("bigint AUTO_INCREMENT PRIMARY KEY", "tinyint")
        time = "timestamp" if postgres else "datetime"
        in_database(server, f"CREATE TABLE message_dedup (id {number}, message_id varchar(64) NOT NULL UNIQUE, business_key varchar(128), "
                            f"status {small} NOT NULL, retry_count int NOT NULL DEFAULT 0, error_message text, created_at {time} NULL, "
                            f"updated_at {time} NULL, expire_at {time} NULL)")
        self.client = Consumer({"bootstrap.servers": topic.server.address, "group.id": topic.group, "enable.auto.commit": False,
                                "auto.offset.reset": "earliest", "session.timeout.ms": 3000, "heartbeat.interval.ms": 500, "log_level": 0})
        self.client.subscribe([topic.name])

    def work(self, dies_at):
        while True:
            got = self.client.poll(1)
            if got is None or got.error():
                continue
            id = json.loads(got.value())["id"]
            in_database(self.server, "INSERT INTO message_dedup (message_id, status, created_at, updated_at, expire_at) "
                                     f"VALUES ('{id}', 0, '2026-11-20 08:30:00', '2026-11-20 08:30:00', '2026-11-21 08:30:00')")
            if id == dies_at:
                return
            if id in FAILS:
                in_database(self.server, f"UPDATE message_dedup SET status = 2, error_message = 'no', retry_count = 1 WHERE message_id = '{id}'")
                continue
            in_database(self.server, f"INSERT INTO effects (message_id, k, amount) VALUES ('{id}', 'old', 1)")
            in_database(self.server, f"UPDATE message_dedup SET status = 1 WHERE message_id = '{id}'")
            self.client.commit(got, asynchronous=False)


@pytest.mark.parametrize("kind", ["postgres", "mysql"])
def test_the_place_of_an_old_consumer_with_a_table_is_taken_and_nothing_happens_twice(kind, kafka, databases, run):
    topic, server = consumers.Topic(kafka, partitions=1), databases(kind)
    rows, old = Rows(server), Old(topic, server)
    topic.send(*[message(f"m{i}", k="new", amount=1) for i in range(20)])
    old.work(dies_at="m15")
    assert topic.unsettled() == 5 and len(rows.effects()) == 13  # it has passed over the two that failed
    semel = run(consumer(topic, rows.handler), store=server, started=False)

    def migrate():
        return semel.command_line("store", "migrate", "--config", semel.config_file, "--old-dedup-table", "message_dedup", "--scope",
                                  f"{topic.group}/under-test", "--source", topic.name, "--watch", "300ms")
    done = migrate()
    assert done.returncode == 0, done.stderr
    old.client.close()
    eventually(lambda: not topic.server.members(topic.group), 20, "the old one has left the group")
    semel.start()
    happens(rows, [f"m{i}" for i in range(16, 20)])
    settles(topic)
    # Whether m15 happened nobody knows: a person decides.
    assert [(letter.header("semel-message-id"), letter.header("semel-error-class")) for letter in topic.letters()] == [("m15", "unknown")]
    semel.stop()
    eventually(lambda: not topic.server.members(topic.group), 20, "the group is empty")
    done = semel.command_line("consumer", "reset", "under-test", "--config", semel.config_file, "--to", "earliest", "--yes")
    assert done.returncode == 0, done.stderr
    semel.start()
    found = happens(rows, FAILS)
    settles(topic)
    assert found == {f"m{i}": 1 for i in range(20) if i != 15}
