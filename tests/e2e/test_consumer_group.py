"""Groups: an embedded store serves one process; partitions that move while somebody is in a transaction; positions that are reset."""
import signal

import pytest

import consumers
from consumers import Rows, consumer, happens, message, settles
from harness import Died, eventually


def refused(semel):
    state = consumers.state_of(semel)
    return state if state["condition"] == "refused" else None


def test_a_second_process_with_an_embedded_store_is_refused_and_the_first_one_says_so(topic, service, run):
    first = run(consumer(topic, service.handler))
    topic.send(message("m0"))
    happens(service, ["m0"])
    settles(topic)
    second = run(consumer(topic, service.handler))
    state = eventually(lambda: refused(second), 30, "the second one is refused")
    assert topic.group in state["reason"] and "unshared_store" in state["reason"] and "redis" in state["reason"]
    eventually(lambda: len(topic.server.members(topic.group)) == 1, 20, "it has left the group")
    topic.send(*[message(f"m{i}") for i in range(1, 30)])
    happens(service, [f"m{i}" for i in range(30)])
    settles(topic)
    assert set(service.effects().values()) == {1} and consumers.state_of(first)["condition"] == "running"


def test_an_exchanged_store_folder_is_refused(topic, service, run):
    first = run(consumer(topic, service.handler))
    topic.send(message("m0", partition=0))
    settles(topic)
    assert first.stop() == 0
    other = run(consumer(topic, service.handler))  # the same group, another folder
    topic.send(message("m1", partition=0), message("m0", partition=0))
    state = eventually(lambda: refused(other), 30, "the other store is refused")
    assert "store" in state["reason"] and "unshared_store" in state["reason"]
    assert service.effects() == {"m0": 1}
    other.kill()
    first.start()
    happens(service, ["m1"])
    settles(topic)
    assert service.effects() == {"m0": 1, "m1": 1}


def test_on_rabbitmq_an_embedded_store_subscribes_alone(rabbitmq, service, run):
    queue = consumers.Queue(rabbitmq)
    run(consumer(queue, service.handler))
    second = run(consumer(queue, service.handler))
    queue.send(*[message(f"m{i}") for i in range(10)])
    happens(service, [f"m{i}" for i in range(10)])
    assert consumers.state_of(second)["alarms"] or consumers.state_of(second)["reason"]
    assert second.metric("semel_messages_received_total") == 0


def test_it_may_be_accepted_by_name(topic, service, run):
    members = [run(consumer(topic, service.handler, accept=["unshared_store"])) for _ in range(2)]
    eventually(lambda: topic.server.working_members(topic.group) == 2, 20, "two members")
    assert not any(refused(member) for member in members)


@pytest.mark.parametrize("kind", ["postgres", "mysql"])
def test_an_owner_frozen_inside_its_transaction_commits_nothing_after_its_partition_moved(kind, topic, databases, run):
    """It stands between its effects and COMMIT, and wakes when another one has them done."""
    rows = Rows(databases(kind))
    entry = consumer(topic, rows.handler)
    frozen = run(entry, store=rows.server, started=False)
    topic.send(*[message(f"m{i}", k="k", amount=1, partition=0) for i in range(20)])
    frozen.launch(fault="consumer.effect.after=stop")
    stopped = f"/proc/{frozen.process.pid}/status"
    eventually(lambda: "State:\tT" in open(stopped).read(), 30, "it stands in its transaction")
    other = run(entry, store=rows.server)
    eventually(lambda: consumers.state_of(other)["partitions"], 30, "the other one has the partition")
    frozen.process.send_signal(signal.SIGCONT)
    found = happens(rows, [f"m{i}" for i in range(20)], 60)
    settles(topic)
    assert set(found.values()) == {1}


def test_a_group_set_back_behind_the_databases_position_is_refused_by_name(topic, databases, run):
    rows = Rows(databases("postgres"))
    semel = run(consumer(topic, rows.handler), store=rows.server)
    topic.send(*[message(f"m{i}", k="k", amount=1, partition=0) for i in range(10)])
    happens(rows, [f"m{i}" for i in range(10)])
    settles(topic)
    semel.stop()
    topic.server.set_committed(topic.group, topic.name, {0: 2})
    semel.start()
    eventually(lambda: any("reset" in alarm for alarm in consumers.state_of(semel)["alarms"]), 20, "an alarm that names the cure")
    assert rows.count() == 10


def test_enable_auto_commit_is_refused(topic, service, run):
    with pytest.raises(Died) as died:
        run(consumer(topic, service.handler, source=topic.source(properties={"enable.auto.commit": True})))
    assert "enable.auto.commit" in died.value.text


def test_a_new_group_on_an_old_topic_begins_at_its_beginning_or_where_it_is_told(topic, service, run):
    topic.send(message("old", partition=0))
    latest = topic.source(start="latest")
    latest["kafka"]["group"] = f"{topic.group}-latest"
    semel = run(consumer(topic, service.handler, name="from-earliest"),
                consumer(topic, service.handler, name="from-latest", source=latest, dead_letter={"topic": topic.letters_name, "create": True}))
    happens(service, ["old"])
    eventually(lambda: all(consumers.state_of(semel, name)["partitions"] for name in ("from-earliest", "from-latest")))
    eventually(lambda: topic.server.committed(f"{topic.group}-latest", topic.name).get(0) == 1, what="the position is committed")
    topic.send(message("new", partition=0))
    eventually(lambda: service.effects() == {"old": 1, "new": 2}, what="the new one twice")
