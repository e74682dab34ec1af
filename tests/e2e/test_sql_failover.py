"""Failovers of a PostgreSQL to standbys that lack the last commits, clocks of servers that differ, and addresses of several hosts. Each
test says what is paid: calls = counted attempts."""
import glob
import time

import pytest

import upstream
from harness import Died, background, eventually
from sql_server import DATABASE, PASSWORD, USER
from store_faults import LEASE, Cable, on, ready, record, records
from upstream import Gate

REFUSED = (503, "store-unavailable")


@pytest.fixture
def primary(sql_servers):
    return sql_servers("postgres")


@pytest.fixture
def standby(sql_servers, primary):
    return sql_servers.keep(primary.standby())


def hosts(*servers, options="target_session_attrs=read-write"):
    """A URL that names all of them."""
    where = ",".join(f"127.0.0.1:{s.port}" for s in servers)
    return f"postgresql://{USER}:{PASSWORD}@{where}/{DATABASE}" + (f"?{options}" if options else "")


def held(gate):
    """The first call waits for the gate; every later one is answered at once."""
    return upstream.in_turn(upstream.plain(gate=gate), upstream.plain())


def clock(offset):
    """Environment of a server whose clock is elsewhere."""
    found = glob.glob("/usr/lib/*/faketime/libfaketime.so.1")
    assert found, "libfaketime is not there: install the package faketime"
    return {"LD_PRELOAD": found[0], "FAKETIME": offset, "FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1"}


@pytest.mark.parametrize("options", ["target_session_attrs=read-write", ""], ids=["asked for", "not asked for"])
def test_state_is_never_read_from_a_standby(make, primary, standby, up, options):
    first_named = make(**on(primary, hosts(standby, primary, options=options)))
    try:
        first_named.start()
    except Died as died:  # libpq takes the first that answers unless the URL says otherwise
        assert not options and "standby" in died.text and "target_session_attrs" in died.text
        return
    assert first_named.chat("k").status == 200
    primary.part()
    assert first_named.chat("new").status == 200
    assert first_named.chat("k").replayed == "true" and len(up.paid()) == 2
    assert primary.count("records") == 2
    primary.kill()
    refused = first_named.chat("k2")
    assert (refused.status, refused.code) == REFUSED and len(up.paid()) == 2
    eventually(lambda: not ready(first_named))
    time.sleep(1)  # a standby answers there: nobody may take its word
    assert first_named.chat("k2").status == 503 and len(up.paid()) == 2


@pytest.mark.parametrize("asked", ["at the end only", "in between"])
def test_a_failover_that_loses_a_claim_is_noticed_fenced_and_counted(make, primary, standby, up, asked):
    config = on(primary, hosts(primary, standby))
    one, other = make(**config).start(), make(**config).start()
    kept = one.chat("kept")
    eventually(lambda: primary.has_caught_up(standby))
    gate = Gate()
    up.on("held", held(gate))
    primary.part()
    call = background(one.chat, "k", model="held")
    gate.wait_until_entered()
    primary.kill()
    standby.promote()
    eventually(lambda: ready(one) and ready(other), 30, "both have found the new primary")
    assert other.chat("kept").body == kept.body
    if asked == "in between":
        between = other.chat("k", model="held")
        assert (between.status, between.attempt) == (200, 1), "to the new primary it is a first one"
    gate.open()
    answer = call.result(30)
    again = [g.chat("k", model="held") for g in (one, other)]
    assert answer.status == 200
    if asked == "in between":
        assert {a.body for a in [answer, *again]} == {between.body}, "the late answer is fenced: its client gets the recorded one"
        assert len(up.paid(model="held")) == 2
    else:
        assert {a.body for a in again} == {answer.body} and {a.replayed for a in again} == {"true"}
        assert len(up.paid(model="held")) == 1
    assert one.metric("semel_claim_lost_total") == 1
    assert other.metric("semel_claim_lost_total") == 0
    assert record(one, answer)["status"] == "COMPLETED"
    assert standby.intents() == 2


def test_an_answer_that_a_failover_forgot_is_paid_again_and_one_that_was_copied_is_not(make, primary, standby, up):
    config = on(primary, hosts(primary, standby))
    one = make(**config).start()
    copied = one.chat("copied")
    eventually(lambda: primary.has_caught_up(standby))
    primary.part()
    lost = one.chat("lost")
    one.kill()  # it remembers answers itself
    primary.kill()
    standby.promote()
    one.start()
    assert one.chat("copied").body == copied.body
    again = one.chat("lost")
    assert (again.status, again.outcome) == (200, "executed") and again.body != lost.body
    assert len(up.paid()) == 3


def test_an_old_primary_that_comes_back_is_not_asked_by_who_has_found_the_new_one(make, primary, standby, up):
    """Two primaries: who is connected to the new one stays there. Only a start, or the loss of all connections, could lead to the old
    one again; that is the administrator's to keep from happening."""
    config = on(primary, hosts(standby, primary))
    one, other = make(**config).start(), make(**config).start()
    eventually(lambda: primary.has_caught_up(standby))
    primary.part()
    primary.kill()
    standby.promote()
    eventually(lambda: ready(one) and ready(other), 30, "both have found the new primary")
    first = one.chat("k")
    assert other.chat("k").body == first.body, "it is connected to the new one, too: ready may be what it was before the end of the old one"
    primary.start()
    time.sleep(1)
    for gateway in (one, other):
        again = gateway.chat("k")
        assert (again.body, again.replayed) == (first.body, "true")
        assert gateway.chat(f"new-{gateway.port}").status == 200
    assert len(up.paid()) == 3 and primary.intents() == 0 and standby.intents() == 3


def test_a_primary_that_becomes_a_standby_under_its_clients_is_left(make, primary, standby, up):
    """A switch-over by an administrator: what was the primary still answers, and refuses to write."""
    config = on(primary, hosts(primary, standby))
    one, other = make(**config).start(), make(**config).start()
    gate = Gate()
    up.on("held", upstream.plain(gate=gate))
    first = one.chat("k")
    call = background(one.chat, "running", model="held")
    gate.wait_until_entered()
    eventually(lambda: primary.has_caught_up(standby))
    primary.sql("ALTER SYSTEM SET default_transaction_read_only = on")
    primary.sql("SELECT pg_reload_conf()")
    standby.promote()
    eventually(lambda: ready(one) and ready(other), 30, "both have found the new primary")
    assert eventually(lambda: (a := other.chat("new")).status == 200 and a, 20).outcome == "executed"
    gate.open()
    answer = call.result(30)
    assert answer.status == 200
    eventually(lambda: one.metric("semel_spool_entries") == 0, 20)
    for gateway in (one, other):
        assert gateway.chat("k").body == first.body
        assert gateway.chat("running", model="held").body == answer.body
    assert len(up.paid()) == 3 and standby.intents() == 3


def test_tokens_grow_over_a_failover_to_a_clock_an_hour_behind(make, sql_servers, primary, up):
    behind = sql_servers.keep(primary.standby(env=clock("-1h")))
    now = "SELECT extract(epoch FROM clock_timestamp())::bigint"
    assert 3500 < int(primary.sql(now)[0][0]) - int(behind.sql(now)[0][0]) < 3700
    cable = Cable(primary)
    config = on(primary, cable.url)
    one, other = make(**config).start(), make(**config).start()
    gate = Gate()
    up.on("held", held(gate))
    up.on("failing", upstream.in_turn(upstream.error(429), upstream.plain()))
    running = background(one.chat, "running", model="held")
    gate.wait_until_entered()
    done, failed = one.chat("done"), one.chat("failed", model="failing")
    assert (done.status, failed.status) == (200, 429)
    before = {intent: r["token"] for intent, r in records(one).items()}
    assert len(before) == 3
    eventually(lambda: primary.has_caught_up(behind))
    primary.kill()
    behind.promote()
    cable.lead_to(behind.port)
    eventually(lambda: ready(one) and ready(other), 30)
    assert other.chat("done").body == done.body, "what was answered stays answered"
    retried = other.chat("failed", model="failing")
    assert (retried.status, retried.attempt) == (200, 2)
    assert record(other, retried)["token"] > before[retried.headers["semel-intent"]], "above every earlier one of its id"
    joined = background(other.chat, "running", model="held")
    time.sleep(LEASE + 1)  # its owner renews by the new clock
    gate.open()
    assert running.result(20).body == joined.result(20).body and running.result(0).attempt == 1
    after = {intent: r["token"] for intent, r in records(one).items()}
    assert after.keys() == before.keys() and all(after[i] >= before[i] for i in before)
    assert len(up.paid(model="held")) == 1 and len(up.paid()) == 4
    assert (one.metric("semel_clock_jumps_total"), other.metric("semel_paid_maybe_twice_total")) == (1, 0)
    cable.close()
