"""The Redis store from outside: what `serve` refuses and says, what `doctor` grades, and that one id is paid once on it."""
import json

import pytest

from harness import Died, eventually, free_port
from redis_server import PretendedRedis

KEEPS = ("--appendonly", "yes", "--appendfsync", "always")
PASSWORD = "pw-that-is-private"


@pytest.fixture
def redis(redis_servers):
    return redis_servers


def on(url, **settings):
    return {"redis": {"url": url, **settings}}


def doctor(semel, **kw):
    done = semel.command_line("doctor", "--config", semel.config_file, "--json", **kw)
    findings = json.loads(done.stdout)
    assert findings["ok"] == (done.returncode == 0)
    return done.returncode, [f for f in findings["findings"] if f["about"] == "store"]


def graded(findings, grade):
    return " | ".join(f["text"] for f in findings if f["grade"] == grade)


# ---- what is refused

def replica_of_another(redis):
    server = redis("--replicaof", "127.0.0.1", str(redis().port))
    eventually(lambda: server.info("master_link_status") == "up")
    return server


def restricted(redis):
    server = redis(*KEEPS)
    assert server.command("ACL", "SETUSER", "gate", "on", ">" + PASSWORD, "~*", "+@all", "-evalsha") == "OK"
    return server


REFUSED = {
    "unreachable": (lambda redis: on(f"redis://127.0.0.1:{free_port()}"), ["127.0.0.1", "refused"]),
    "no such host": (lambda redis: on("redis://no-such-host.invalid"), ["no-such-host.invalid"]),
    "a url without a port": (lambda redis: on("redis://127.0.0.1:notaport"), ["url"]),
    "a url without a master": (lambda redis: on("redis-sentinel://127.0.0.1:26379"), ["master"]),
    "wrong password": (lambda redis: on(redis("--requirepass", "right").url("", PASSWORD)), ["password"]),
    "no password": (lambda redis: on(redis("--requirepass", "right").url()), ["password"]),
    "unknown user": (lambda redis: on(redis().url("gate", PASSWORD)), ["user"]),
    "evicting": (lambda redis: on(redis(*KEEPS, "--maxmemory", "50mb", "--maxmemory-policy", "allkeys-lru").url()),
                 ["allkeys-lru", "noeviction", "accept_eviction"]),
    "read-only replica": (lambda redis: on(replica_of_another(redis).url()), ["read-only replica of 127.0.0.1", "master"]),
    "missing permission": (lambda redis: on(restricted(redis).url("gate", PASSWORD)), ["EVALSHA", "+evalsha"]),
    "no cluster": (lambda redis: on(redis().url(), cluster=True), ["cluster"]),
    "too many databases": (lambda redis: on(redis().url(database=99)), ["99"]),
}


@pytest.mark.parametrize("store, words", REFUSED.values(), ids=REFUSED.keys())
def test_a_server_that_will_not_do_is_refused_with_cause_and_cure(make, redis, up, store, words):
    semel = make(store=store(redis))
    with pytest.raises(Died) as died:
        semel.start()
    assert died.value.code == 1
    code, found = doctor(semel)
    assert code == 1
    for text in (died.value.text, graded(found, "wrong")):
        for word in words:
            assert word.lower() in text.lower(), text
        assert PASSWORD not in text and "right" not in text.split() and "terminate" not in text
    assert semel.out.read_text() == "" and up.paid() == []


def test_a_server_that_is_too_old_is_refused(make):
    old = PretendedRedis("redis_version:6.2.14\r\nredis_mode:standalone\r\nrole:master\r\ncluster_enabled:0\r\n")
    semel = make(store=on(f"redis://127.0.0.1:{old.port}"))
    with pytest.raises(Died) as died:
        semel.start()
    assert died.value.code == 1 and "6.2.14" in died.value.text and "7.0" in died.value.text
    code, found = doctor(semel)
    assert code == 1 and "6.2.14" in graded(found, "wrong")
    old.close()


@pytest.mark.parametrize("store, word", [
    ({"redis": {}}, "url"), (on("http://127.0.0.1:1"), "redis://"), (on("redis://a", prefix="a{b}"), "prefix"),
    (on("redis://a", accept_evictions=True), "accept_eviction"), (on("unix:///x", cluster=True), "cluster")], ids=str)
def test_a_wrong_configuration_is_2_before_anything_is_asked(make, store, word):
    semel = make(store=store)
    for command in (["serve", "--check"], ["serve"], ["doctor"]):
        done = semel.command_line(*command, "--config", semel.config_file)
        assert done.returncode == 2 and word in done.stderr, done


# ---- what doctor says

GRADED = {
    "always": (KEEPS, {}, 0, "", "", "a kill of redis-server and a power cut take none"),
    "everysec": (("--appendonly", "yes"), {}, 0, "", "about the last second", "about the last second"),
    "snapshots": (("--save", "60 1"), {}, 1, "snapshots only", "", "since its last snapshot"),
    "no persistence": ((), {}, 1, "forgets every record", "", "any restart of redis-server takes all of them"),
    "eviction accepted": ((*KEEPS, "--maxmemory", "50mb", "--maxmemory-policy", "volatile-lru"), {"accept_eviction": True}, 1,
                          "volatile-lru", "", "evicts"),
    "replicas missing": (KEEPS, {"wait_replicas": 1, "wait_timeout": "50ms"}, 1, "0 replicas in touch", "", "no replica"),
}


@pytest.mark.parametrize("arguments, settings, code, wrong, note, words", GRADED.values(), ids=GRADED.keys())
def test_doctor_grades_what_the_servers_settings_promise(make, redis, arguments, settings, code, wrong, note, words):
    semel = make(store=on(redis(*arguments).url(), **settings))
    exited, found = doctor(semel)
    assert exited == code, found
    assert wrong in graded(found, "wrong") and bool(wrong) == bool(graded(found, "wrong"))
    assert note in graded(found, "note") and bool(note) == bool(graded(found, "note"))
    assert words in graded(found, "ok")
    text = semel.command_line("doctor", "--config", semel.config_file)
    assert text.returncode == code and words in text.stdout


def test_doctor_calls_replicas_that_nobody_waits_for_wrong(make, redis):
    master = redis(*KEEPS)
    replica = redis("--replicaof", "127.0.0.1", str(master.port))
    eventually(lambda: replica.info("master_link_status") == "up" and master.info("connected_slaves") == "1")
    code, found = doctor(make(store=on(master.url())))
    assert code == 1 and "a failover may forget claims" in graded(found, "wrong")
    code, found = doctor(make(store=on(master.url(), wait_replicas=1)))
    assert code == 0 and not graded(found, "wrong") and "1 of 1 replica has it" in graded(found, "ok")


def test_doctor_asks_the_server_also_while_a_gateway_runs_and_leaves_nothing_in_it(make, redis):
    server = redis(*KEEPS)
    semel = make(store=on(server.url())).start()
    assert semel.chat("k").status == 200
    before = server.command("DBSIZE")
    code, found = doctor(semel)
    assert code == 0 and "can be used" in graded(found, "ok")
    assert server.command("DBSIZE") == before


# ---- what serves

def test_one_id_is_paid_once_on_redis_and_survives_its_gateway(make, redis, up):
    server = redis(*KEEPS)
    semel = make(store=on(server.url())).start()
    first = semel.chat("k")
    assert first.status == 200 and first.replayed != "true"
    again = semel.chat("k")
    assert (again.status, again.replayed, again.body) == (200, "true", first.body)
    assert semel.chat("k", "something else").code == "key-reused"
    semel.kill()
    semel.start()
    assert semel.chat("k").body == first.body and len(up.paid()) == 1
    assert semel.record(first)["status"] == "COMPLETED"
    assert semel.stop() == 0
    assert semel.record(first)["status"] == "COMPLETED", "without a server the store itself is read"


def test_a_duplicate_at_another_gateway_is_replayed(make, redis, up):
    server = redis(*KEEPS)
    one, other = make(store=on(server.url())).start(), make(store=on(server.url())).start()
    first = one.chat("k")
    again = other.chat("k")
    assert (again.status, again.replayed, again.body) == (200, "true", first.body) and len(up.paid()) == 1


def test_deployments_with_prefixes_of_their_own_do_not_meet(make, redis, up):
    server = redis(*KEEPS)
    for name in ("blue", "green"):
        assert make(store=on(server.url(), prefix=name)).start().chat("k").status == 200
    assert len(up.paid()) == 2
    keys, cursor = [], "0"
    while True:
        cursor, page = server.command("SCAN", cursor)
        keys += page
        if cursor == "0":
            break
    assert keys and all(k.startswith(("blue:", "green:")) for k in keys), keys


def test_the_start_says_what_the_server_may_lose_and_no_password(make, redis, tmp_path):
    server = redis("--requirepass", PASSWORD, "--maxmemory", "50mb", "--maxmemory-policy", "allkeys-lru")
    semel = make(store=on("redis://:${REDIS_PASSWORD}@127.0.0.1:%d/1" % server.port, accept_eviction=True),
                 env={"REDIS_PASSWORD": PASSWORD}).start()
    said = semel.said()
    assert "allkeys-lru" in said and "forgets every record" in said and f"redis://127.0.0.1:{server.port}/1" in said
    assert semel.chat("k").status == 200
    assert semel.stop() == 0
    assert PASSWORD not in semel.said() and (semel.folder / "semel-spool").is_dir()


# ---- what the guarantees page says of a server's faults

KILLED = {"always": (KEEPS, 1), "everysec": (("--appendonly", "yes"), 1), "no syncs": (("--appendonly", "yes", "--appendfsync", "no"), 1),
          "snapshots": (("--save", "3600 1"), 2), "no persistence": ((), 2)}


@pytest.mark.parametrize("arguments, paid", KILLED.values(), ids=KILLED.keys())
def test_what_a_kill_of_redis_forgets_is_paid_again(make, redis, up, arguments, paid):
    server = redis(*arguments)
    semel = make(store=on(server.url())).start()
    first = semel.chat("k")
    assert first.status == 200
    server.kill()
    refused = semel.chat("new")
    assert refused.status == 503 and refused.code == "store-unavailable" and len(up.paid()) == 1
    semel.kill()  # it remembers answers itself
    server.start()
    again = semel.start().chat("k")
    assert len(up.paid()) == paid and (again.body == first.body) == (paid == 1)


def test_a_gateway_starts_on_a_full_redis_and_replays(make, redis, up):
    server = redis(*KEEPS)
    semel = make(store=on(server.url())).start()
    first = semel.chat("k")
    assert server.command("CONFIG", "SET", "maxmemory", "1") == "OK"
    code, found = doctor(semel)
    assert code == 1 and "is full" in graded(found, "wrong")
    fresh = make(store=on(server.url())).start()
    assert fresh.chat("k").body == first.body and "is full" in fresh.said()
    assert fresh.chat("new").status == 503 and len(up.paid()) == 1
