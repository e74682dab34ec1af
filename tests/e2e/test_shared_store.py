"""Faults of a store that gateways share, the same on each: killed, frozen, cut off; and owners that are killed. Each test says what is
paid: calls = counted attempts."""
import random
import time

import pytest

import upstream
from harness import background, eventually, together
from store_faults import GRACE, LEASE, Cable, Load, assert_each_paid_once, assert_paid_once, held_calls, in_all, on, ready, record, records
from upstream import Gate

REFUSED = (503, "store-unavailable")


@pytest.fixture
def gateways(make, server):
    def start(count, **config):
        return [make(**{**on(server), **config}).start() for _ in range(count)]
    return start


@pytest.fixture
def cable(server):
    cable = Cable(server)
    yield cable
    cable.close()


# ---- killed, frozen, cut off

@pytest.mark.parametrize("answered", ["afterwards", "meanwhile"])
def test_a_store_killed_and_restarted_pays_for_no_running_call_twice(gateways, server, up, answered):
    gate = Gate()
    two = gateways(2)
    calls = held_calls(up, two, 6, gate)
    server.kill()
    refused = together(20, lambda i: two[i % 2].chat(f"new-{i}"))
    assert {(a.status, a.code) for a in refused} == {REFUSED}
    assert all(1 <= int(a.headers["retry-after"]) <= 60 for a in refused)
    assert up.paid(model="fast") == [], "refused before the upstream is called"
    eventually(lambda: not any(ready(one) for one in two), what="/readyz says so")
    if answered == "meanwhile":
        gate.open()
        for i, (first, _) in enumerate(calls):
            answer = first.result(20)
            assert answer.status == 200 and answer.headers["semel-record"] == "pending"
            assert two[i % 2].chat(f"run-{i}", model="held").status == 503, "its answer lies in the spool: no second call"
        assert in_all(two, "semel_spool_entries") == len(calls)
    server.start()
    eventually(lambda: all(ready(one) for one in two), what="ready again without a restart")
    gate.open()
    eventually(lambda: in_all(two, "semel_spool_entries") == 0, what="the spool is delivered")
    assert_paid_once(up, two, calls)
    assert {one.chat(f"new-{i}").status for i, one in enumerate(two)} == {200}


def test_clients_that_retry_while_the_store_is_killed_and_restarted_pay_once(gateways, server, up):
    two = gateways(2)
    load = Load(two)
    for _ in range(3):
        known = len(load.answers)
        eventually(lambda: len(load.answers) > known + 30, 30, "load is served")
        server.kill()
        refusals = len(load.refusals)
        eventually(lambda: len(load.refusals) > refusals + 5, 30, "refused")
        server.start()
    known = len(load.answers)
    eventually(lambda: len(load.answers) > known + 30, 30, "served again without a restart of a gateway")
    load.stop()
    assert {(a.status, a.code) for a in load.refusals} == {REFUSED} and load.lost == 0
    assert_each_paid_once(up, load)
    assert in_all(two, "semel_paid_maybe_twice_total") == 0


def test_a_store_frozen_for_longer_than_the_lease_ends_no_lease(gateways, server, up):
    gate = Gate()
    two = gateways(2)
    calls = held_calls(up, two, 6, gate)
    load = Load(two, clients=4)
    eventually(lambda: len(load.answers) > 20, 30, "load is served")
    server.freeze()
    time.sleep(LEASE + 2)
    assert not any(ready(one) for one in two)
    late = [background(two[(i + 1) % 2].chat, f"run-{i}", model="held") for i in range(len(calls))]
    server.thaw()
    late += [background(two[i % 2].chat, f"run-{i % len(calls)}", model="held") for i in range(20)]
    time.sleep(GRACE + 1)
    assert in_all(two, "semel_takeovers_total") == in_all(two, "semel_leases_lost_total") == 0
    load.stop()
    gate.open()
    assert {f.result(30).status for f in late} <= {200, 503}
    assert_paid_once(up, two, calls)
    assert_each_paid_once(up, load)
    assert {(a.status, a.code) for a in load.refusals} == {REFUSED}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streaming"])
def test_a_big_answer_that_meets_a_frozen_store_is_recorded_in_full_when_it_goes_on(gateways, server, up, stream):
    """Its client does not wait for that; the chunks of it wait in the spool."""
    gate = Gate()
    up.on("held", upstream.stream(events=60, pad="é" * 15_000, gate=gate, gate_after=50) if stream
          else upstream.plain("word " * 400_000, gate=gate))
    one, other = gateways(2)
    call = background(one.chat, "k", model="held", stream=stream)
    gate.wait_until_entered()
    server.freeze()
    gate.open()
    answer = call.result(30)
    assert answer.status == 200 and answer.whole
    eventually(lambda: one.metric("semel_spool_entries") == 1)
    server.thaw()
    eventually(lambda: one.metric("semel_spool_entries") == 0)
    for gateway in (one, other):
        again = eventually(lambda: (a := gateway.chat("k", model="held", stream=stream)).status == 200 and a)
        assert (again.whole, again.body, again.attempt, again.replayed) == (True, answer.body, 1, "true")
    one.kill()
    assert one.start().chat("k", model="held", stream=stream).body == answer.body
    assert len(up.paid()) == 1 and in_all((one, other), "semel_paid_maybe_twice_total") == 0


@pytest.mark.parametrize("mended", ["after its answer", "before its answer"])
def test_a_gateway_cut_off_from_the_store_is_taken_over_and_its_late_answer_is_nobodys(make, server, up, cable, mended):
    gate = Gate()
    up.on("held", upstream.in_turn(upstream.plain(gate=gate), upstream.plain()))
    apart = make(**on(server, cable.url), peer={"advertise": "127.0.0.1:9"}).start()
    other = make(**on(server)).start()
    owner = background(apart.chat, "k", model="held")
    gate.wait_until_entered()
    joined = [background(other.chat, "k", model="held") for _ in range(10)]
    cable.cut()
    began = time.monotonic()
    assert apart.chat("new").code == "store-unavailable"
    answers = [j.result(30) for j in joined]
    assert time.monotonic() - began < LEASE + 2
    assert {(a.status, a.body, a.attempt) for a in answers} == {(200, answers[0].body, 2)}
    # By whoever came first after the lease, or as a retry if the sweeper had already settled it.
    assert sum(a.outcome in ("taken-over", "executed") for a in answers) == 1
    assert len(up.paid(model="held")) == 2 and other.metric("semel_paid_maybe_twice_total") == 1
    expected = answers[0].body
    if mended == "before its answer":
        cable.mend()
        eventually(lambda: ready(apart))
    gate.open()
    own = owner.result(30)
    if mended == "after its answer":
        assert own.body != expected and own.headers["semel-record"] == "pending", "its client's, and marked as not recorded"
        assert apart.chat("k", model="held").status == 503, "and given to nobody else"
        cable.mend()
        eventually(lambda: apart.metric("semel_spool_entries") == 0)
        assert apart.metric("semel_spool_overtaken_total") == 1
    else:
        assert own.body == expected and own.attempt == 2, "the recorded answer"
    for one in (apart, other):
        again = one.chat("k", model="held")
        assert (again.body, again.attempt, again.replayed) == (expected, 2, "true")
    assert len(up.paid()) == 2
    assert record(other, answers[0])["possible_second_payments"] == 1


def test_a_gateway_cut_off_under_load_goes_on_by_itself_and_nothing_uncounted_is_paid(make, server, up, cable):
    apart, other = make(**on(server, cable.url)).start(), make(**on(server)).start()
    load = Load([apart, other])
    eventually(lambda: len(load.answers) > 20, 30)
    cable.cut()
    refusals = len(load.refusals)
    eventually(lambda: len(load.refusals) > refusals + 5, 30, "refused there")
    known = len(load.answers)
    eventually(lambda: len(load.answers) > known + 20, 30, "served here")
    cable.mend()
    eventually(lambda: ready(apart), 30)
    load.stop()
    assert {(a.status, a.code) for a in load.refusals} == {REFUSED}
    eventually(lambda: apart.metric("semel_spool_entries") == 0)
    paid = {key: len(up.paid(containing=f"text of {key}.")) for key in load.answers}
    more = {key: n - 1 for key, n in paid.items() if n != 1}
    assert all(n >= 1 for n in paid.values())
    assert sum(more.values()) <= in_all((apart, other), "semel_paid_maybe_twice_total"), more
    assert other.chat("after").status == apart.chat("after").status == 200


def test_under_hold_nobody_calls_again_for_a_gateway_that_was_cut_off_and_its_answer_counts(make, server, up, cable):
    hold = {"routes": {"/v1/chat/completions": {"on_unknown": "hold"}}}
    gate = Gate()
    up.on("held", upstream.plain(gate=gate))
    apart = make(**on(server, cable.url), **hold, peer={"advertise": "127.0.0.1:9"}).start()
    other = make(**on(server), **hold).start()
    owner = background(apart.chat, "k", model="held")
    gate.wait_until_entered()
    joined = background(other.chat, "k", model="held")
    cable.cut()
    for refused in (joined.result(30), other.chat("k", model="held")):
        assert (refused.status, refused.code) == (409, "outcome-unknown")
    gate.open()
    own = owner.result(30)
    assert (own.status, own.headers["semel-record"]) == (200, "pending")
    cable.mend()
    eventually(lambda: apart.metric("semel_spool_delivered_total") == 1)
    for one in (apart, other):
        again = one.chat("k", model="held")
        assert (again.status, again.body, again.attempt) == (200, own.body, 1)
    assert len(up.paid()) == 1 and in_all((apart, other), "semel_paid_maybe_twice_total") == 0


def test_connections_that_break_again_and_again_under_load_pay_for_nothing_twice(make, server, up, cable):
    """Replies are lost on the way: what was granted is read back or given back, and never called for twice."""
    two = [make(**on(server, cable.url)).start() for _ in range(2)]
    gate = Gate()
    calls = held_calls(up, two, 4, gate)
    load = Load(two)
    for _ in range(20):
        known = len(load.answers)
        eventually(lambda: len(load.answers) > known + 3, 30, "load is served")
        cable.lead_to(server.port)
    load.stop()
    gate.open()
    assert {(a.status, a.code) for a in load.refusals} <= {REFUSED} and load.lost == 0
    assert_each_paid_once(up, load)
    assert_paid_once(up, two, calls)


# ---- owners killed at random

KILLS = {"redis": 50, "postgres": 20, "mysql": 20}


def test_owners_killed_again_and_again_at_random_moments_lose_and_double_nothing_uncounted(make, server, up):
    """No more is paid than the records count as attempts; each id ends with one recorded answer, and all who got a whole one got the
    same bytes."""
    config = on(server)
    config["engine"] = {"lease": "1s"}
    three = [make(**config).start() for _ in range(3)]
    up.on("load", upstream.plain(delay=0.15))
    up.on("stream", upstream.stream(events=8, gap=0.03))
    load = Load(three, clients=6, duplicates=2, streams=True)
    dice = random.Random(7)
    for kill in range(KILLS[server.kind]):
        victim = three[kill % 3]
        answered = len(load.answers)
        time.sleep(dice.uniform(0.0, 0.3))
        victim.kill()
        victim.start()
        eventually(lambda: len(load.answers) > answered, 60, "load is served")
    load.stop()
    assert len(load.answers) >= KILLS[server.kind]
    found = records(three[0])
    assert server.intents() == len(load.answers), "no intent is lost, and there is none besides"
    calls = 0
    for i, (key, answers) in enumerate(load.answers.items()):
        again = load.ask(key, three[i % 3])
        assert {(a.status, a.whole, a.body) for a in [*answers, again]} == {(200, True, answers[0].body)}, key
        assert again.replayed == "true"
        kept = found.get(again.headers["semel-intent"]) or record(three[0], again)
        paid = len(up.paid(containing=f"text of {key}."))
        assert kept["status"] == "COMPLETED" and {a.attempt for a in [*answers, again]} == {kept["attempt"]}
        assert 1 <= paid <= kept["attempt"] - kept["attempts_uncharged"], (key, paid, kept)
        assert paid - 1 <= kept["possible_second_payments"] <= kept["attempt"] - 1, (key, paid, kept)
        calls += paid
    assert len(up.paid()) == calls, "every call belongs to an id that was answered"
    assert calls > len(load.answers), "some kills came in the middle of a call"
