"""The three ways in which a message comes twice (a slow consumer, a rebalance, a producer's retry): its effect happens once. And what
common dedup code gets wrong, one test each."""
import signal
import time

import pytest

import consumers
from consumers import Rows, consumer, happens, message, settles
from harness import Died, eventually
from upstream import Gate


@pytest.fixture(params=["redis", "postgres"])
def shared(request, redis_servers, databases):
    return redis_servers() if request.param == "redis" else databases("postgres")


# ---- the three causes ----------------------------------------------------------------------------------------------------------

def test_a_handler_three_times_as_slow_as_the_longest_poll_has_one_effect_and_keeps_its_partition(topic, service, run):
    service.rule = lambda asked: time.sleep(6) if asked.id == "slow" else None
    source = topic.source(properties={"max.poll.interval.ms": 2000}, drain="1s")
    semel = run(consumer(topic, service.handler, source=source, concurrency=4))
    topic.send(message("slow"), *[message(f"m{i}") for i in range(10)])
    found = happens(service, ["slow", *[f"m{i}" for i in range(10)]])
    settles(topic)
    assert set(found.values()) == {1} and service.asked["slow"] == 1
    assert semel.metric("semel_partitions_lost_total") == 0


def test_a_rebalance_in_the_middle_of_a_handler_has_one_effect(topic, shared, service, run):
    """The second member gets the partition while the first one's handler runs, and waits for its outcome."""
    gate = Gate()
    service.rule = lambda asked: gate.wait() if asked.id == "held" else None
    first, second = (consumer(topic, service.handler, source=topic.source(drain="200ms")) for _ in range(2))
    run(first, store=shared)
    topic.send(message("held", partition=0), message("held", partition=1), message("held", partition=2), message("held", partition=3))
    gate.wait_until_entered()
    run(second, store=shared)
    eventually(lambda: topic.server.working_members(topic.group) == 2, 20, "both have partitions")
    topic.send(*[message(f"m{i}", partition=i % 4) for i in range(8)])
    happens(service, [f"m{i}" for i in range(8)])  # others do not wait for it
    assert service.asked["held"] == 1 and topic.unsettled() > 0
    gate.open()
    settles(topic)
    assert service.effects()["held"] == 1


def test_a_partition_that_goes_and_comes_back_within_one_handler_finds_its_work_recorded(topic, shared, service, run):
    """Whoever owns the partition, what ended is recorded; only the position is not the former owner's to commit."""
    gate = Gate()
    service.rule = lambda asked: gate.wait() if asked.id.startswith("held") else None
    entry = consumer(topic, service.handler, source=topic.source(drain="200ms"))
    first = run(entry, store=shared)
    ids = [f"held{p}" for p in range(4)]
    topic.send(*[message(id, partition=p) for p, id in enumerate(ids)])
    for _ in ids:
        gate.wait_until_entered()
    second = run(entry, store=shared)
    eventually(lambda: topic.server.working_members(topic.group) == 2, 20, "half of them have gone")
    assert second.stop() == 0
    eventually(lambda: len(consumers.state_of(first)["partitions"]) == 4, 20, "they have come back")
    gate.open()
    settles(topic)
    assert service.effects() == {id: 1 for id in ids} and set(service.asked.values()) == {1}
    assert first.metric("semel_message_unknown_outcomes_total") == 0


@pytest.mark.parametrize("gap", ["together", "later"])
def test_a_producers_second_copy_has_no_second_effect(gap, place, service, run):
    semel = run(consumer(place, service.handler, concurrency=8))
    copies = [message("twice") for _ in range(10)]
    place.send(*copies)
    happens(service, ["twice"])
    if gap == "later":
        settles(place)
        semel.kill()  # its memory is in the store
        semel.start()
        place.send(*copies)
    settles(place)
    assert service.effects() == {"twice": 1} and service.asked["twice"] == 1


# ---- what common code gets wrong -----------------------------------------------------------------------------------------------

def test_the_first_delivery_runs(place, shared, service, run):
    """A missing key is not "already processed"."""
    run(consumer(place, service.handler), store=shared)
    place.send(message("first"))
    assert happens(service, ["first"]) == {"first": 1}


def test_two_members_with_copies_of_one_message_never_run_it_side_by_side(topic, shared, service, run):
    service.rule = lambda asked: time.sleep(0.3)
    for _ in range(2):
        run(consumer(topic, service.handler), store=shared)
    eventually(lambda: len(topic.server.members(topic.group)) == 2, 20, "two members")
    topic.send(*[message("one", partition=i % 4) for i in range(12)])
    settles(topic)
    assert service.effects() == {"one": 1} and service.running_most == 1


def test_a_duplicate_of_an_undecided_message_is_not_acknowledged_and_runs_when_its_owner_is_dead(topic, shared, service, run):
    """The first owner dies in its handler; the copy that met it in progress was kept, and takes over."""
    gate = Gate()
    service.rule = lambda asked: gate.wait() or 500 if asked.number == 1 else None
    first = run(consumer(topic, service.handler), store=shared)
    topic.send(message("m", partition=0))
    gate.wait_until_entered()
    first.kill()
    second = run(consumer(topic, service.handler), store=shared)
    topic.send(message("m", partition=1))
    found = happens(service, ["m"])
    settles(topic)
    assert found == {"m": 1} and second.metric("semel_message_unknown_outcomes_total") == 1
    gate.open()


def test_when_an_owner_dies_one_of_many_that_wait_for_it_takes_over(topic, shared, service, run):
    """Each of two others waits with copies. Nobody deletes the dead one's record and goes on unclaimed."""
    gate = Gate()
    service.rule = lambda asked: gate.wait() or 500 if asked.number == 1 else time.sleep(0.3)
    first = run(consumer(topic, service.handler), store=shared)
    topic.send(message("m", partition=0))
    gate.wait_until_entered()
    for _ in range(2):
        run(consumer(topic, service.handler), store=shared)
    first.kill()
    eventually(lambda: topic.server.working_members(topic.group) == 2, 20, "both have partitions")
    topic.send(*[message("m", partition=p) for p in range(4) for _ in range(5)])
    found = happens(service, ["m"])
    gate.open()
    settles(topic)
    assert found == {"m": 1} and service.asked["m"] == 2


def test_a_failed_message_of_which_two_members_have_copies_is_tried_by_one_at_a_time(topic, shared, service, run):
    service.rule = lambda asked: time.sleep(0.2) or (500 if asked.number < 4 else None)
    for _ in range(2):
        run(consumer(topic, service.handler, retry={"attempts": 5, "backoff": {"initial": "50ms", "max": "100ms"}}), store=shared)
    eventually(lambda: topic.server.working_members(topic.group) == 2, 20, "both have partitions")
    topic.send(*[message("m", partition=p) for p in range(4) for _ in range(3)])
    settles(topic)
    assert service.effects() == {"m": 1} and service.asked["m"] == 4 and service.running_most == 1
    assert [c.header("Semel-Attempt") for c in service.paid()] == ["1", "2", "3", "4"] and not topic.letters()


def test_a_thousand_copies_at_once_are_one_effect_and_no_errors(kafka, databases, service, run):
    """Neither the database nor our log calls a duplicate an error."""
    topic, server = consumers.Topic(kafka), databases("postgres")
    semel = run(consumer(topic, service.handler, {"strategy": "table", "database": {"postgres": {"url": server.url()}}}), store=server)
    topic.send(message("m0"))
    settles(topic)
    before, log = semel.said(), server.log.stat().st_size
    topic.send(*[message("m") for _ in range(1000)])
    settles(topic)
    assert service.effects() == {"m0": 1, "m": 1} and semel.metric("semel_duplicates_suppressed_total") == 999
    assert semel.said() == before
    assert b"ERROR" not in server.log.read_bytes()[log:]


def test_between_the_tries_of_a_failing_message_no_transaction_is_open(topic, databases, run):
    rows = Rows(databases("postgres"))
    semel = run(consumer(topic, rows.handler, retry={"attempts": 3, "backoff": {"initial": "30s", "max": "30s"}}), store=rows.server)
    topic.send(message("bad", k="k", amount=-1), message("good", k="k", amount=1))
    happens(rows, ["good"])
    eventually(lambda: semel.metric("semel_message_retries_total") > 0, 20, "it has failed once")
    for _ in range(5):
        assert rows.server.sql("SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'") == [["0"]]
        time.sleep(0.1)
    assert rows.effects() == {"good": 1}


def test_a_failed_message_runs_again_after_a_restart_and_its_attempts_are_counted_in_the_store(place, service, run):
    """Neither skipped for a unique key that it holds itself, nor forgotten."""
    service.rule = lambda asked: 500 if asked.number < 3 else None
    semel = run(consumer(place, service.handler, retry={"attempts": 3, "backoff": {"initial": "300ms", "jitter": 0}}))
    place.send(message("m"))
    eventually(lambda: service.asked["m"] == 1)
    semel.stop()
    semel.start()
    happens(service, ["m"])
    settles(place)
    assert service.asked["m"] == 3 and [c.header("Semel-Attempt") for c in service.paid()] == ["1", "2", "3"] and not place.letters()


def test_a_failure_is_never_passed_by_the_commit_of_what_came_after_it(topic, service, run):
    """One partition: 10 fails, 11 and those behind it succeed. What is committed stays at the failed one, also over a restart."""
    gate = Gate()
    service.rule = lambda asked: 500 if asked.id == "bad" and not gate.opened else None
    semel = run(consumer(topic, service.handler, retry={"attempts": 50, "backoff": {"initial": "100ms", "max": "200ms"}}))
    topic.send(message("m0", partition=0), message("bad", partition=0), *[message(f"m{i}", partition=0) for i in range(1, 30)])
    happens(service, [f"m{i}" for i in range(30)])
    eventually(lambda: topic.server.committed(topic.group, topic.name).get(0) == 1, what="committed up to the failed one")
    semel.stop()
    assert topic.server.committed(topic.group, topic.name)[0] == 1
    semel.start()
    gate.open()
    happens(service, ["bad"])
    settles(topic)
    assert set(service.effects().values()) == {1}


def test_completion_out_of_order_commits_over_no_gap(topic, service, run):
    """The first of a partition runs long, 50 behind it are done; after a kill these are recognised and only the first runs."""
    gate = Gate()
    service.rule = lambda asked: gate.wait() or 500 if asked.id == "long" and asked.number == 1 else None
    semel = run(consumer(topic, service.handler, source=topic.source(instance_id="one")))
    ids = [f"m{i}" for i in range(50)]
    topic.send(message("long", partition=0), *[message(id, partition=0) for id in ids])
    happens(service, ids)
    assert topic.server.committed(topic.group, topic.name).get(0, 0) == 0
    semel.kill()
    gate.open()
    semel.start()
    happens(service, ["long", *ids])
    settles(topic)
    assert all(service.asked[id] == 1 for id in ids) and service.effects()["long"] == 1


def test_two_groups_do_not_block_each_other_and_long_ids_are_not_cut(kafka, databases, service, run):
    topic, server = consumers.Topic(kafka), databases("postgres")
    part = {"strategy": "table", "database": {"postgres": {"url": server.url()}}}
    other = topic.source()
    other["kafka"]["group"] = f"{topic.group}-other"
    run(consumer(topic, service.handler, part), consumer(topic, service.handler, part, name="other", source=other), store=server)
    ids = ["x" * 300 + "1", "x" * 300 + "2", "short"]
    topic.send(*[message(id) for id in ids])
    eventually(lambda: sum(service.effects().values()) == 6, 20, "each id for each group")
    assert all(service.effects()[id] == 2 for id in ids)


def test_an_event_before_its_parent_is_kept_until_the_parent_is_there(topic, databases, run):
    """Zero rows are "not yet": rolled back and tried again, not acknowledged."""
    server = databases("postgres")
    consumers.in_database(server, "CREATE TABLE stock (sku varchar(20) PRIMARY KEY, qty int NOT NULL)")
    entry = consumer(topic, {"database": {"postgres": {"url": server.url()}}, "strategy": "transaction", "handler": {"sql": {
        "params": {"sku": {"json": "/sku"}}, "statements": ["UPDATE stock SET qty = qty - 1 WHERE sku = :sku"]}}},
        retry={"attempts": 100, "backoff": {"initial": "100ms", "max": "200ms"}})
    semel = run(entry, store=server)
    topic.send(message("m", sku="later"))
    eventually(lambda: semel.metric("semel_message_not_yet_total") > 0 or semel.metric("semel_message_retries_total") > 0, 20, "it was tried")
    consumers.in_database(server, "INSERT INTO stock VALUES ('later', 5)")
    settles(topic)
    assert consumers.in_database(server, "SELECT qty FROM stock") == [["4"]] and not topic.letters()


def test_a_late_owner_does_not_overwrite_what_its_successor_recorded(topic, shared, service, run):
    """It is stopped for longer than its lease and its session; another one does the message; then it wakes."""
    gate = Gate()
    service.rule = lambda asked: gate.wait() if asked.number == 1 else None
    first = run(consumer(topic, service.handler), store=shared)
    topic.send(message("m", partition=0))
    gate.wait_until_entered()
    first.process.send_signal(signal.SIGSTOP)
    second = run(consumer(topic, service.handler), store=shared)
    eventually(lambda: service.asked["m"] == 2 and service.effects()["m"] == 1, 30, "the second owner's effect")
    settles(topic)
    gate.open()
    first.process.send_signal(signal.SIGCONT)
    eventually(lambda: service.effects()["m"] == 2, what="the first one's handler ends, too")
    assert second.metric("semel_message_unknown_outcomes_total") == 1  # that second effect was announced
    topic.send(message("m", partition=1))
    settles(topic)
    assert service.asked["m"] == 2
    first.process.send_signal(signal.SIGKILL)


def test_effects_and_ids_in_one_transaction_need_no_kafka_transaction(topic, databases, run):
    """Killed between the effect and COMMIT, and between COMMIT and the commit of the offset: one effect."""
    rows = Rows(databases("postgres"))
    semel = run(consumer(topic, rows.handler, source=topic.source(instance_id="one")), store=rows.server, started=False)
    topic.send(message("m", k="k", amount=1))
    for point, effects in (("consumer.effect.after=kill", {}), ("consumer.record.after=kill", {"m": 1})):
        semel.launch(fault=point)
        semel.wait_dead(30)
        assert rows.effects() == effects and topic.unsettled() == 1
    semel.start()
    settles(topic)
    assert rows.effects() == {"m": 1}


def test_the_same_id_in_two_topics_is_two_messages_unless_the_ids_have_one_source(kafka, service, run):
    for shared_source, expected in ((False, 2), (True, 1)):
        one, two = consumers.Topic(kafka), consumers.Topic(kafka)
        source = one.source()
        source["kafka"]["topics"].append(two.name)
        id = f"both-{shared_source}"
        semel = run(consumer(one, service.handler, source=source, id={"json": "/id", **({"source": "orders"} if shared_source else {})},
                             dead_letter={"topic": one.letters_name, "create": True}))
        one.send(message(id))
        two.send(message(id))
        eventually(lambda: one.unsettled() + kafka.lag(one.group, two.name) == 0, 20, "both are settled")
        assert service.effects()[id] == expected
        semel.stop()


def test_a_renamed_consumer_with_its_scope_pinned_remembers(place, service, run):
    semel = run(consumer(place, service.handler, name="before", scope="pinned"))
    place.send(message("m"))
    settles(place)
    assert happens(service, ["m"]) == {"m": 1}
    semel.stop()
    semel.config["consumers"][0]["name"] = "after"
    semel.write_config()
    semel.start()
    place.send(message("m"))
    settles(place)
    assert service.effects() == {"m": 1}


def test_a_memory_shorter_than_the_topics_is_refused(kafka, service, run):
    """Unless it is accepted by name; without a figure it follows the topic, and says so."""
    topic = consumers.Topic(kafka, retention_ms=3 * 24 * 3_600_000)
    with pytest.raises(Died) as died:
        run(consumer(topic, service.handler, dedup={"retention": "1d"}))
    assert "dedup.retention" in died.value.text and "short_dedup" in died.value.text
    run(consumer(topic, service.handler, dedup={"retention": "1d"}, accept=["short_dedup"])).stop()
    semel = run(consumer(topic, service.handler))
    assert "7d" in semel.said() or "168h" in semel.said()
