"""A consumer's own store: its records lie there, and what is promised follows from it."""
import pytest

import consumers
from consumers import Service, Topic, consumer, happens, message, settles
from harness import eventually


def own(server):
    return {"store": {"redis": {"url": server.url()}}}


@pytest.fixture
def another_topic(kafka):
    return Topic(kafka)


@pytest.fixture
def another_service():
    service = Service()
    yield service
    service.close()


def test_two_consumers_keep_their_records_in_two_stores(topic, another_topic, service, another_service, redis_servers, run):
    server = redis_servers()
    semel = run(consumer(topic, service.handler, name="embedded"),
                consumer(another_topic, another_service.handler, own(server), name="elsewhere"))
    everything = [message(f"m{i}") for i in range(10)]
    topic.send(*everything)
    another_topic.send(*everything)
    happens(service, [f"m{i}" for i in range(10)])
    happens(another_service, [f"m{i}" for i in range(10)])
    settles(topic)
    settles(another_topic)
    semel.kill()
    semel.start()
    topic.send(*everything)
    another_topic.send(*everything)
    for name in ("embedded", "elsewhere"):
        eventually(lambda: consumers.state_of(semel, name)["counts"]["duplicates"] >= 10, 30, f"{name} knows all")
    assert service.effects() == another_service.effects() == {f"m{i}": 1 for i in range(10)}

    assert semel.ask_admin("/readyz").status == 200
    found = semel.command_line("doctor", "--config", semel.config_file)
    assert server.url() in found.stdout and str(semel.data) in found.stdout
    server.kill()
    unready = eventually(lambda: (answer := semel.ask_admin("/readyz")).status == 503 and answer, 30, "the store is missed")
    assert server.url() in unready.body.decode()
    # The other one goes on.
    topic.send(message("later"))
    happens(service, ["later"])


def test_with_a_shared_store_of_its_own_a_consumer_may_have_several_members(topic, service, redis_servers, run):
    server = redis_servers()
    first = run(consumer(topic, service.handler, own(server)))
    second = run(consumer(topic, service.handler, own(server)))
    both = (first, second)
    eventually(lambda: all(len(consumers.state_of(one)["partitions"]) == 2 for one in both), 40, "they share the partitions")
    # A copy of each on another partition, so that both processes meet the same ids.
    topic.send(*[message(f"m{i}", partition=partition) for i in range(20) for partition in range(4)])
    assert happens(service, [f"m{i}" for i in range(20)]) == {f"m{i}": 1 for i in range(20)}
    settles(topic, 40)
    assert service.effects() == {f"m{i}": 1 for i in range(20)}
    assert sum(consumers.state_of(one)["counts"]["duplicates"] for one in both) == 60


def test_what_is_old_in_a_store_of_its_own_is_removed(topic, service, tmp_path, run):
    semel = run(consumer(topic, service.handler, store={"rocksdb": {"path": str(tmp_path / "records")}},
                         dedup={"retention": "3s"}, accept=["short_dedup"]),
                engine={"lease": consumers.LEASE, "cleanup": {"every": "500ms"}})
    topic.send(*[message(f"m{i}") for i in range(10)])
    happens(service, [f"m{i}" for i in range(10)])
    settles(topic)
    eventually(lambda: semel.metric("semel_purged_total") >= 10, 30, "the records are gone")
