"""A handler or a store that is ill or away while messages go on coming: nobody is given up, it is said, and all is made up for afterwards.
SEMEL_OUTAGE_SECONDS says how long (6), SEMEL_OUTAGE_RATE how many messages come a second (1,000)."""
import os
import time

import pytest

import consumers
from consumers import Rows, consumer, happens, message, settles
from harness import background, eventually

SECONDS = float(os.environ.get("SEMEL_OUTAGE_SECONDS", 6))
RATE = int(os.environ.get("SEMEL_OUTAGE_RATE", 1000))
PORTIONS = 10  # a second
TRIES_A_SECOND = 20  # of a consumer that only looks whether its handler is well again; more is a hot loop
MEMORY_KIB = 400 * 1024


def arrive(topic, seconds):
    """Messages at an even rate; their ids."""
    ids, begun = [], time.monotonic()
    for portion in range(int(seconds * PORTIONS)):
        new = [f"m{len(ids) + i}" for i in range(RATE // PORTIONS)]
        topic.send(*[message(id) for id in new])
        ids += new
        time.sleep(max(0, begun + (portion + 1) / PORTIONS - time.monotonic()))
    return ids


@pytest.mark.parametrize("how", [404, 401, "down"])
def test_messages_that_come_while_the_handler_is_ill_are_kept_and_handled_when_it_is_well(how, topic, service, run):
    service.keep_alive = how != "down"  # else kept connections would outlive the listener
    sick = {"now": False}
    service.rule = lambda asked: how if sick["now"] else None
    semel = run(consumer(topic, service.handler, concurrency=16))
    arriving = background(arrive, topic, SECONDS + 2)
    eventually(lambda: len(service.effects()) >= RATE // 4, 30, "it works")
    sick["now"] = True
    if how == "down":
        service.close()
    fell_ill = time.monotonic()
    eventually(lambda: consumers.state_of(semel)["condition"] == "ill", 20, "it says that it is ill")
    tried = sum(service.asked.values())
    while time.monotonic() < fell_ill + SECONDS:
        state = consumers.state_of(semel)
        assert state["condition"] == "ill" and state["alarms"] and semel.ask_admin("/readyz").status == 200
        time.sleep(0.5)
    assert sum(service.asked.values()) - tried <= SECONDS * TRIES_A_SECOND + 16
    sick["now"] = False
    if how == "down":
        service.open()
    ids = arriving.result(60 + SECONDS)
    eventually(lambda: len(service.happened) >= len(ids), 120 + len(ids) / 200, "all are handled")
    found = happens(service, ids)
    settles(topic, 60)
    assert len(found) == len(ids) and set(found.values()) == {1} and not topic.letters()
    state = consumers.state_of(semel)
    assert state["condition"] == "running" and not state["alarms"]
    assert semel.metric("semel_partitions_lost_total") == 0 and semel.rss_peak_kib < MEMORY_KIB
    print(f"{how}: {len(ids)} messages, ill for {SECONDS} s, asked {sum(service.asked.values())} times, peak {semel.rss_peak_kib / 1024:.0f} MiB")


def test_messages_that_come_while_the_store_is_away_are_kept_and_handled_once_when_it_is_back(server, topic, service, run):
    """Killed for longer than a lease: what had happened is recorded when it is back, nothing is acknowledged before."""
    if server.kind == "redis":
        effects, parts = service, [service.handler]
    elif server.kind == "postgres":
        effects, parts = service, [service.handler, {"strategy": "table", "database": {"postgres": {"url": server.url()}}}]
    else:
        effects, parts = (rows := Rows(server)), [rows.handler]
    service.rule = lambda asked: time.sleep(0.02)
    semel = run(consumer(topic, *parts, concurrency=16), store=server)
    a, b = [f"a{i}" for i in range(300)], [f"b{i}" for i in range(300)]
    topic.send(*[message(id, k="k", amount=1) for id in a])
    eventually(lambda: len(effects.effects()) >= 50, 20, "it works")
    server.kill()
    topic.send(*[message(id, k="k", amount=1) for id in b])
    eventually(lambda: consumers.state_of(semel)["alarms"], 20, "it says so")
    time.sleep(2)  # positions of what was done before are committed by then
    stands = topic.unsettled()
    time.sleep(3)  # the lease is 2 s
    assert consumers.state_of(semel)["alarms"] and topic.unsettled() == stands >= 300
    server.start()
    found = happens(effects, [*a, *b], 60)
    settles(topic, 60)
    assert set(found.values()) == {1} and not topic.letters()
    # In doubt is at most what was under way at the kill: a claim or a COMMIT whose answer died with the server.
    assert semel.metric("semel_message_unknown_outcomes_total") <= len(a) - 50
    eventually(lambda: consumers.state_of(semel)["condition"] == "running" and not consumers.state_of(semel)["alarms"], 20, "no alarm any more")
