"""semel consumer reset: positions of a consumer that does not run are moved; what is done stays done."""
import datetime
import time

import pytest

import consumers
from consumers import Rows, consumer, happens, message, settles
from harness import eventually


@pytest.fixture(params=["store", "transaction"])
def effects(request, databases, service):
    return service if request.param == "store" else Rows(databases("postgres"))


def reset(semel, *words):
    return semel.command_line("consumer", "reset", "under-test", "--config", semel.config_file, *words)


def test_a_consumer_that_is_set_back_reads_again_and_has_no_second_effect(topic, effects, run):
    semel = run(consumer(topic, effects.handler))
    topic.send(*[message(f"m{i}", k="k", amount=1) for i in range(8)])
    happens(effects, [f"m{i}" for i in range(8)])
    settles(topic)
    refused = reset(semel, "--to", "earliest", "--yes")
    assert refused.returncode == 2 and "1 member" in refused.stderr
    semel.stop()
    eventually(lambda: not topic.server.members(topic.group), 20, "the group is empty")
    shown = reset(semel, "--to", "earliest")
    assert shown.returncode == 0 and topic.name in shown.stdout and "nothing was changed" in shown.stderr
    assert topic.unsettled() == 0
    assert reset(semel, "--to", "earliest", "--yes").returncode == 0
    assert topic.unsettled() == 8
    semel.start()
    eventually(lambda: semel.metric("semel_duplicates_suppressed_total") == 8, 20, "all are read again")
    settles(topic)
    assert effects.effects() == {f"m{i}": 1 for i in range(8)}


def test_what_is_passed_over_is_not_read(topic, effects, run):
    semel = run(consumer(topic, effects.handler))
    topic.send(message("first", k="k", amount=1))
    happens(effects, ["first"])
    settles(topic)
    semel.stop()
    eventually(lambda: not topic.server.members(topic.group), 20, "the group is empty")
    topic.send(*[message(f"skipped{i}", k="k", amount=1) for i in range(5)])
    assert reset(semel, "--to", "latest", "--yes").returncode == 0
    semel.start()
    eventually(lambda: consumers.state_of(semel)["partitions"], 20, "partitions")
    topic.send(message("last", k="k", amount=1))
    assert happens(effects, ["last"]) == {"first": 1, "last": 1}


def test_a_time_names_the_first_message_that_is_not_older(topic, effects, run):
    semel = run(consumer(topic, effects.handler))
    topic.send(*[message(f"early{i}", k="k", amount=1) for i in range(4)])
    time.sleep(0.2)
    between = datetime.datetime.now(datetime.timezone.utc)
    time.sleep(0.2)
    topic.send(*[message(f"late{i}", k="k", amount=1) for i in range(4)])
    everything = [f"{when}{i}" for when in ("early", "late") for i in range(4)]
    happens(effects, everything)
    settles(topic)
    semel.stop()
    eventually(lambda: not topic.server.members(topic.group), 20, "the group is empty")

    utc = between.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    elsewhere = between.astimezone(datetime.timezone(datetime.timedelta(hours=5, minutes=30))).isoformat(timespec="milliseconds")
    shown = reset(semel, "--to", utc)
    assert shown.returncode == 0 and f"the first message of {utc} or later" in shown.stderr and "nothing was changed" in shown.stderr
    assert topic.unsettled() == 0
    for words, unsettled in (([utc], 4), (["-1h"], 8), ([elsewhere], 4), (["-0s"], 0)):
        assert reset(semel, "--to", *words, "--yes").returncode == 0, words
        assert topic.unsettled() == unsettled, words
    for wrong, why in (("2026-13-01T00:00:00Z", "neither"), ("2026-01-01T00:00:00", "neither"), ("2999-01-01T00:00:00Z", "lies ahead")):
        refused = reset(semel, "--to", wrong, "--yes")
        assert refused.returncode == 2 and why in refused.stderr
    assert topic.unsettled() == 0

    assert reset(semel, "--to", utc, "--yes").returncode == 0
    semel.start()
    eventually(lambda: semel.metric("semel_duplicates_suppressed_total") == 4, 20, "the late ones are read again")
    settles(topic)
    assert effects.effects() == dict.fromkeys(everything, 1)


def test_copies_that_wait_are_left_alone_unless_their_topic_is_named(topic, service, run):
    """The original is read again and runs; its copy, when it is due, finds it done. Copies that are passed over never run."""
    broken = True
    service.rule = lambda asked: 500 if broken else None
    retry = {"attempts": 1, "delays": ["15s"], "wait": "broker", "create": True}
    semel = run(consumer(topic, service.handler, retry=retry, breaker={"dead_share": "0%"}))
    copies = f"{topic.name}.{topic.group}.retry.15s"
    ids = [f"m{i}" for i in range(4)]
    topic.send(*[message(id) for id in ids])
    eventually(lambda: semel.metric("semel_retry_copies_total") == 4, 30, "all wait")
    settles(topic)
    semel.stop()
    eventually(lambda: not topic.server.members(topic.group), 30, "the group is empty")
    assert topic.server.lag(topic.group, copies) == 4

    refused = reset(semel, "--to", "earliest", "--topic", "elsewhere")
    assert refused.returncode == 2 and "does not read the topic elsewhere" in refused.stderr and copies in refused.stderr
    done = reset(semel, "--to", "earliest", "--yes")
    assert done.returncode == 0 and copies not in done.stdout and f"copies that wait in {copies} are left alone" in done.stderr
    assert topic.unsettled() == 4 and topic.server.lag(topic.group, copies) == 4
    broken = False
    semel.start()
    assert happens(service, ids) == dict.fromkeys(ids, 1)
    eventually(lambda: topic.server.lag(topic.group, copies) == 0, 60, "the copies are read, and known")
    settles(topic)
    assert service.effects() == dict.fromkeys(ids, 1)

    broken = True
    topic.send(message("dropped"))
    eventually(lambda: semel.metric("semel_retry_copies_total") == 1, 30, "it waits")
    settles(topic)
    semel.stop()
    eventually(lambda: not topic.server.members(topic.group), 30, "the group is empty")
    assert topic.server.lag(topic.group, copies) == 1
    done = reset(semel, "--to", "latest", "--topic", copies, "--yes")
    assert done.returncode == 0 and copies in done.stdout and "one that is passed over never runs" in done.stderr
    assert topic.server.lag(topic.group, copies) == 0
    broken = False
    semel.start()
    topic.send(message("last"))
    assert happens(service, ["last"]) == dict.fromkeys([*ids, "last"], 1)
