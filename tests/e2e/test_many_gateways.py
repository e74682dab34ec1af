"""Several gateways on one shared store are one: a duplicate joins a running call wherever it lands, and nothing is paid twice that need
not be.

Each test says what is paid: calls = counted attempts.
"""
import glob
import re
import signal
import time

import pytest

import upstream
from harness import Exchange, Lost, background, eventually, free_port, together
from store_faults import LEASE, in_all, on
from upstream import Gate

JOIN = {"/api/chat": {"on_running": "join"}}
one_store_will_do = pytest.mark.parametrize("unharmed_server", ["redis"], indirect=True)  # about what lies between gateways


@pytest.fixture
def gateways(make, unharmed_server):
    """gateways(count, env=[...], **config) -> started gateways on one store, with a short lease."""
    def start(count, env=(), **config):
        made = [make(**on(unharmed_server), **config) for _ in range(count)]
        for i, one in enumerate(made):
            one.start(env=env[i] if i < len(env) else None)
        return made
    return start


def shifted(offset):
    found = glob.glob("/usr/lib/*/faketime/libfaketimeMT.so.1") or glob.glob("/usr/lib/*/faketime/libfaketime.so.1")
    assert found, "libfaketime is not there: install the package faketime"
    return {"LD_PRELOAD": found[0], "FAKETIME": offset, "FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1"}


def freeze(semel):
    semel.process.send_signal(signal.SIGSTOP)


def thaw(semel):
    semel.process.send_signal(signal.SIGCONT)


def peers_of(semel):
    return int(re.search(r"peers http://127\.0\.0\.1:(\d+)", semel.said())[1])


def held(gate, then=None):
    """The first call says nothing before the gate opens; every later one is answered at once."""
    return upstream.in_turn(then or upstream.plain(gate=gate), upstream.plain())


def whole_or_cut(call):
    """The rest of an answer; a connection that ends without a head counts as cut."""
    try:
        return call.rest()
    except (Lost, OSError):
        return None


# ---- joining

@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streaming"])
def test_two_hundred_duplicates_over_three_gateways_make_one_paid_call(gateways, up, stream):
    up.on("slow", upstream.stream(events=30, gap=0.05) if stream else upstream.plain(delay=1.5))
    three = gateways(3)
    answers = together(200, lambda i: three[i % 3].chat("click-1", "once", model="slow", stream=stream))
    call, = up.paid()
    assert {(a.status, a.body, a.whole) for a in answers} == {(200, answers[0].body, True)}
    if stream:
        assert answers[0].body == call.visible
    outcomes = [a.outcome for a in answers]
    assert outcomes.count("executed") == 1 and set(outcomes) <= {"executed", "joined", "replayed"}
    assert all(a.replayed == ("false" if a.outcome == "executed" else "true") for a in answers)
    assert {a.attempt for a in answers} == {1}
    assert in_all(three, "semel_paid_maybe_twice_total") == 0


def test_a_joiner_elsewhere_gets_every_event_as_it_comes_over_one_connection(gateways, up):
    gate = Gate()
    up.on("held", upstream.stream(events=6, gate=gate, gate_after=3))
    first, second = gateways(2)
    owner = first.open_chat("k", model="held", stream=True)
    owner.read_events(3)
    elsewhere = [second.open_chat("k", model="held", stream=True) for _ in range(50)]
    for joiner in elsewhere:
        assert joiner.read_events(3) == owner.body, "from the first event, while the call runs"
    assert second.metric("semel_peer_follows_total") == 1 and first.metric("semel_peer_connections") == 1
    here = first.open_chat("k", model="held", stream=True)
    here.read_events(3)
    gate.open()
    expected, beside = owner.rest(), here.rest()
    for joiner in elsewhere:
        answer = joiner.rest()
        assert answer.whole and answer.body == expected.body == up.paid()[0].visible
        assert answer.outcome == "joined"
        assert set(answer.headers) == set(beside.headers), "the headers of a joiner of the owner's own"
    assert second.metric("semel_peer_fallbacks_total") == 0 and len(up.paid()) == 1
    eventually(lambda: first.metric("semel_peer_connections") == 0)


@one_store_will_do
@pytest.mark.parametrize("peer, told", [({"advertise": "localhost"}, "localhost"), ({"listen": "127.0.0.2:0"}, "127.0.0.2")],
                         ids=["a name", "another address"])
def test_an_owner_is_followed_where_its_lease_says(gateways, up, peer, told):
    gate = Gate()
    up.on("held", upstream.stream(events=6, gate=gate, gate_after=3))
    first, second = gateways(2, peer=peer)
    assert f"peers http://{told}:" in first.said()
    owner = first.open_chat("k", model="held", stream=True)
    owner.read_events(3)
    elsewhere = second.open_chat("k", model="held", stream=True)
    elsewhere.read_events(3)
    gate.open()
    assert elsewhere.rest().body == owner.rest().body and second.metric("semel_peer_fallbacks_total") == 0


@one_store_will_do
def test_a_chat_is_joined_elsewhere_and_marked_as_not_its_own(gateways, up):
    gate = Gate()
    up.on("held", upstream.plain(gate=gate))
    up.on("streamed", upstream.stream(events=4, gate=gate, gate_after=2))
    first, second = gateways(2, routes=JOIN)
    calls = [background(one.say, "r1", session="s1", model="held") for one in (first, second)]
    streams = [background(one.say, "r2", session="s2", model="streamed", stream=True) for one in (first, second)]
    eventually(lambda: in_all((first, second), "semel_peer_connections") == 2)
    gate.open()
    plain = [c.result(30).json for c in calls]
    assert sorted(p.pop("fromCache") for p in plain) == [False, True] and plain[0] == plain[1]
    bodies = [s.result(30).body for s in streams]
    assert len({b.replace(b'"fromCache":true', b'"fromCache":false') for b in bodies}) == 1 and bodies[0] != bodies[1]
    assert len(up.paid()) == 2


@one_store_will_do
def test_a_duplicate_elsewhere_of_a_route_that_accepts_is_told_at_once(gateways, up):
    gate = Gate()
    up.on("held", upstream.plain(gate=gate))
    first, second = gateways(2)
    running = background(first.say, "r1", model="held")
    gate.wait_until_entered()
    assert second.say("r1", model="held").status == 202
    assert second.metric("semel_peer_follows_total") == 0
    gate.open()
    assert running.result(20).status == 200 and len(up.paid()) == 1


@one_store_will_do
def test_a_failure_is_the_same_for_everyone_who_joined_it_wherever(gateways, up):
    up.on("failing", upstream.error(429, message="slow down", delay=2.0, headers=[("Retry-After", "3")]))
    first, second = gateways(2)
    answers = together(20, lambda i: (first, second)[i % 2].chat("k", model="failing"))
    assert {(a.status, a.body, a.headers["retry-after"]) for a in answers} == {(429, answers[0].body, "3")}
    assert len(up.paid()) == 1


# ---- owners that die, freeze, or cannot be reached

def test_joiners_elsewhere_take_over_from_an_owner_that_was_killed(gateways, up):
    gate = Gate()
    up.on("held", held(gate))
    first, second = gateways(2)
    background(first.try_chat, "k", model="held")
    gate.wait_until_entered()
    joiners = [background(second.chat, "k", model="held") for _ in range(20)]
    eventually(lambda: first.metric("semel_peer_connections") == 1)
    first.kill()
    killed = time.monotonic()
    answers = [j.result(30) for j in joiners]
    assert time.monotonic() - killed < LEASE + 1
    assert {(a.status, a.body, a.attempt) for a in answers} == {(200, answers[0].body, 2)}
    # Executed: the sweeper had settled the dead lease before the joiners' acquire came.
    assert sum(a.outcome in ("taken-over", "executed") for a in answers) == 1
    assert len(up.paid()) == 2 and second.metric("semel_paid_maybe_twice_total") == 1
    gate.open()


def test_joiners_elsewhere_that_had_bytes_of_a_killed_owner_are_visibly_cut(gateways, up):
    gate = Gate()
    up.on("held", upstream.in_turn(upstream.stream(events=6, gate=gate, gate_after=3), upstream.stream(events=6)))
    first, second = gateways(2)
    owner = first.open_chat("k", model="held", stream=True)
    owner.read_events(3)
    elsewhere = [second.open_chat("k", model="held", stream=True) for _ in range(5)]
    for joiner in elsewhere:
        joiner.read_events(3)
    first.kill()
    for joiner in elsewhere:
        answer = joiner.rest()
        assert not answer.whole and answer.body == up.paid()[0].visible, "bytes of one attempt, and no end"
    again = second.chat("k", model="held", stream=True)
    assert again.whole and again.body == up.paid()[1].visible and again.attempt == 2
    assert len(up.paid()) == 2
    gate.open()


@pytest.mark.parametrize("late", ["answers", "fails", "streams"])
def test_a_frozen_owners_late_word_is_nobodys(gateways, up, late):
    gate = Gate()
    first_call = {"answers": upstream.plain(gate=gate), "fails": upstream.error(500, message="late", gate=gate),
                  "streams": upstream.stream(events=6, gate=gate, gate_after=3)}[late]
    stream = late == "streams"
    up.on("held", upstream.in_turn(first_call, upstream.stream(events=6) if stream else upstream.plain()))
    first, second = gateways(2)
    zombie = first.open_chat("k", model="held", stream=stream)
    gate.wait_until_entered()
    if stream:
        zombie.read_events(3)
    freeze(first)
    answer = second.chat("k", model="held", stream=stream)
    assert answer.status == 200 and answer.whole and answer.attempt == 2
    gate.open()
    thaw(first)
    got = whole_or_cut(zombie)
    if stream:
        assert not got.whole and got.body in up.paid()[0].visible
    else:
        assert got is None or got.body == answer.body or got.status != 200, "its own late answer is never final"
    assert first.chat("k", model="held", stream=stream).body == answer.body, "the record is the second one's"
    assert second.chat("k", model="held", stream=stream).body == answer.body
    assert len(up.paid()) == 2 and second.metric("semel_takeovers_after_start_total") == 1
    assert second.record(answer)["attempt"] == 2


def test_a_follower_leaves_a_frozen_owner_and_gets_the_new_attempt(gateways, up):
    gate = Gate()
    up.on("held", held(gate))
    first, second = gateways(2)
    background(first.try_chat, "k", model="held")
    gate.wait_until_entered()
    joiners = [background(second.chat, "k", model="held") for _ in range(10)]
    eventually(lambda: first.metric("semel_peer_connections") == 1)
    freeze(first)
    answers = [j.result(30) for j in joiners]
    assert {(a.status, a.body, a.attempt) for a in answers} == {(200, answers[0].body, 2)}
    assert second.metric("semel_peer_fallbacks_total") >= 1 and len(up.paid()) == 2
    gate.open()
    thaw(first)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streaming"])
def test_an_owner_that_lives_and_cannot_be_reached_is_replayed_when_it_has_completed(gateways, up, stream):
    gate = Gate()
    up.on("held", upstream.stream(events=6, gate=gate, gate_after=3) if stream else upstream.plain(gate=gate))
    first, second = gateways(2, peer={"advertise": f"127.0.0.1:{free_port()}"})
    owner = background(first.chat, "k", model="held", stream=stream)
    gate.wait_until_entered()
    joiners = [background(second.chat, "k", model="held", stream=stream) for _ in range(20)]
    eventually(lambda: second.metric("semel_peer_fallbacks_total") >= 1)
    time.sleep(LEASE + 1)  # it lives: nobody takes over
    gate.open()
    expected = owner.result(20)
    completed = time.monotonic()
    for joiner in joiners:
        answer = joiner.result(20)
        assert answer.body == expected.body and answer.whole and answer.outcome == "replayed"
    assert time.monotonic() - completed < 1
    assert len(up.paid()) == 1


# ---- leases

def test_fifty_at_once_on_a_lapsed_lease_make_exactly_one_takeover(gateways, up):
    gate = Gate()
    up.on("held", held(gate))
    first, *two = gateways(3)
    background(first.try_chat, "k", model="held")
    gate.wait_until_entered()
    first.kill()
    time.sleep(LEASE + 0.2)
    answers = together(50, lambda i: two[i % 2].chat("k", model="held"))
    assert {(a.status, a.body, a.attempt) for a in answers} == {(200, answers[0].body, 2)}
    assert in_all(two, "semel_grants_total") == 1, "a swept lease is granted as a retry, a dead one as a takeover"
    assert len(up.paid()) == 2
    gate.open()


def test_gateways_whose_clocks_are_hours_apart_take_over_neither_early_nor_never(gateways, up):
    gate, second_gate = Gate(), Gate()
    up.on("held", upstream.plain(gate=gate))
    up.on("killed", held(second_gate))
    ahead, behind = gateways(2, env=[shifted("+1h"), shifted("-1h")])
    for number, (owner, other) in enumerate([(ahead, behind), (behind, ahead)]):
        key = f"lives-{number}"
        running = background(owner.chat, key, model="held")
        gate.wait_until_entered()
        joined = background(other.chat, key, model="held")
        if number == 0:
            time.sleep(2 * LEASE)  # an owner judged by the other's clock would be dead
            gate.open()
        assert running.result(20).body == joined.result(20).body
        assert (running.result(0).outcome, joined.result(0).attempt) == ("executed", 1)
    assert len(up.paid(model="held")) == 2 and in_all((ahead, behind), "semel_takeovers_total") == 0
    background(ahead.try_chat, "dies", model="killed")
    second_gate.wait_until_entered()
    ahead.kill()
    killed = time.monotonic()
    assert behind.chat("dies", model="killed").attempt == 2
    assert time.monotonic() - killed < LEASE + 1, "no lease is eternal"
    assert len(up.paid(model="killed")) == 2
    second_gate.open()


# ---- ending, and strangers

@one_store_will_do
def test_a_draining_owner_serves_followers_elsewhere_and_a_draining_follower_ends(gateways, up):
    gate = Gate()
    up.on("held", upstream.stream(events=6, gate=gate, gate_after=3))
    first, second, third = gateways(3)
    owner = first.open_chat("k", model="held", stream=True)
    owner.read_events(3)
    elsewhere = [one.open_chat("k", model="held", stream=True) for one in (second, third)]
    for joiner in elsewhere:
        joiner.read_events(3)
    elsewhere[1].close()  # nobody is left at the third: what it follows must not keep it
    assert third.stop(10) == 0
    ending = background(first.stop)
    eventually(lambda: "draining" in first.said())
    gate.open()
    assert elsewhere[0].rest().body == owner.rest().body == up.paid()[0].visible
    assert ending.result(20) == 0 and second.stop() == 0
    assert len(up.paid()) == 1


@one_store_will_do
def test_a_stranger_at_the_peer_address_is_told_nothing(gateways, up):
    first, = gateways(1)
    port = peers_of(first)
    for path, headers in [("/", {}), ("/metrics", {}), ("/flights/" + "A" * 43 + "?token=1", {}),
                          ("/flights/" + "A" * 43 + "?token=1", {"Authorization": "Semel-Peer " + "A" * 43,
                                                                 "Semel-Peer-Nonce": "A" * 22})]:
        answer = Exchange(port, "GET", path, headers=headers).rest()
        assert (answer.status, answer.body) == (401, b"")
        assert set(answer.headers) <= {"content-length", "connection", "date"}
    assert first.metric("semel_peer_refused_total") == 4
