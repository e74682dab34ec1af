"""A topic that is deleted and made again under its name, under a strategy that keeps its own positions: nobody takes one log for the
other."""
import subprocess

import pytest

import consumers
from consumers import Rows, consumer, happens, message, settles
from harness import BINARY, eventually


def asks_for_ids():
    """Whether the program's librdkafka can: the one that is built in, or the system's if it is 2.3 or newer."""
    if "librdkafka" not in subprocess.run(["ldd", BINARY], check=True, capture_output=True, text=True).stdout:
        return True
    version = subprocess.run(["pkg-config", "--modversion", "rdkafka"], check=True, capture_output=True, text=True).stdout
    return tuple(map(int, version.split(".")[:2])) >= (2, 3)


def numbered(name, count):
    return [message(f"{name}{i}", k="k", amount=1) for i in range(count)]


@pytest.fixture(params=["postgres", "mysql"])
def rows(request, databases):
    return Rows(databases(request.param))


def made_again(topic, semel, messages):
    """Stops the consumer, and puts another topic in the place of its own."""
    semel.stop()
    eventually(lambda: not topic.server.members(topic.group), 20, "the group is empty")
    topic.server.delete_topic(topic.name)
    topic.server.topic(1, name=topic.name)
    topic.send(*messages)


def refused(topic, semel):
    def told():
        return [alarm for alarm in consumers.state_of(semel)["alarms"] if f"{topic.name}-0" in alarm and "`semel consumer reset`" in alarm]
    return eventually(told, 30, "an alarm that names the cure")


def reset(topic, semel):
    semel.stop()
    eventually(lambda: not topic.server.members(topic.group), 20, "the group is empty")
    done = semel.command_line("consumer", "reset", "under-test", "--config", semel.config_file, "--to", "earliest", "--yes")
    assert done.returncode == 0, done.stderr
    semel.start()


def test_a_shorter_topic_of_the_same_name_is_refused_until_somebody_says_where_to_go_on(kafka, rows, run):
    topic = consumers.Topic(kafka, partitions=1)
    semel = run(consumer(topic, rows.handler))
    topic.send(*numbered("old", 10))
    happens(rows, [f"old{i}" for i in range(10)])
    settles(topic)
    made_again(topic, semel, numbered("new", 4))
    semel.start()
    refused(topic, semel)
    assert rows.count() == 10 and semel.ask_admin("/readyz").status == 200
    reset(topic, semel)
    found = happens(rows, [f"new{i}" for i in range(4)])
    assert set(found.values()) == {1}
    settles(topic)
    assert not consumers.state_of(semel)["alarms"]


def test_a_longer_one_is_refused_where_the_broker_can_be_asked_for_the_topics_id(kafka, rows, run):
    topic = consumers.Topic(kafka, partitions=1)
    semel = run(consumer(topic, rows.handler))
    topic.send(*numbered("old", 5))
    happens(rows, [f"old{i}" for i in range(5)])
    settles(topic)
    made_again(topic, semel, numbered("new", 20))
    semel.start()
    if not asks_for_ids():
        # As docs/guarantees.md says: it is not noticed.
        happens(rows, [f"new{i}" for i in range(5, 20)])
        assert "new0" not in rows.effects()
        return
    refused(topic, semel)
    assert rows.count() == 5
    reset(topic, semel)
    found = happens(rows, [f"new{i}" for i in range(20)])
    assert set(found.values()) == {1}
    settles(topic)


def test_what_waits_beside_the_records_of_the_former_topic_and_what_is_new_both_run(kafka, redis_servers, service, run):
    """At the same positions lie others now: neither is taken for the other, and both are kept over a kill."""
    topic = consumers.Topic(kafka, partitions=1)
    service.rule = lambda asked: 500 if asked.id == "old0" and asked.number == 1 else None
    semel = run(consumer(topic, service.handler, ordering="key", retry={"attempts": 1, "delays": ["15s"], "wait": "store"}),
                store=redis_servers("--appendonly", "yes"))

    def in_store():
        return semel.metric("semel_retry_in_store")
    topic.send(*[message(f"old{i}", key="k") for i in range(3)])
    eventually(lambda: in_store() == 3, 30, "all of the former topic waits beside the records")
    settles(topic)
    made_again(topic, semel, [message(f"new{i}", key="k") for i in range(5)])
    semel.start()
    eventually(lambda: in_store() >= 3 or service.asked["old0"] == 2, 30, "what waits has come back")
    semel.kill()
    semel.start()
    found = happens(service, [f"{topic}{i}" for topic, count in (("old", 3), ("new", 5)) for i in range(count)])
    assert set(found.values()) == {1} and service.asked["old0"] == 2
    settles(topic)
    eventually(lambda: in_store() == 0, 30, "nothing is left there")
    assert [id for id in service.happened if id.startswith("new")] == [f"new{i}" for i in range(5)] and not topic.letters()
