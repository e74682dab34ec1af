"""semel consumer list, lag, pause, resume, drain; what the admin address and the start say."""
import json

import pytest

import consumers
from consumers import Rows, consumer, happens, message, settles
from harness import eventually


def ask(semel, *words, code=0):
    done = semel.command_line("consumer", *words, "--config", semel.config_file, "--json")
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout) if done.stdout.strip() else None


def the(found, name="under-test"):
    return next(one for one in found["consumers"] if one["name"] == name)


def test_list_tells_each_consumers_condition_and_promise(place, service, run):
    semel = run(consumer(place, service.handler))
    place.send(message("m"))
    happens(service, ["m"])
    found = the(ask(semel, "list"))
    assert found["condition"] == "running" and found["group"] == place.group and "lost" in found["promise"]
    text = semel.command_line("consumer", "list", "--config", semel.config_file).stdout
    assert "under-test" in text and "running" in text
    assert "under-test" in semel.said() and "lost" in semel.said()  # the promise in words, at the start


def test_lag_is_what_is_not_yet_settled(place, service, run):
    """Of a paused consumer it grows."""
    semel = run(consumer(place, service.handler))
    eventually(lambda: consumers.state_of(semel)["partitions"], what="partitions")
    ask(semel, "pause", "under-test")
    eventually(lambda: consumers.state_of(semel)["condition"] == "paused")
    place.send(*[message(f"m{i}") for i in range(10)])
    eventually(lambda: ask(semel, "lag", "under-test")["lag"] == 10, 20, "a lag of 10")
    ask(semel, "resume", "under-test")
    settles(place)
    eventually(lambda: ask(semel, "lag", "under-test")["lag"] == 0, 20, "no lag")


def test_a_paused_consumer_starts_nothing_and_keeps_its_place_and_resume_goes_on(topic, service, run):
    semel = run(consumer(topic, service.handler))
    topic.send(message("m0"))
    settles(topic)
    ask(semel, "pause", "under-test")
    topic.send(*[message(f"p{i}") for i in range(20)])
    eventually(lambda: topic.unsettled() == 20)
    assert len(topic.server.members(topic.group)) == 1 and service.effects() == {"m0": 1}
    assert semel.ask_admin("/readyz").status == 200
    ask(semel, "resume", "under-test")
    happens(service, [f"p{i}" for i in range(20)])


def test_drain_hands_over_to_the_others(topic, databases, run):
    rows = Rows(databases("postgres"))
    first, second = (run(consumer(topic, rows.handler), store=rows.server) for _ in range(2))
    eventually(lambda: topic.server.working_members(topic.group) == 2, 20, "two members")
    ask(first, "drain", "under-test")
    eventually(lambda: len(topic.server.members(topic.group)) == 1, 20, "it has left")
    topic.send(*[message(f"m{i}", k="k", amount=1) for i in range(20)])
    assert set(happens(rows, [f"m{i}" for i in range(20)]).values()) == {1}
    assert first.ask_admin("/healthz").status == 200 and second.metric("semel_effects_applied_total") == 20


def test_a_name_that_does_not_exist_is_told(topic, service, run):
    semel = run(consumer(topic, service.handler))
    done = semel.command_line("consumer", "pause", "nobody", "--config", semel.config_file)
    assert done.returncode != 0 and "nobody" in done.stderr and "under-test" in done.stderr


@pytest.mark.parametrize("strategy", ["store", "transaction"])
def test_doctor_says_what_each_consumer_promises(strategy, topic, databases, service, run):
    rows = Rows(databases("postgres"))
    semel = run(consumer(topic, service.handler if strategy == "store" else rows.handler), started=False)
    done = semel.command_line("doctor", "--config", semel.config_file)
    assert "under-test" in done.stdout and ("once" in done.stdout or "lost" in done.stdout)
