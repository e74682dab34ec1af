"""Faults of a PostgreSQL or MariaDB that gateways share, beside those that every store meets (test_shared_store.py): lost answers, a
full disk, read-only, locks, limits, a pooler in between. Each test says what is paid: calls = counted attempts."""
import base64
import os
import shutil
import signal
import subprocess
import time

import pytest

import upstream
from harness import Died, background, eventually, together
from postgres_server import PgBouncer
from sql_proxy import LossyCable
from sql_server import PASSWORD, USER, SqlError, own_folder, run
from store_faults import LEASE, Load, assert_each_paid_once, assert_paid_once, held_calls, in_all, on, ready, record
from upstream import Gate

REFUSED = (503, "store-unavailable")
COMPLETED = 2


@pytest.fixture(params=["postgres", "mysql"])
def server(request, sql_servers):
    return sql_servers(request.param)


@pytest.fixture
def gateways(make, server):
    def start(count, **config):
        return [make(**{**on(server), **config}).start() for _ in range(count)]
    return start


@pytest.fixture
def lossy(server):
    cable = LossyCable(server)
    yield cable
    cable.close()


def holds(key):
    """Whether a request speaks of this record: as it is, or as the text of a statement."""
    escaped = key.replace(b"\\", b"\\\\").replace(b"\0", b"\\0").replace(b"'", b"\\'")

    def look(data):
        return key in data or escaped in data
    return look


def key_of(answer):
    return base64.urlsafe_b64decode(answer.headers["semel-intent"] + "=")


def by_dialect(server, postgres, mysql):
    return postgres if server.kind == "postgres" else mysql


def sessions(server, sleeping):
    """Numbers of the sessions of the user semel: those that sleep, or all others."""
    maybe = "LIKE" if sleeping else "NOT LIKE"
    if server.kind == "postgres":
        text = f"SELECT pid FROM pg_stat_activity WHERE usename = '{USER}' AND query {maybe} '%sleep%'"
    else:
        text = f"SELECT id FROM information_schema.processlist WHERE user = '{USER}' AND lower(coalesce(info, '')) {maybe} '%sleep%'"
    return {number for (number,) in server.sql(text, database="")}


def throw_out(server, sleeping=False):
    """Ends all sessions of the gateways, or those that a test lets sleep, and waits until they have ended."""
    ended = sessions(server, sleeping)
    for number in ended:
        try:
            server.sql(f"SELECT pg_terminate_backend({number})" if server.kind == "postgres" else f"KILL {number}", database="")
        except SqlError:  # it has ended itself
            pass
    eventually(lambda: not ended & sessions(server, sleeping), what="they have ended")


class Client:
    """A command-line client of the server that runs a script in the background, as soon as it is let in; ended with `end()`."""

    def __init__(self, server, script):
        if server.kind == "postgres":
            command = ["psql", "-X", "-q", "-d", server.url()]
        else:
            command = ["mariadb", "--no-defaults", "-h127.0.0.1", f"-P{server.port}", f"-u{USER}", f"-p{PASSWORD}", "-f", "-D", "semel"]
        self.process = subprocess.Popen(["sh", "-c", "until printf '%s' \"$SCRIPT\" | \"$@\"; do sleep 0.02; done", "sh", *command],
                                        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                                        env={**os.environ, "SCRIPT": script}, start_new_session=True)

    def end(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(20)


def sleeping(server, seconds):
    return by_dialect(server, f"SELECT pg_sleep({seconds});\n", f"SELECT SLEEP({seconds});\n")


# ---- lost answers

def test_a_claim_whose_answer_is_lost_is_read_back_and_paid_once(make, server, lossy, up):
    """The database has committed the claim; the connection ends before anybody is told."""
    semel = make(**on(server, lossy.url)).start()
    key = key_of(semel.chat("k"))
    for skip in range(6):
        semel.stop()
        server.sql(f"DELETE FROM {server.table('records')}")
        semel.start()
        before = len(up.paid())
        lossy.lost.clear()
        lossy.lose(holds(key), skip=skip)
        up.on("fast", upstream.plain(f"answer {skip}"))
        answers = [semel.chat("k")]
        lossy.stop_losing()
        while answers[-1].status != 200 and len(answers) < 20:
            assert (answers[-1].status, answers[-1].code) == REFUSED
            answers.append(semel.chat("k"))
        assert answers[-1].status == 200
        if skip == 0:
            assert lossy.lost, "an answer was lost"
            assert len(answers) == 1, "read back, not given up"
        eventually(lambda: semel.metric("semel_spool_entries") == 0)
        again = semel.chat("k")
        assert (again.status, again.body, again.replayed) == (200, answers[-1].body, "true")
        assert len(up.paid()) == before + 1, f"paid once, with answer {skip} lost"
        assert server.records()[0][0] == COMPLETED
    assert semel.metric("semel_takeovers_total") == 0


def test_an_answer_whose_record_was_made_and_not_told_of_is_paid_once_and_replayed(make, server, lossy, up):
    one, other = make(**on(server, lossy.url)).start(), make(**on(server)).start()
    for skip in range(4):
        gate = Gate()
        up.on("held", upstream.plain(f"answer {skip}", gate=gate))
        call = background(one.chat, f"k{skip}", model="held")
        gate.wait_until_entered()
        intent, = (r["intent"] for r in other.ask_admin("/admin/records?limit=1000").json["records"] if r["status"] == "PROCESSING")
        lossy.lost.clear()
        lossy.lose(holds(base64.urlsafe_b64decode(intent + "=")), skip=skip)
        gate.open()
        answer = call.result(20)
        assert answer.status == 200
        if skip == 0:
            assert lossy.lost, "an answer was lost"
        lossy.stop_losing()
        eventually(lambda: one.metric("semel_spool_entries") == 0)
        for gateway in (one, other):
            again = eventually(lambda: (a := gateway.chat(f"k{skip}", model="held")).status == 200 and a)
            assert (again.body, again.attempt, again.replayed) == (answer.body, 1, "true")
        assert len(up.paid(model="held")) == skip + 1
    assert in_all((one, other), "semel_paid_maybe_twice_total") == 0 and one.metric("semel_spool_overtaken_total") == 0


def test_answers_lost_at_random_under_load_pay_for_nothing_twice(make, server, lossy, up):
    two = [make(**on(server, lossy.url)).start() for _ in range(2)]
    load = Load(two, duplicates=2)
    statement = b"semel"
    for round_ in range(15):
        known, lost = len(load.answers), len(lossy.lost)
        lossy.lose(lambda data: len(data) > 60 or statement in data, skip=round_ % 3)
        eventually(lambda: len(lossy.lost) > lost and len(load.answers) > known + 3, 30, "load is served")
    load.stop()
    assert {(a.status, a.code) for a in load.refusals} <= {REFUSED} and load.lost == 0
    eventually(lambda: in_all(two, "semel_spool_entries") == 0)
    assert_each_paid_once(up, load)
    for key, answers in list(load.answers.items())[:50]:
        assert {a.body for a in answers} == {answers[0].body}
        assert two[0].chat(key, f"text of {key}.", model="load").body == answers[0].body
    assert in_all(two, "semel_paid_maybe_twice_total") == 0


# ---- restarted, slow, frozen

def test_a_server_restarted_between_two_requests_fails_none_of_them(gateways, server, up):
    """Connections that have ended while nothing was asked are noticed before anything is asked on them."""
    one, = gateways(1)
    first = one.chat("first")
    for round_ in range(3):
        server.restart()
        answers = together(6, lambda i: one.chat(f"after-{round_}-{i}"))
        assert {a.status for a in answers} == {200}, answers
    assert one.chat("first").body == first.body and len(up.paid()) == 19
    assert one.metric("semel_paid_maybe_twice_total") == 0


def test_a_frozen_server_refuses_new_ids_in_time_and_replays_what_memory_holds(gateways, server, up):
    one, other = gateways(2)
    first = one.chat("k")
    server.freeze()
    began = time.monotonic()
    refused = together(20, lambda i: (one, other)[i % 2].chat(f"new-{i}"))
    assert time.monotonic() - began < 15, "within the store's deadline and patience, not the client's"
    assert {(a.status, a.code) for a in refused} == {REFUSED}
    assert all(1 <= int(a.headers["retry-after"]) <= 60 for a in refused)
    again = one.chat("k")
    assert again.status == 503 or again.body == first.body
    assert len(up.paid()) == 1
    server.thaw()
    eventually(lambda: ready(one) and ready(other))
    answers = together(20, lambda i: (one, other)[i % 2].chat(f"new-{i}"))
    assert {a.status for a in answers} == {200} and len(up.paid()) == 21
    for gateway in (one, other):
        assert gateway.chat("k").body == first.body


def test_a_slow_way_to_the_server_delays_and_pays_once(make, server, lossy, up):
    lossy.delay = 0.15
    two = [make(**on(server, lossy.url)).start() for _ in range(2)]
    answers = together(40, lambda i: two[i % 2].chat(f"k{i % 4}"))
    assert {a.status for a in answers} == {200} and len(up.paid()) == 4
    assert all(a.body == next(b for j, b in enumerate(answers) if j % 4 == i % 4).body for i, a in enumerate(answers))


# ---- not writable, not let in

def read_only(server, on_):
    if server.kind == "postgres":
        server.sql(f"ALTER SYSTEM SET default_transaction_read_only = {'on' if on_ else 'off'}")
        server.sql("SELECT pg_reload_conf()")
        eventually(lambda: server.sql("SHOW default_transaction_read_only")[0][0] == ("on" if on_ else "off"))
    else:
        server.sql(f"SET GLOBAL read_only = {int(on_)}", database="")


def password(server, new):
    if server.kind == "postgres":
        server.sql(f"ALTER ROLE {USER} PASSWORD '{new}'")
    else:
        server.sql(f"ALTER USER {USER}@'127.0.0.1' IDENTIFIED BY '{new}'", database="")
    throw_out(server)


def permissions(server, granted):
    if server.kind == "postgres":
        server.sql(f"ALTER TABLE {server.table('records')} OWNER TO {USER if granted else 'postgres'}")
    else:
        server.sql("GRANT ALL ON semel.* TO semel@'127.0.0.1'" if granted else "REVOKE INSERT, UPDATE ON semel.* FROM semel@'127.0.0.1'",
                   database="")
    throw_out(server)


WITHOUT = {
    "writes": (lambda server: read_only(server, True), lambda server: read_only(server, False), "read-only"),
    "its password": (lambda server: password(server, "another"), lambda server: password(server, PASSWORD), "password"),
    "permissions": (lambda server: permissions(server, False), lambda server: permissions(server, True), "GRANT"),
}


@pytest.mark.parametrize("take, give, word", WITHOUT.values(), ids=WITHOUT.keys())
def test_a_gateway_that_is_left_without_something_refuses_before_the_call_and_goes_on_when_it_is_back(gateways, server, up, take, give,
                                                                                                      word):
    gate = Gate()
    one, other = gateways(2)
    first = one.chat("k")
    calls = held_calls(up, (one, other), 2, gate)
    take(server)
    for _ in range(2):  # also on a connection that is new
        refused = together(10, lambda i: (one, other)[i % 2].chat(f"new-{i}"))
        assert {(a.status, a.code) for a in refused} == {REFUSED}
    doctor = one.command_line("doctor", "--config", one.config_file)
    assert doctor.returncode == 1 and word in doctor.stdout and PASSWORD not in doctor.stdout, doctor
    gate.open()
    pending = [c[0].result(30) for c in calls]
    assert {(a.status, a.headers.get("semel-record")) for a in pending} == {(200, "pending")}
    again = other.chat("k")
    assert again.status == 503 or again.body == first.body
    assert len(up.paid(model="fast")) == 1
    give(server)
    eventually(lambda: ready(one) and ready(other), 20, "without a restart")
    eventually(lambda: in_all((one, other), "semel_spool_entries") == 0, 20, "the spool is delivered")
    for i, answer in enumerate(pending):
        for gateway in (one, other):
            assert gateway.chat(f"run-{i}", model="held").body == answer.body
    assert {g.chat(f"new-{i}").status for i, g in enumerate((one, other))} == {200}
    assert len(up.paid(model="held")) == 2 and in_all((one, other), "semel_paid_maybe_twice_total") == 0
    assert PASSWORD not in one.said() + other.said()


def test_a_server_without_free_connections_is_named_and_those_who_have_some_go_on(make, sql_servers, server, up):
    few = sql_servers(server.kind, *by_dialect(server, ("-c", "max_connections=16"), ("--max-connections=12",)))
    room = by_dialect(server, 13, 12)  # without what is kept for administrators
    one = make(**on(few)).start()
    assert one.chat("before").status == 200
    crowd = [Client(few, sleeping(few, 120)) for _ in range(room)]
    try:
        eventually(lambda: len(sessions(few, True) | sessions(few, False)) >= room, what="all are in use")
        assert {one.chat(f"k{i}").status for i in range(5)} == {200}, "on the connections that it has"
        with pytest.raises(Died) as died:
            make(**on(few)).start()
        assert "connections" in died.value.text.lower() and PASSWORD not in died.value.text
        answered = []

        def refused():
            throw_out(few)  # and the crowd is faster, sooner or later
            answered.append(one.chat(f"new-{len(answered)}"))
            return answered[-1].status == 503
        eventually(refused, 60, "refused")
        paid = len(up.paid())
        assert answered[-1].code == REFUSED[1] and paid == 6 + len(answered) - 1
    finally:
        for client in crowd:
            client.end()
    throw_out(few, sleeping=True)
    eventually(lambda: one.chat("after").status == 200, 20, "goes on by itself")
    assert len(up.paid()) == paid + 1 and one.metric("semel_paid_maybe_twice_total") == 0


# ---- locks

def test_a_storm_of_foreign_locks_and_deadlocks_pays_for_nothing_twice(gateways, server, up):
    two = gateways(2)
    load = Load(two, duplicates=2)
    eventually(lambda: len(load.answers) > 10, 30)
    table = server.table("records")
    begin = by_dialect(server, "BEGIN;", "START TRANSACTION;")
    storm = [Client(server, "".join(f"{begin} SELECT k FROM {table} ORDER BY k {order} FOR UPDATE; "
                                    f"UPDATE {table} SET keep_ms = keep_ms; ROLLBACK; {sleeping(server, 0.02)}" for _ in range(400)))
             for order in ("ASC", "DESC", "ASC", "DESC")]
    known = len(load.answers)
    time.sleep(4)
    for client in storm:
        client.end()
    eventually(lambda: len(load.answers) > known + 20, 30, "served, at the latest afterwards")
    load.stop()
    assert {(a.status, a.code) for a in load.refusals} <= {REFUSED} and load.lost == 0
    eventually(lambda: in_all(two, "semel_spool_entries") == 0)
    assert_each_paid_once(up, load)
    assert in_all(two, "semel_paid_maybe_twice_total") == 0


def test_a_table_that_somebody_locks_for_longer_than_the_deadline_refuses_before_the_call(gateways, server, up):
    one, other = gateways(2)
    gate = Gate()
    calls = held_calls(up, (one, other), 2, gate)
    table = server.table("records")
    lock = by_dialect(server, f"BEGIN; LOCK TABLE {table}; SELECT pg_sleep(60);", f"LOCK TABLES {table} WRITE; SELECT SLEEP(60);")
    client = Client(server, lock)
    refused = eventually(lambda: (a := one.chat(f"new-{time.monotonic()}")).status == 503 and a, 20)
    assert refused.code == REFUSED[1] and 1 <= int(refused.headers["retry-after"]) <= 60
    paid = len(up.paid())
    refused = together(10, lambda i: (one, other)[i % 2].chat(f"locked-{i}"))
    assert {(a.status, a.code) for a in refused} == {REFUSED} and len(up.paid()) == paid
    client.end()
    throw_out(server, sleeping=True)  # it notices late that its client has left
    eventually(lambda: ready(one) and ready(other), 20)
    gate.open()
    assert_paid_once(up, (one, other), calls)
    assert {g.chat(f"locked-{i}").status for i, g in enumerate((one, other))} == {200}


@pytest.mark.parametrize("level", ["SERIALIZABLE", "REPEATABLE READ"])
def test_a_default_isolation_that_somebody_set_changes_nothing(server, gateways, up, level):
    if server.kind == "postgres":
        server.sql(f"ALTER DATABASE semel SET default_transaction_isolation = '{level.lower()}'")
    else:
        server.sql(f"SET GLOBAL tx_isolation = '{level.replace(' ', '-')}'", database="")
    three = gateways(3)
    load = Load(three, duplicates=3)
    eventually(lambda: len(load.answers) > 60, 40, "load is served")
    load.stop()
    assert load.refusals == [] and load.lost == 0
    assert_each_paid_once(up, load)
    up.on("slow", upstream.plain(delay=0.5))
    answers = together(60, lambda i: three[i % 3].chat("once", model="slow"))
    assert {(a.status, a.body) for a in answers} == {(200, answers[0].body)} and len(up.paid(model="slow")) == 1


# ---- full

class SmallDisk:
    """A server whose tables, and nothing else of it, lie on a small file system, and a file that takes the rest of that."""

    def __init__(self, sql_servers, kind):
        self.server = sql_servers(kind)
        self.folder = own_folder("semel-small-disk-", self.server.account)
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32m,mode=0755", "tmpfs", str(self.folder)], capture_output=True, text=True)
        if done.returncode:
            pytest.fail(f"this test mounts a small tmpfs and so must run as root: {done.stderr}")
        place = self.folder / "tables"
        if kind == "mysql":
            self.server.stop()
            shutil.copytree(self.server.data / "semel", place)
            shutil.rmtree(self.server.data / "semel")
            (self.server.data / "semel").symlink_to(place)
            run(["chown", "-R", f"{self.server.account}:", self.folder])
            self.server.start()
        else:
            place.mkdir()
            run(["chown", "-R", f"{self.server.account}:", self.folder])
            for statement in (f"CREATE TABLESPACE small LOCATION '{place}'", "DROP DATABASE semel",
                              "CREATE DATABASE semel OWNER semel TABLESPACE small"):
                self.server.sql(statement, database="postgres")

    def fill(self):
        with open(self.folder / "filler", "wb", buffering=0) as file:
            for size in (1 << 20, 1 << 12):
                try:
                    while True:
                        file.write(bytes(size))
                except OSError:
                    pass

    def empty(self):
        (self.folder / "filler").unlink()

    def clean_up(self):
        self.server.kill()
        run(["umount", "-l", self.folder])
        self.folder.rmdir()


@pytest.fixture
def small_disk(sql_servers, request):
    return sql_servers.keep(SmallDisk(sql_servers, request.param))


@pytest.mark.parametrize("small_disk", ["postgres", "mysql"], indirect=True)
def test_a_full_disk_refuses_or_keeps_in_the_spool_and_nothing_is_paid_twice(make, small_disk, up):
    server = small_disk.server
    one, other = make(**on(server)).start(), make(**on(server)).start()
    up.on("big", upstream.plain("x" * 2_000_000))
    kept = {f"kept-{i}": one.chat(f"kept-{i}") for i in range(5)}
    gate = Gate()
    up.on("held", upstream.plain("y" * 2_000_000, gate=gate))
    call = background(one.chat, "k", model="held")
    gate.wait_until_entered()
    small_disk.fill()
    refused, attempts = None, 0
    while refused is None and attempts < 300:  # until no page has room for another claim
        answer = other.chat(f"new-{attempts}", "x" * 2000)
        attempts += 1
        if answer.status != 200:
            refused = answer
    if refused is not None:
        assert (refused.status, refused.code) == REFUSED
    gate.open()
    answer = call.result(30)
    assert (answer.status, answer.headers.get("semel-record")) == (200, "pending"), "a big answer finds no room"
    paid = len(up.paid())
    for key, first in kept.items():
        for gateway in (one, other):
            again = gateway.chat(key)
            assert (again.status, again.body, again.replayed) == (200, first.body, "true"), "reads still work"
    assert len(up.paid()) == paid
    small_disk.empty()
    eventually(lambda: one.metric("semel_spool_entries") == 0, 30, "delivered when there is room")
    for gateway in (one, other):
        again = gateway.chat("k", model="held")
        assert (again.status, again.body, again.replayed, again.attempt) == (200, answer.body, "true", 1)
    assert len(up.paid(model="held")) == 1 and in_all((one, other), "semel_paid_maybe_twice_total") == 0
    assert other.chat("after").status == 200


# ---- big answers

@pytest.mark.parametrize("route", ["v1", "streamed", "chat"])
def test_a_big_answer_is_replayed_in_full_elsewhere_and_after_a_restart(gateways, server, up, route):
    up.on("big", upstream.plain("word " * 400_000))
    up.on("long", upstream.stream(events=60, pad="é" * 15_000))
    one, other = gateways(2)

    def ask(gateway):
        if route == "chat":
            return gateway.say("r1", model="big").json["content"]
        answer = gateway.chat("k", model="long" if route == "streamed" else "big", stream=route == "streamed")
        assert answer.status == 200 and answer.whole
        return answer.body
    first = ask(one)
    assert ask(other) == first and server.count("chunks") >= 3
    server.kill()
    server.start()
    one.kill()
    one.start()
    assert ask(one) == first and len(up.paid()) == 1


def test_a_chunk_that_is_gone_makes_410_and_never_a_short_answer(gateways, server, up):
    up.on("big", upstream.plain("word " * 400_000))
    one, other = gateways(2)
    assert one.chat("k", model="big").status == 200
    server.sql(f"DELETE FROM {server.table('chunks')} WHERE n = 1")
    refused = other.chat("k", model="big")
    assert (refused.status, refused.code) == (410, "expired") and len(up.paid()) == 1


def test_a_packet_limit_that_is_too_small_is_refused_in_words(make, sql_servers):
    server = sql_servers("mysql", "--max-allowed-packet=64K")
    with pytest.raises(Died) as died:
        make(**on(server)).start()
    assert died.value.code == 1 and "max_allowed_packet" in died.value.text and "64M" in died.value.text


def test_a_packet_limit_that_somebody_lowers_loses_no_answer(make, sql_servers, up):
    server = sql_servers("mysql")
    one, other = make(**on(server)).start(), make(**on(server)).start()
    limit, = server.sql("SELECT @@max_allowed_packet", database="")[0]
    server.sql("SET GLOBAL max_allowed_packet = 65536", database="")
    throw_out(server)
    up.on("big", upstream.plain("z" * 3_000_000))
    up.on("medium", upstream.plain("m" * 150_000))
    small = eventually(lambda: (a := one.chat("small")).status == 200 and a)
    first = {model: one.chat(model, model=model) for model in ("big", "medium")}
    assert {(a.status, a.whole) for a in first.values()} == {(200, True)}
    for model in first:
        refused = one.chat(model, model=model)
        assert (refused.status, refused.code) == REFUSED, "its answer lies in the spool: no second call"
    waiting = {model: background(other.chat, model, model=model) for model in first}
    time.sleep(2 * LEASE)  # it is still the first one's: nobody calls again
    assert other.chat("small").body == small.body, "others are not held up by them"
    assert len(up.paid()) == 3
    server.sql(f"SET GLOBAL max_allowed_packet = {limit}", database="")
    throw_out(server)
    eventually(lambda: one.metric("semel_spool_entries") == 0, 20, "what waited is delivered")
    for model, answer in first.items():
        waited = waiting[model].result(30)
        assert (waited.status, waited.body) == (200, answer.body) or (waited.status, waited.code) == REFUSED
        for gateway in (one, other):
            again = eventually(lambda: (a := gateway.chat(model, model=model)).status == 200 and a)
            assert (again.body, again.attempt) == (answer.body, 1)
    assert len(up.paid()) == 3 and in_all((one, other), "semel_paid_maybe_twice_total") == 0


# ---- expiry

def test_records_and_their_chunks_expire_and_are_purged_and_tokens_grow_beyond(make, server, up):
    config = on(server)
    config["engine"] = {"lease": "2s", "retention": {"completed": "3s", "failed": "3s"}, "cleanup": {"every": "500ms"}}
    one, other = make(**config).start(), make(**config, routes={"/v1/chat/completions": {"on_unknown": "hold"}}).start()
    gate = Gate()
    up.on("held", upstream.in_turn(upstream.plain(gate=gate), upstream.plain()))
    up.on("big", upstream.plain("word " * 400_000))
    up.on("broken", lambda call, reply: reply.close())
    call = background(one.chat, "k", model="held")
    gate.wait_until_entered()
    assert one.chat("big", model="big").status == 200 and server.count("chunks") >= 3
    assert other.chat("unknown", model="broken").code == "outcome-unknown"
    assert one.chat("gone").outcome == "executed"
    eventually(lambda: server.count("records") == 2 and server.count("chunks") == 0, 15, "what was answered is gone")
    assert in_all((one, other), "semel_purged_total") >= 2
    assert call.done() is False and other.chat("unknown", model="broken").code == "outcome-unknown"
    tokens = []
    gate.open()
    first = call.result(20)
    tokens.append(record(one, first)["token"])
    for _ in range(2):
        eventually(lambda: server.count("records") == 1, 15, "it expires")
        fresh = other.chat("k", model="held")
        assert fresh.outcome == "executed" and fresh.attempt == 1, "after its retention an id is new"
        tokens.append(record(other, fresh)["token"])
    assert tokens == sorted(set(tokens))
    assert len(up.paid(model="held")) == 3


# ---- PgBouncer

@pytest.fixture
def pooled(sql_servers):
    """A PgBouncer in transaction mode with fewer connections than the gateways ask for."""
    return sql_servers.keep(PgBouncer(sql_servers("postgres"), connections=3))


def test_gateways_behind_pgbouncer_are_one(make, pooled, up):
    config = on(pooled.server, pooled.url)
    three = [make(**config).start() for _ in range(3)]
    load = Load(three, duplicates=3, streams=True)
    eventually(lambda: len(load.answers) > 60, 40, "load is served")
    load.stop()
    assert load.refusals == [] and load.lost == 0
    assert_each_paid_once(up, load)
    up.on("big", upstream.plain("word " * 400_000))
    big = three[0].chat("big", model="big")
    assert three[1].chat("big", model="big").body == big.body
    up.on("slow", upstream.plain(delay=1))
    answers = together(60, lambda i: three[i % 3].chat("once", model="slow"))
    assert {(a.status, a.body) for a in answers} == {(200, answers[0].body)} and len(up.paid(model="slow")) == 1
    backends = pooled.server.sql(f"SELECT count(*) FROM pg_stat_activity WHERE usename = '{USER}'")
    assert 1 <= int(backends[0][0]) <= 3, "the gateways' connections shared these"


def test_behind_pgbouncer_an_owner_that_is_killed_holds_nothing_and_is_taken_over(make, pooled, up):
    config = on(pooled.server, pooled.url)
    first, second = make(**config).start(), make(**config).start()
    gate = Gate()
    up.on("held", upstream.in_turn(upstream.plain(gate=gate), upstream.plain()))
    background(first.try_chat, "k", model="held")
    gate.wait_until_entered()
    joined = [background(second.chat, "k", model="held") for _ in range(10)]
    first.kill()
    killed = time.monotonic()
    answers = [j.result(30) for j in joined]
    assert time.monotonic() - killed < LEASE + 1.5
    assert {(a.status, a.body, a.attempt) for a in answers} == {(200, answers[0].body, 2)}
    assert len(up.paid()) == 2
    gate.open()


def test_pgbouncer_or_the_server_behind_it_restarted_pays_for_no_running_call_twice(make, pooled, up):
    config = on(pooled.server, pooled.url)
    two = [make(**config).start() for _ in range(2)]
    gate = Gate()
    calls = held_calls(up, two, 4, gate)
    load = Load(two)
    eventually(lambda: len(load.answers) > 10, 30)
    pooled.server.kill()
    eventually(lambda: len(load.refusals) > 5, 30, "refused")
    pooled.server.start()
    known = len(load.answers)
    eventually(lambda: len(load.answers) > known + 20, 40, "served again")
    load.stop()
    gate.open()
    assert {(a.status, a.code) for a in load.refusals} == {REFUSED} and load.lost == 0
    assert_each_paid_once(up, load)
    assert_paid_once(up, two, calls)
