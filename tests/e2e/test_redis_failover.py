"""Failovers, replicas that do not confirm, time and tokens on Redis. Each test says what is paid:
calls = counted attempts."""
import glob
import time

import pytest

import upstream
from harness import background, eventually, together
from redis_faults import KEEPS, Replicated, record_keys
from redis_server import RedisServer
from store_faults import LEASE, Cable, on, ready, record, records
from upstream import Gate

REFUSED = (503, "store-unavailable")


@pytest.fixture
def replicated(tmp_path):
    """replicated(**options) -> a Replicated."""
    made = []

    def start(**options):
        made.append(Replicated(tmp_path / f"replicated{len(made)}", **options))
        return made[-1]
    yield start
    for one in made:
        one.clean_up()


def clock(offset):
    """Environment of a redis-server whose clock is elsewhere."""
    found = glob.glob("/usr/lib/*/faketime/libfaketime.so.1")
    assert found, "libfaketime is not there: install the package faketime"
    # Redis' own allocator asks for the time before libfaketime is ready; with another one it starts.
    allocator = glob.glob("/usr/lib/*/libtcmalloc_minimal.so.4")
    assert allocator, "libtcmalloc is not there: install the package libgoogle-perftools-dev"
    return {"LD_PRELOAD": f"{allocator[0]}:{found[0]}", "FAKETIME": offset, "FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1"}


def held(gate):
    """The first call waits for the gate; every later one is answered at once."""
    return upstream.in_turn(upstream.plain(gate=gate), upstream.plain())


# ---- failovers

@pytest.mark.parametrize("asked", ["at the end only", "in between"])
def test_a_failover_that_loses_a_claim_is_noticed_fenced_and_counted(make, replicated, up, asked):
    cluster = replicated()
    config = on(cluster.master, cluster.url)
    one, other = make(**config).start(), make(**config).start()
    kept = one.chat("kept")
    gate = Gate()
    up.on("held", held(gate))
    eventually(lambda: all(len(record_keys(r)) == 1 for r in cluster.replicas), what="the first record is copied")
    cluster.part()
    call = background(one.chat, "k", model="held")
    gate.wait_until_entered()
    cluster.fail_over()
    eventually(lambda: ready(one) and ready(other), 30, "both have found the new master")
    assert other.chat("kept").body == kept.body
    if asked == "in between":
        between = other.chat("k", model="held")
        assert (between.status, between.attempt) == (200, 1), "to the new master it is a first one"
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


def test_a_failover_with_replicas_that_were_waited_for_loses_nothing(make, replicated, up):
    cluster = replicated(replicas=1)
    config = on(cluster.master, cluster.url, wait_replicas=1)
    one, other = make(**config).start(), make(**config).start()
    gate = Gate()
    up.on("held", upstream.plain(gate=gate))
    done = {f"done-{i}": one.chat(f"done-{i}") for i in range(5)}
    call = background(one.chat, "k", model="held")
    gate.wait_until_entered()
    cluster.fail_over()
    gate.open()
    answer = call.result(30)
    assert answer.status == 200
    for key, first in done.items():
        again = eventually(lambda k=key: (a := other.chat(k)).status == 200 and a, 30, "it has found the new master")
        assert (again.body, again.replayed) == (first.body, "true")
    refused = other.chat("new")
    assert (refused.status, refused.code) == REFUSED, "no replica is left to confirm"
    spare = make_replica(cluster, cluster.promoted())
    eventually(lambda: one.metric("semel_spool_entries") == 0, 30, "recorded once a replica confirms")
    again = eventually(lambda: (a := other.chat("k", model="held")).status == 200 and a, 30)
    assert again.body == answer.body and spare.info("master_link_status") == "up"
    assert len(up.paid(model="held")) == 1 and len(up.paid()) == 6
    assert one.metric("semel_claim_lost_total") == 0


def make_replica(cluster, master):
    cluster.replicas.append(RedisServer(master.folder.parent / "spare", "--masteruser", "copier", "--masterauth", "copy",
                                        "--replicaof", "127.0.0.1", str(master.port)))
    return cluster.replicas[-1]


# ---- WAIT

def test_a_claim_that_no_replica_confirms_is_refused_before_the_call(make, replicated, up):
    pair = replicated(replicas=1, sentinels=0)
    one = make(**on(pair.master, wait_replicas=1, wait_timeout="800ms")).start()
    assert one.chat("before").status == 200
    pair.replicas[0].freeze()
    refused = together(5, lambda i: one.chat(f"k{i}"))
    assert {(a.status, a.code) for a in refused} == {REFUSED} and len(up.paid()) == 1
    pair.replicas[0].thaw()
    for i in range(5):
        answer = eventually(lambda key=f"k{i}": (a := one.chat(key)).status == 200 and a, 20)
        assert answer.outcome == "executed"
    assert len(up.paid()) == 6 and one.metric("semel_paid_maybe_twice_total") == 0


def test_an_answer_that_no_replica_confirms_waits_in_the_spool_and_is_paid_once(make, replicated, up):
    pair = replicated(replicas=1, sentinels=0)
    gate = Gate()
    up.on("held", upstream.plain(gate=gate))
    config = on(pair.master, wait_replicas=1, wait_timeout="800ms")
    one, other = make(**config).start(), make(**config).start()
    call = background(one.chat, "k", model="held")
    gate.wait_until_entered()
    pair.replicas[0].freeze()
    gate.open()
    answer = call.result(20)
    assert (answer.status, answer.headers["semel-record"]) == (200, "pending")
    assert one.metric("semel_spool_entries") == 1
    retry = one.chat("k", model="held")
    assert (retry.status, retry.code) == REFUSED
    pair.replicas[0].thaw()
    eventually(lambda: one.metric("semel_spool_delivered_total") == 1)
    for gateway in (one, other):
        again = gateway.chat("k", model="held")
        assert (again.body, again.replayed, again.attempt) == (answer.body, "true", 1)
    assert len(up.paid()) == 1


def test_a_new_connection_does_not_take_for_confirmed_what_no_replica_has(make, replicated, up):
    pair = replicated(replicas=1, sentinels=0)
    cable = Cable(pair.master)
    gate = Gate()
    up.on("held", upstream.plain(gate=gate))
    one = make(**on(pair.master, cable.url, wait_replicas=1, wait_timeout="800ms")).start()
    call = background(one.chat, "k", model="held")
    gate.wait_until_entered()
    pair.replicas[0].freeze()
    gate.open()
    answer = call.result(20)
    assert answer.headers["semel-record"] == "pending"
    cable.lead_to(pair.master.port)
    eventually(lambda: ready(one))
    tried = one.metric("semel_store_errors_total")
    eventually(lambda: one.metric("semel_store_errors_total") >= tried + 2, what="delivered again on the new connection, twice")
    assert one.metric("semel_spool_entries") == 1 and one.metric("semel_spool_delivered_total") == 0
    pair.replicas[0].thaw()
    eventually(lambda: one.metric("semel_spool_delivered_total") == 1)
    assert one.chat("k", model="held").body == answer.body and len(up.paid()) == 1
    cable.close()


# ---- time

def test_a_running_call_outlives_every_retention_and_tokens_grow_beyond_expiry(make, redis_servers, up):
    server = redis_servers(*KEEPS)
    config = on(server)
    config["engine"] = {"lease": "2s", "retention": {"completed": "3s", "failed": "3s"}}
    one, other = make(**config).start(), make(**config).start()
    gate = Gate()
    up.on("held", held(gate))
    call = background(one.chat, "k", model="held")
    gate.wait_until_entered()
    name, = record_keys(server)
    end = time.monotonic() + 8
    joined = []
    while time.monotonic() < end:
        assert server.command("TTL", name) == -1
        joined.append(background((one, other)[len(joined) % 2].chat, "k", model="held"))
        time.sleep(0.5)
    gate.open()
    answers = [c.result(20) for c in [call, *joined]]
    assert {(a.status, a.body, a.attempt) for a in answers} == {(200, answers[0].body, 1)}
    assert 0 < server.command("PTTL", name) <= 3000
    tokens = [record(other, answers[0])["token"]]
    for _ in range(2):
        eventually(lambda: server.command("EXISTS", name) == 0, 10, "it expires")
        time.sleep(0.1)
        fresh = other.chat("k", model="held")
        assert fresh.outcome == "executed" and fresh.attempt == 1, "after its retention an id is new"
        tokens.append(record(other, fresh)["token"])
    assert tokens == sorted(set(tokens))
    assert len(up.paid()) == 3


def test_a_held_outcome_that_nobody_knows_outlives_every_retention(make, redis_servers, up):
    server = redis_servers(*KEEPS)
    config = on(server)
    config["engine"] = {"lease": "1s", "retention": {"completed": "2s", "failed": "2s"}}
    one = make(**config, routes={"/v1/chat/completions": {"on_unknown": "hold"}}).start()
    up.on("broken", lambda call, reply: reply.close())
    assert one.chat("k", model="broken").code == "outcome-unknown"
    name, = record_keys(server)
    time.sleep(3)
    assert server.command("TTL", name) == -1
    assert one.chat("k", model="broken").code == "outcome-unknown" and len(up.paid()) == 1


def test_tokens_grow_over_a_failover_to_a_clock_an_hour_behind(make, replicated, up):
    pair = replicated(replicas=1, sentinels=0, env_of_replicas=clock("-1h"))
    master, behind = pair.master, pair.replicas[0]
    assert 3500 < int(master.command("TIME")[0]) - int(behind.command("TIME")[0]) < 3700
    cable = Cable(master)
    config = on(master, cable.url)
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
    eventually(lambda: master.info("master_repl_offset") == behind.info("master_repl_offset"))
    master.kill()
    assert behind.command("REPLICAOF", "NO", "ONE") == "OK"
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
