"""Faults of a Redis that gateways share, and of no other store: full, forgetful of claims and of scripts. Each test says what is paid:
calls = counted attempts."""
import time

import pytest

import upstream
from harness import Died, background, eventually, together
from redis_faults import KEEPS, record_keys
from store_faults import GRACE, LEASE, Load, assert_each_paid_once, in_all, on, ready, record
from upstream import Gate

REFUSED = (503, "store-unavailable")


@pytest.fixture
def redis(redis_servers):
    return redis_servers(*KEEPS)


@pytest.fixture
def gateways(make, redis):
    def start(count, **config):
        return [make(**{**on(redis), **config}).start() for _ in range(count)]
    return start


# ---- forgotten claims

FORGETS = {"a restart": lambda server, name: (server.kill(), server.start()), "an eviction": lambda server, name: server.command("DEL", name)}


@pytest.mark.parametrize("forget", FORGETS.values(), ids=FORGETS.keys())
@pytest.mark.parametrize("asked", ["at the end only", "in between"])
def test_a_claim_that_redis_forgets_is_made_anew_or_fenced_and_counted(make, redis_servers, up, forget, asked):
    server = redis_servers()  # no persistence
    gate = Gate()
    up.on("held", upstream.in_turn(upstream.plain(gate=gate), upstream.plain()))
    one, other = make(**on(server)).start(), make(**on(server)).start()
    call = background(one.chat, "k", model="held")
    gate.wait_until_entered()
    name, = record_keys(server)
    forget(server, name)
    eventually(lambda: ready(one) and ready(other))
    if asked == "in between":
        between = other.chat("k", model="held")
        assert (between.status, between.attempt) == (200, 1)
    gate.open()
    answer = call.result(20)
    again = [g.chat("k", model="held") for g in (one, other)]
    expected = between.body if asked == "in between" else answer.body
    if forget is FORGETS["an eviction"]:
        assert {(a.status, a.body) for a in [answer, *again]} == {(200, expected)}
    else:  # what was sealed under a forgotten data key is known to be paid, and cannot be read any more
        assert all((a.status, a.body) == (200, expected) or (a.status, a.code) == (409, "answer-not-kept") for a in [answer, *again])
    assert len(up.paid()) == (2 if asked == "in between" else 1)
    assert (one.metric("semel_claim_lost_total"), other.metric("semel_claim_lost_total")) == (1, 0)


def test_gateways_whose_redis_forgot_everything_are_one_again_by_themselves(make, redis_servers, up):
    server = redis_servers()  # no persistence
    one, other = make(**on(server)).start(), make(**on(server)).start()
    assert one.chat("before").body == other.chat("before").body
    server.kill()
    server.start()
    eventually(lambda: ready(one) and ready(other))
    tried = []

    def same():
        tried.append(f"after-{len(tried)}")
        here, there = one.chat(tried[-1]), other.chat(tried[-1] + "-too")
        assert here.status == there.status == 200
        return other.chat(tried[-1]).body == here.body and one.chat(tried[-1] + "-too").body == there.body
    eventually(same, 20, "what one of them records the other one can read")
    assert len(up.paid()) == 1 + 2 * len(tried), "what was answered after it is not paid again, whether it can be read or not"


# ---- forgotten scripts

def test_no_request_fails_while_the_servers_scripts_are_flushed_again_and_again(gateways, redis, up):
    two = gateways(2)
    load = Load(two)
    flushed = 0
    while len(load.answers) < 150:
        assert redis.command("SCRIPT", "FLUSH") == "OK"
        flushed += 1
    load.stop()
    assert flushed > 20 and load.refusals == [] and load.lost == 0
    assert_each_paid_once(up, load)


def test_redis_restarted_between_two_requests_has_no_scripts_and_the_second_one_works(gateways, redis, up):
    one, = gateways(1)
    first = one.chat("first")
    redis.kill()
    redis.start()
    eventually(lambda: ready(one))
    assert one.chat("second").status == 200
    assert one.chat("first").body == first.body and len(up.paid()) == 2


# ---- full

def fill(server):
    """Leaves the server without memory: other keys take more than it may have, and it evicts none."""
    for i in range(40):
        assert server.command("SET", f"filler:{i}", "x" * 100_000) == "OK"
    assert server.command("CONFIG", "SET", "maxmemory", "2mb") == "OK"
    assert "OOM" in server.command("SET", "filler:last", "x")


def empty(server):
    assert server.command("CONFIG", "SET", "maxmemory", "0") == "OK"


def test_a_full_redis_refuses_new_ids_before_the_call_and_replays_old_ones_everywhere(gateways, redis, up):
    one, other = gateways(2)
    up.on("big", upstream.plain("é" * 400_000))
    first, big = one.chat("k"), one.chat("big", model="big")
    turn = one.say("r1", "a question")
    fill(redis)
    for gateway in (one, other):
        refused = together(10, lambda i: gateway.chat(f"new-{i}"))
        assert {(a.status, a.code) for a in refused} == {REFUSED}
    paid = len(up.paid())
    assert paid == 3
    fresh, = gateways(1)
    time.sleep(6)  # as long as everybody looks whether data keys are still in use
    for gateway in (one, other, fresh):
        for key, model, answer in (("k", "fast", first), ("big", "big", big)):
            again = gateway.chat(key, model=model)
            assert (again.status, again.body, again.replayed) == (200, answer.body, "true")
        assert gateway.say("r1", "a question").json == {**turn.json, "fromCache": True}
        assert gateway.chat("k", "another").code == "key-reused"
    empty(redis)
    assert {g.chat(f"new-{i}").status for i, g in enumerate((one, other, fresh))} == {200}
    assert len(up.paid()) == paid + 3


def test_an_answer_that_finds_redis_full_waits_in_the_spool_and_is_paid_once(gateways, redis, up):
    gate = Gate()
    up.on("held", upstream.plain(gate=gate))
    one, other = gateways(2)
    call = background(one.chat, "k", model="held")
    gate.wait_until_entered()
    fill(redis)
    gate.open()
    answer = call.result(20)
    assert (answer.status, answer.headers["semel-record"]) == (200, "pending")
    assert one.metric("semel_spool_entries") == one.metric("semel_spooled_total") == 1
    assert len(list((one.folder / "semel-spool").iterdir())) == 1, "a file of its own"
    for gateway in (one, other):
        retry = gateway.chat("k", model="held", timeout=20)
        assert (retry.status, retry.code) == REFUSED
    empty(redis)
    eventually(lambda: one.metric("semel_spool_delivered_total") == 1)
    assert list((one.folder / "semel-spool").iterdir()) == []
    for gateway in (one, other):
        again = gateway.chat("k", model="held")
        assert (again.status, again.body, again.replayed, again.attempt) == (200, answer.body, "true", 1)
    assert len(up.paid()) == 1 and in_all((one, other), "semel_paid_maybe_twice_total") == 0


@pytest.mark.parametrize("body", ["a small answer", "a big answer, in chunks " * 40_000], ids=["small", "big"])
def test_a_killed_gateway_delivers_at_its_next_start_what_a_full_redis_refused(gateways, redis, up, body):
    gate = Gate()
    up.on("held", upstream.plain(body, gate=gate))
    one, = gateways(1)
    call = background(one.chat, "k", model="held")
    gate.wait_until_entered()
    fill(redis)
    gate.open()
    answer = call.result(20)
    assert (answer.status, answer.headers["semel-record"]) == (200, "pending")
    spooled, = (one.folder / "semel-spool").iterdir()  # before its client was told
    assert body[:20].encode() not in spooled.read_bytes(), "sealed"
    one.kill()
    one.start()
    assert one.metric("semel_spool_entries") == 1
    refused = one.chat("k", model="held")
    assert (refused.status, refused.code) == REFUSED, "no second call, also by the process after it"
    empty(redis)
    eventually(lambda: record(one, answer)["status"] == "COMPLETED", what="delivered")
    again = one.chat("k", model="held")
    assert (again.body, again.replayed, again.attempt) == (answer.body, "true", 1) and len(up.paid()) == 1


def test_a_big_answer_that_finds_redis_full_is_recorded_when_there_is_room(gateways, redis, up):
    gate = Gate()
    up.on("held", upstream.plain("x" * 700_000, gate=gate))
    one, other = gateways(2)
    call = background(one.chat, "k", model="held")
    gate.wait_until_entered()
    fill(redis)
    gate.open()
    answer = call.result(20)
    assert (answer.status, answer.headers["semel-record"]) == (200, "pending")
    empty(redis)
    eventually(lambda: record(one, answer)["status"] == "COMPLETED", what="recorded")
    for gateway in (one, other):
        again = gateway.chat("k", model="held")
        assert (again.body, again.replayed, again.attempt) == (answer.body, "true", 1)
    assert len(up.paid()) == 1


def test_a_call_that_runs_while_redis_is_full_for_longer_than_its_lease_keeps_it(gateways, redis, up):
    gate = Gate()
    up.on("held", upstream.plain(gate=gate))
    one, other = gateways(2, peer={"advertise": "127.0.0.1:9"})
    call = background(one.chat, "k", model="held")
    gate.wait_until_entered()
    fill(redis)
    joined = [background(other.chat, "k", model="held")]
    time.sleep(LEASE + 1)  # it could not renew
    assert other.chat("new").status == 503
    empty(redis)
    joined += [background(other.chat, "k", model="held") for _ in range(5)]
    time.sleep(GRACE + 1)
    gate.open()
    answers = [c.result(20) for c in [call, *joined]]
    assert {(a.body, a.attempt) for a in answers if a.status == 200} == {(call.result(0).body, 1)}
    assert {(a.status, a.body) for a in answers[-5:]} == {(200, call.result(0).body)}
    assert len(up.paid()) == 1 and in_all((one, other), "semel_takeovers_total") == 0


def test_a_duplicate_of_a_running_call_joins_while_redis_is_full(gateways, redis, up):
    gate = Gate()
    up.on("held", upstream.plain(gate=gate))
    one, other = gateways(2)
    call = background(one.chat, "k", model="held")
    gate.wait_until_entered()
    fill(redis)
    joined = [background(g.chat, "k", model="held") for g in (one, other)]
    eventually(lambda: one.metric("semel_peer_connections") == 1)
    empty(redis)
    gate.open()
    assert {(c.result(20).status, c.result(20).body) for c in [call, *joined]} == {(200, call.result(0).body)}
    assert len(up.paid()) == 1


def test_a_server_that_evicts_is_refused_and_one_that_is_accepted_pays_again_for_what_it_dropped(make, redis_servers, up):
    server = redis_servers("--maxmemory", "3mb", "--maxmemory-policy", "allkeys-lru")
    with pytest.raises(Died) as refused:
        make(**on(server)).start()
    assert refused.value.code == 1
    for words in ("allkeys-lru", "noeviction", "accept_eviction"):
        assert words in refused.value.text
    one = make(**on(server, accept_eviction=True)).start()
    assert "allkeys-lru" in one.said()
    first = one.chat("k")
    record, = record_keys(server)
    for i in range(300):
        server.command("SET", f"filler:{i}", "x" * 100_000)
        if server.command("EXISTS", record) == 0:
            break
    assert server.command("EXISTS", record) == 0
    other = make(**on(server, accept_eviction=True)).start()
    assert other.chat("k").body != first.body and len(up.paid()) == 2


# ---- big answers

def chunk_keys(server):
    return sorted(server.keys("semel:*:c:*"), key=lambda name: int(name.rsplit(":", 1)[1]))


DAMAGE = {
    "the first is missing": lambda server, keys: server.command("DEL", keys[0]),
    "a later one is missing": lambda server, keys: server.command("DEL", keys[-1]),
    "one holds other bytes": lambda server, keys: server.command("SETRANGE", keys[1], 100, "other bytes"),
    "two are exchanged": lambda server, keys: (server.command("RENAME", keys[0], keys[0] + "x"),
                                               server.command("RENAME", keys[1], keys[0]),
                                               server.command("RENAME", keys[0] + "x", keys[1])),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
@pytest.mark.parametrize("route", ["v1", "streamed", "chat"])
def test_an_answer_with_a_chunk_missing_or_stale_is_410_and_never_short(gateways, redis, up, damage, route):
    text = "word " * 160_000
    up.on("big", upstream.plain(text))
    up.on("long", upstream.stream(events=40, pad="x" * 20_000))
    one, other = gateways(2)

    def ask(gateway):
        if route == "chat":
            return gateway.say("r1", model="big")
        return gateway.chat("k", model="long" if route == "streamed" else "big", stream=route == "streamed")
    first = ask(one)
    assert first.status == 200 and first.whole and len(first.body) > 768 * 1024
    keys = eventually(lambda: chunk_keys(redis))
    assert len(keys) >= 3
    again = ask(other)
    assert again.status == 200 and len(again.body) >= len(first.body) - 1
    damage(redis, keys)
    for gateway in (other, one):
        refused = ask(gateway)
        assert refused.status == 410 and refused.code == "expired", refused
        assert refused.whole and refused.headers["x-should-retry"] == "false"
    assert len(up.paid()) == 1


@pytest.mark.parametrize("route", ["v1", "streamed", "chat"])
def test_an_answer_above_the_servers_bulk_limit_is_whole_for_its_client_and_not_paid_again(redis_servers, make, up, route):
    server = redis_servers(*KEEPS, "--proto-max-bulk-len", "1mb")
    config = {**on(server), "record": {"max_bytes": "16MiB"}}
    one, other = make(**config).start(), make(**config).start()
    assert "proto-max-bulk-len 512mb" in one.said(), "cause and cure"
    up.on("huge", upstream.plain("y" * 3_000_000))
    up.on("long", upstream.stream(events=100, pad="z" * 30_000))

    def ask(gateway):
        if route == "chat":
            return gateway.say("r1", model="huge")
        return gateway.chat("k", model="long" if route == "streamed" else "huge", stream=route == "streamed")
    first = ask(one)
    assert first.status == 200 and first.whole and len(first.body) > 3_000_000
    for gateway in (one, other):
        again = ask(gateway)
        if again.status == 200:
            assert again.whole and abs(len(again.body) - len(first.body)) <= 1
        else:
            assert (again.status, again.code) in [(409, "answer-not-kept"), REFUSED], again
    assert len(up.paid()) == 1
    if route == "chat":
        assert one.say("r2", "and then?").status == 200, "the session goes on"
        assert (refused := other.say("r3", "q" * 1_048_000)).status == 503 and refused.code == "store-unavailable"
        assert len(up.paid()) == 2
    assert one.chat("another").status == other.chat("yet-another").status == 200, "others are served"


# ---- keys

def test_all_keys_of_a_session_share_a_hash_tag_and_the_first_acquire_of_an_unknown_key_owns_it(gateways, redis, up):
    one, = gateways(1)
    up.on("big", upstream.plain("w" * 600_000))
    assert redis.keys("semel:{b*") == [], "an empty server"
    first = one.say("r1", "hello", model="big")
    assert first.status == 200 and first.json["fromCache"] is False
    assert one.say("r2", "again").status == 200
    names = redis.keys("semel:{b*")
    kinds = {name.split(":")[2] for name in names}
    assert {"r", "c", "s"} <= kinds, names
    assert len({name.split(":")[1] for name in names}) == 1, "one hash tag"
    for session in range(20):
        assert one.say(f"q{session}", session=f"s{session + 10}").status == 200
    assert len({name.split(":")[1] for name in redis.keys("semel:{b*:r:*")}) > 10, "and sessions are spread"
    assert len(up.paid()) == 22
