"""mode: observe: what a topic holds is counted beside whoever reads it, and nothing is changed."""
import consumers
from consumers import Topic, consumer, happens, in_database, message, raw, settles
from harness import eventually


def observer(topic, *parts, **more):
    return consumer(topic, *parts, mode="observe", name="watcher", **more)


def counts(semel):
    return consumers.state_of(semel, "watcher")["counts"]


def seen(semel, number, seconds=30):
    """The counts once so many messages were observed."""
    eventually(lambda: counts(semel)["observed"] >= number, seconds, f"{number} messages are observed")
    found = counts(semel)
    assert found["observed"] == number
    return {name: count for name, count in found.items() if count}


def standing(topic):
    """What others can see of a group, its topic and its letters."""
    letters = topic.letters() if topic.server.exists(topic.letters_name) else []
    return topic.server.committed(topic.group, topic.name), topic.server.members(topic.group), len(letters)


def a_mix():
    """20 messages, and beside them 5 second copies, 2 mismatches, 3 without an id, 1 that cannot be read."""
    first = [message(f"m{i}", k=f"k{i % 4}", amount=i) for i in range(20)]
    copies = [message(f"m{i}", k=f"k{i % 4}", amount=i) for i in range(5)]
    others = [message(f"m{i}", k=f"k{i % 4}", amount=1000) for i in (7, 8)]
    return [*first, *copies, *others, *[raw(b'{"amount": 1}')] * 3, raw(b"not json")]


MIX = {"observed": 31, "first": 20, "duplicate": 5, "mismatch": 2, "missing_id": 3, "undecodable": 1, "id_from_configured": 27}


def test_observing_beside_a_live_consumer_changes_nothing_and_counts_exactly(topic, service, run):
    live = run(consumer(topic, service.handler))
    eventually(lambda: len(consumers.state_of(live)["partitions"]) == 4, 30, "the live consumer has its partitions")
    watching = run(observer(topic))
    eventually(lambda: len(consumers.state_of(watching, "watcher")["partitions"]) == 4, 30, "all partitions are observed")
    # One partition: what comes first there is first for both.
    topic.send(*[raw(one.value, partition=0) for one in a_mix()])
    assert seen(watching, 31) == MIX
    assert happens(service, [f"m{i}" for i in range(20)]) == {f"m{i}": 1 for i in range(20)}
    settles(topic)
    consumers.dies(topic, 6)
    assert len(topic.server.members(topic.group)) == 1
    assert len(consumers.state_of(live)["partitions"]) == 4
    shown = watching.command_line("consumer", "list", "--config", watching.config_file)
    assert "observed 31: first 20, duplicate 5, mismatch 2, missing_id 3, undecodable 1" in shown.stdout
    assert 'semel_observed_messages_total{consumer="watcher",result="duplicate"} 5' in watching.ask_admin("/metrics").body.decode()

    # Alone with the group it changes nothing either, whatever comes.
    live.stop()
    eventually(lambda: not topic.server.members(topic.group), 20, "the group is empty")
    before, asked = standing(topic), sum(service.asked.values())
    topic.send(*[raw(one.value, partition=0) for one in a_mix()])
    assert seen(watching, 62)["duplicate"] == 5 + 25
    watching.stop()
    assert standing(topic) == before
    assert sum(service.asked.values()) == asked


def test_taking_over_begins_where_the_group_stands(topic, service, run):
    topic.send(*[message(f"before{i}") for i in range(8)])
    topic.server.set_committed(topic.group, topic.name, topic.server.ends(topic.name))  # whoever reads in the group today
    topic.send(*[message(f"after{i}") for i in range(6)])
    semel = run(observer(topic, service.handler))
    assert seen(semel, 6)["first"] == 6, "it reads from the group's positions"
    assert not service.asked
    semel.stop()
    assert topic.unsettled() == 6
    semel.config["consumers"][0]["mode"] = "run"
    semel.write_config()
    semel.start()
    happens(service, [f"after{i}" for i in range(6)])
    settles(topic)
    assert service.effects() == {f"after{i}": 1 for i in range(6)}
    assert len(topic.server.members(topic.group)) == 1


def test_nothing_is_made_for_an_observer(topic, service, databases, run):
    server = databases("postgres")
    watching = run(observer(topic, service.handler, strategy="table",
                            database={"postgres": {"url": server.url()}}, store=None))
    topic.send(*a_mix())
    assert seen(watching, 31)["first"] == 20
    assert int(in_database(server, "SELECT count(*) FROM pg_class WHERE relname LIKE 'message_dedup%'")[0][0]) == 0
    assert not topic.server.exists(topic.letters_name)
    assert not service.asked


def test_a_topic_that_comes_later_is_observed(kafka, run):
    class Later(Topic):
        def __init__(self):
            self.server, self.name, self.group = kafka, "comes-later", "observers"
            self.letters_name = "comes-later.observers.dlq"
    topic = Later()
    watching = run(observer(topic))
    eventually(lambda: consumers.state_of(watching, "watcher")["condition"] == "running", 20, "it runs")
    kafka.topic(2, name=topic.name)
    topic.send(*a_mix())
    assert seen(watching, 31)["first"] == 20
