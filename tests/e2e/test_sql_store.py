"""PostgreSQL and MariaDB stores from outside: what `serve`, `doctor` and `store migrate` refuse and say, what a kill of the server
takes, and that the tables hold nothing that anybody may read."""
import json
import secrets
import subprocess

import pytest

import upstream
from harness import Died, eventually, free_port, run_semel
from sql_server import DATABASE, PASSWORD, USER
from store_faults import Cable, on

WRONG = "wrong-and-private"


def doctor(semel, **kw):
    done = semel.command_line("doctor", "--config", semel.config_file, "--json", **kw)
    findings = json.loads(done.stdout)
    assert findings["ok"] == (done.returncode == 0)
    return done.returncode, [f for f in findings["findings"] if f["about"] == "store"]


def graded(findings, grade):
    return " | ".join(f["text"] for f in findings if f["grade"] == grade)


def migrate(semel, *arguments, **kw):
    return semel.command_line("store", "migrate", *arguments, "--config", semel.config_file, **kw)


@pytest.fixture(params=["postgres", "mysql"])
def server(request, sql_servers):
    return sql_servers(request.param)


# ---- what is refused

class Older(Cable):
    """A cable behind which a server seems to be of an older version, in the same number of bytes."""

    def __init__(self, server):
        self.version = server.sql("SELECT version()", database="")[0][0]
        if server.kind == "postgres":
            major = self.version.split()[1].split(".")[0]
            number = server.sql("SHOW server_version_num")[0][0]
            old = "12" + number[2:]
            self.told = [(f"\0{major}.".encode(), b"\x0012."), (number.encode(), old.encode()),
                         (int(number).to_bytes(4, "big"), int(old).to_bytes(4, "big"))]
            self.words = ["12", "13"]
        else:
            minor = self.version.split(".")[1]
            old = f"10.{'3'.rjust(len(minor), '0')}."
            self.told = [(f"10.{minor}.".encode(), old.encode())]
            self.words = [old, "10.6"]
        super().__init__(server)

    def pump(self, source, sink, outward):
        for data in self.flow(source):
            for real, pretended in [] if outward else self.told:
                data = data.replace(real, pretended)
            sink.sendall(data)


def changed(statement_of):
    """A refusal of a server on which its administrator ran something before."""
    def make(server, keep):
        for statement in statement_of(server):
            server.sql(statement, database="postgres" if server.kind == "postgres" else "")
        return server.url()
    return make


def of_standby(server, keep):
    return keep(server.standby()).url()


REFUSED = {
    "unreachable": (None, lambda server, keep: server.url(at=free_port()), ["127.0.0.1", ""]),
    "no such host": (None, lambda server, keep: server.url().replace("127.0.0.1", "no-such-host.invalid"), ["no-such-host.invalid"]),
    "port is a word": (None, lambda server, keep: server.url().replace(str(server.port), "notaport"), ["port"]),
    "wrong password": (None, lambda server, keep: server.url(password=WRONG), ["password", USER]),
    "no password": (None, lambda server, keep: server.url(password=""), ["password", USER]),
    "unknown user": (None, lambda server, keep: server.url(user="nobody"), ["nobody"]),
    "unknown database": (None, lambda server, keep: server.url(database="nowhere"), ["nowhere"]),
    "no database": ("mysql", lambda server, keep: server.url(database=""), ["database"]),
    "standby": ("postgres", of_standby, ["standby", "primary"]),
    "read-only database": ("postgres", changed(lambda s: ["ALTER DATABASE semel SET default_transaction_read_only = on"]), ["read-only"]),
    "read-only server": ("mysql", changed(lambda s: ["SET GLOBAL read_only = 1"]), ["read_only"]),
    "may not create": ("postgres", changed(lambda s: ["ALTER DATABASE semel OWNER TO postgres"]), ["GRANT", "CREATE"]),
    "may only read": ("mysql", changed(lambda s: ["REVOKE ALL ON semel.* FROM semel@'127.0.0.1'",
                                                  "GRANT SELECT ON semel.* TO semel@'127.0.0.1'"]), ["GRANT"]),
}


@pytest.mark.parametrize("kind", ["postgres", "mysql"])
@pytest.mark.parametrize("only, url, words", REFUSED.values(), ids=REFUSED.keys())
def test_a_server_that_will_not_do_is_refused_with_cause_and_cure(make, sql_servers, up, kind, only, url, words):
    if only and only != kind:
        return
    server = sql_servers(kind)
    semel = make(**on(server, url(server, sql_servers.keep)))
    with pytest.raises(Died) as died:
        semel.start()
    assert died.value.code == 1, died.value
    code, found = doctor(semel)
    migrated = migrate(semel)
    assert migrated.returncode == 1, migrated
    texts = [died.value.text, migrated.stderr]
    if "tables are missing" not in graded(found, "note"):  # it changes nothing, so it cannot know whether it might
        assert code == 1
        texts.append(graded(found, "wrong"))
    for text in texts:
        for word in words:
            assert word.lower() in text.lower(), text
        for private in (PASSWORD, WRONG, "terminate"):
            assert private not in text
    assert semel.out.read_text() == "" and up.paid() == []


def test_a_server_that_is_too_old_is_refused(make, server):
    cable = Older(server)
    semel = make(**on(server, cable.url))
    with pytest.raises(Died) as died:
        semel.start()
    code, found = doctor(semel)
    assert died.value.code == code == 1
    for text in (died.value.text, graded(found, "wrong")):
        assert all(word in text for word in cable.words) and PASSWORD not in text, text
    assert tables(server) == []
    cable.close()


CONFIGURATION = [
    ({"postgres": {}}, "url"), ({"mysql": {}}, "url"), ({"postgres": {"url": "mysql://u@h/d"}}, "postgresql://"),
    ({"mysql": {"url": "postgresql://u@h/d"}}, "mysql://"), ({"postgres": {"url": "postgresql://h/d", "schema": "a b"}}, "schema"),
    ({"mysql": {"url": "mysql://h/d", "connections": 0}}, "connections"), ({"mysql": {"url": "mysql://h/d", "schema": "s"}}, "schema"),
    ({"postgres": {"url": "postgresql://h/d", "migrates": True}}, "migrate")]


@pytest.mark.parametrize("store, word", CONFIGURATION, ids=str)
def test_a_wrong_configuration_is_2_before_anything_is_asked(make, store, word):
    semel = make(store=store)
    for command in (["serve", "--check"], ["serve"], ["doctor"], ["store", "migrate"]):
        done = semel.command_line(*command, "--config", semel.config_file)
        assert done.returncode == 2 and word in done.stderr, done


# ---- tables and their versions

def test_store_migrate_shows_then_makes_the_tables_and_serve_can_be_told_not_to(make, server, up):
    semel = make(**on(server, migrate=False))
    with pytest.raises(Died) as died:
        semel.start()
    assert died.value.code == 1 and "store migrate" in died.value.text
    planned = migrate(semel, "--dry-run")
    assert planned.returncode == 0 and "CREATE TABLE" in planned.stdout and "semel_records" in planned.stdout, planned
    assert tables(server) == []
    done = migrate(semel)
    assert done.returncode == 0, done
    assert {"semel_records", "semel_chunks", "semel_conversations", "semel_turns", "semel_values", "semel_parking", "semel_parked", "semel_schema"} <= set(tables(server))
    again = migrate(semel, "--dry-run")
    assert again.returncode == 0 and "CREATE" not in again.stdout, again
    assert migrate(semel).returncode == 0
    semel.start()
    assert semel.chat("k").status == 200 and len(up.paid()) == 1
    assert migrate(semel).returncode == 0, "also while a gateway runs"
    assert semel.chat("k").replayed == "true"
    for text in (planned.stdout, done.stdout, semel.said()):
        assert PASSWORD not in text


def tables(server):
    return sorted(name for (name,) in server.sql("SELECT table_name FROM information_schema.tables WHERE table_name LIKE 'semel%'"))


def test_three_gateways_that_start_at_once_on_an_empty_database_make_one_set_of_tables(make, server, up):
    three = [make(**on(server)) for _ in range(3)]
    for one in three:
        one.launch()
    for one in three:
        eventually(lambda: one.process.poll() is not None or answers(one), 20)
        assert one.process.poll() is None, one.said()
    assert {one.chat("k").status for one in three} == {200} and len(up.paid()) == 1


def answers(semel):
    try:
        return semel.ask_admin("/readyz", timeout=5).status == 200
    except Exception:  # not listening yet
        return False


def test_tables_of_a_newer_version_are_refused_and_left_alone(make, server, up):
    semel = make(**on(server)).start()
    assert semel.chat("k").status == 200
    assert semel.stop() == 0
    [[latest]] = server.sql(f"SELECT max(version) FROM {server.table('schema')}")  # MariaDB's has a row for each
    server.sql(f"UPDATE {server.table('schema')} SET version = 999 WHERE version = {latest}")
    before = server.count("records")
    with pytest.raises(Died) as died:
        semel.start()
    code, found = doctor(semel)
    migrated = migrate(semel)
    assert died.value.code == code == migrated.returncode == 1
    for text in (died.value.text, graded(found, "wrong"), migrated.stderr):
        assert "999" in text and "newer" in text, text
    assert server.count("records") == before


def test_the_same_sql_tables_made_by_somebody_else_are_refused(make, server):
    server.sql("CREATE SCHEMA IF NOT EXISTS semel AUTHORIZATION semel" if server.kind == "postgres" else "SELECT 1")
    server.sql(f"CREATE TABLE {server.table('records')} (id varchar(20) PRIMARY KEY, processed_at timestamp)")
    if server.kind == "postgres":
        server.sql(f"ALTER TABLE {server.table('records')} OWNER TO semel")
    semel = make(**on(server))
    with pytest.raises(Died) as died:
        semel.start()
    assert died.value.code == 1 and "semel_records" in died.value.text


def test_deployments_with_schemas_of_their_own_do_not_meet(make, sql_servers, up):
    server = sql_servers("postgres")
    for name in ("blue", "green"):
        assert make(**on(server, schema=name)).start().chat("k").status == 200
    assert len(up.paid()) == 2
    schemas = {s for (s,) in server.sql("SELECT table_schema FROM information_schema.tables WHERE table_name LIKE 'semel%'")}
    assert schemas == {"blue", "green"}


@pytest.mark.parametrize("mode", ["", "ANSI,NO_BACKSLASH_ESCAPES,PAD_CHAR_TO_FULL_LENGTH", "ORACLE"])
def test_the_servers_sql_mode_is_either_refused_in_words_or_makes_no_difference(make, sql_servers, up, mode):
    server = sql_servers("mysql", f"--sql-mode={mode}")
    semel = make(**on(server))
    try:
        semel.start()
    except Died as died:
        assert died.code == 1 and "sql_mode" in died.text
        return
    up.on("big", upstream.plain("word " * 400_000))
    asks = {f"k{i}": lambda gateway, i=i: gateway.chat(f"k{i}") for i in range(40)}  # keys with quotes and backslashes among them
    asks["big"] = lambda gateway: gateway.chat("big", model="big")
    first = {name: ask(semel) for name, ask in asks.items()}
    other = make(**on(server)).start()
    for name, ask in asks.items():
        again = ask(other)
        assert (again.status, again.replayed, again.body) == (200, "true", first[name].body), name
    assert len(up.paid()) == len(asks)


def test_a_server_that_speaks_german_is_understood(make, sql_servers, up):
    server = sql_servers("mysql", "--lc-messages=de_DE")
    server.sql("SET GLOBAL lc_messages = 'de_DE'", database="")
    semel = make(**on(server, server.url(database="nirgends")))
    with pytest.raises(Died) as died:
        semel.start()
    assert died.value.code == 1 and "nirgends" in died.value.text
    one, other = make(**on(server)).start(), make(**on(server)).start()
    first = one.chat("k")
    assert other.chat("k").body == first.body and len(up.paid()) == 1


# ---- what doctor says

GRADED = [
    ("postgres", (), {}, 0, "", ""),
    ("postgres", ("-c", "synchronous_commit=off"), {}, 1, "synchronous_commit", ""),
    ("postgres", ("-c", "fsync=off"), {}, 1, "fsync", ""),
    ("mysql", (), {}, 0, "", ""),
    ("mysql", ("--innodb-flush-log-at-trx-commit=0",), {}, 1, "innodb_flush_log_at_trx_commit", ""),
]


@pytest.mark.parametrize("kind, arguments, settings, code, wrong, anywhere", GRADED, ids=lambda v: str(v))
def test_doctor_grades_what_the_servers_settings_promise(make, sql_servers, kind, arguments, settings, code, wrong, anywhere):
    server = sql_servers(kind, *arguments, durable=True)
    semel = make(**on(server, **settings)).start()
    exited, found = doctor(semel)
    if code is not None:
        assert exited == code, found
        assert wrong in graded(found, "wrong") and bool(wrong) == bool(graded(found, "wrong")), found
    assert anywhere in " ".join(f["text"] for f in found), found
    said = semel.said()
    for name in filter(None, (wrong, anywhere)):
        assert name in said, "the start says it, too"
    assert PASSWORD not in said and PASSWORD not in json.dumps(found)
    if not wrong:
        first = semel.chat("k")
        assert doctor(semel)[0] in (0, code) and semel.chat("k").body == first.body, "asking changes nothing"
    assert server.intents() == (0 if wrong else 1)


def test_the_start_names_the_server_and_no_password(make, server):
    semel = make(**on(server, server.url().replace(PASSWORD, "${SEMEL_TEST_PASSWORD}")), env={"SEMEL_TEST_PASSWORD": PASSWORD}).start()
    said = semel.said()
    assert f"127.0.0.1:{server.port}" in said and PASSWORD not in said
    assert semel.chat("k").status == 200 and semel.stop() == 0
    assert PASSWORD not in semel.said()
    shown = run_semel("serve", "--check", "--config", semel.config_file, env={"SEMEL_TEST_PASSWORD": PASSWORD})
    assert shown.returncode == 0 and PASSWORD not in shown.stdout + shown.stderr


# ---- what a kill takes

def test_a_kill_of_the_server_takes_nothing(make, server, up):
    semel = make(**on(server)).start()
    first = semel.chat("k")
    server.kill()
    refused = semel.chat("new")
    assert (refused.status, refused.code) == (503, "store-unavailable") and len(up.paid()) == 1
    semel.kill()  # it remembers answers itself
    with pytest.raises(Died) as died:
        semel.start()
    assert died.value.code == 1 and PASSWORD not in died.value.text
    server.start()
    again = semel.start().chat("k")
    assert again.body == first.body and again.replayed == "true" and len(up.paid()) == 1


# ---- contents

TELLTALE = "telltale-" + secrets.token_hex(12)


def dump(server):
    """All tables as text; bytes in hexadecimal."""
    if server.kind == "postgres":
        command = ["pg_dump", "-h", str(server.home), "-p", str(server.port), "-U", "postgres", "--data-only", DATABASE]
    else:
        command = ["mariadb-dump", "--no-defaults", "-S", str(server.home / "sock"), "-uroot", "--hex-blob", DATABASE]
    return subprocess.run(command, check=True, capture_output=True, timeout=60).stdout


def files_holding(server, needle):
    found = []
    for path in server.data.rglob("*"):
        try:
            if path.is_file() and needle in path.read_bytes():
                found.append(str(path))
        except OSError:  # it has gone meanwhile
            pass
    return found


def test_no_prompt_answer_or_key_is_in_the_tables_and_erased_is_gone_everywhere(make, server, up):
    up.on("fast", upstream.plain(f"{TELLTALE} plain"))
    up.on("big", upstream.plain(f"{TELLTALE} big " + secrets.token_hex(400_000) + f" {TELLTALE}"))
    up.on("streaming", upstream.stream(events=4, pad=f"{TELLTALE} stream"))
    one, two = make(**on(server)).start(), make(**on(server)).start()
    prompt = f"a prompt with {TELLTALE}"
    asks = {
        "plain": lambda gateway: gateway.chat(f"key-{TELLTALE}", prompt),
        "stream": lambda gateway: gateway.chat("stream", prompt, model="streaming", stream=True),
        "big": lambda gateway: gateway.chat("big", prompt, model="big"),
        "turn": lambda gateway: gateway.say(f"id-{TELLTALE}", prompt, session=f"session-{TELLTALE}", user=f"user-{TELLTALE}"),
    }
    first = {name: ask(one) for name, ask in asks.items()}
    assert all(a.status == 200 and TELLTALE.encode() in a.body for a in first.values())
    assert all(ask(two).replayed == "true" for ask in asks.values())
    assert server.count("chunks") >= 1 and server.count("turns") == 1 and server.intents() >= 4
    text = dump(server)
    assert len(text) > 800_000, "the tables were dumped"
    assert TELLTALE.encode() not in text and TELLTALE.encode().hex().encode() not in text.lower()
    assert b"sk-test-credential" not in text and b"sk-test-credential".hex().encode() not in text.lower()
    server.stop()
    assert files_holding(server, TELLTALE.encode()) == []
    server.start()
    eventually(lambda: answers(one) and answers(two))

    paid = len(up.paid())
    done = one.command_line("record", "erase", "--tenant-of", first["plain"].headers["semel-intent"], "--yes", "--config",
                            one.config_file)
    assert done.returncode == 0, done.stderr
    for name, ask in asks.items():
        assert ask(one).code == "answer-not-kept", name
    eventually(lambda: asks["plain"](two).code == "answer-not-kept", 5 + 2, "within noticed_elsewhere_within_ms")
    for name, ask in asks.items():
        assert ask(two).code == "answer-not-kept", name
    fresh = two.chat("after", "x")
    assert fresh.status == 200 and one.chat("after", "x").body == fresh.body and len(up.paid()) == paid + 1


# ---- TLS

def certificates(folder):
    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=folder)
    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=Test CA")
    openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", "server.key", "-out", "server.csr", "-subj", "/CN=127.0.0.1")
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    openssl("x509", "-req", "-in", "server.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-out", "server.pem", "-days", "2",
            "-extfile", "names")


@pytest.mark.parametrize("kind", ["postgres", "mysql"])
def test_tls_is_used_and_a_certificate_of_a_stranger_is_refused(make, sql_servers, up, tmp_path, kind):
    certificates(tmp_path)
    (tmp_path / "other").mkdir()
    certificates(tmp_path / "other")
    server = encrypted(sql_servers, kind, tmp_path)

    def options(ca):
        return f"sslmode=verify-full&sslrootcert={ca}" if kind == "postgres" else f"tls=verify&ca_file={ca}"
    one = make(**on(server, server.url(options=options(tmp_path / "ca.pem")))).start()
    two = make(**on(server, server.url(options="sslmode=require" if kind == "postgres" else "tls=required"))).start()
    first = one.chat("k")
    assert first.status == 200 and two.chat("k").body == first.body and len(up.paid()) == 1
    stranger = make(**on(server, server.url(options=options(tmp_path / "other" / "ca.pem"))))
    with pytest.raises(Died) as died:
        stranger.start()
    assert died.value.code == 1 and "certificate" in died.value.text.lower() and PASSWORD not in died.value.text


def encrypted(sql_servers, kind, folder):
    """A server of that kind that speaks TLS, and to semel nothing else."""
    first = sql_servers(kind)
    first.stop()
    run_in = first.home
    for name in ("server.key", "server.pem"):
        (run_in / name).write_bytes((folder / name).read_bytes())
        subprocess.run(["chown", first.account, str(run_in / name)], check=False)
        (run_in / name).chmod(0o600)
    if kind == "postgres":
        hba = first.data / "pg_hba.conf"
        hba.write_text(hba.read_text().replace("host ", "hostssl "))
        first.arguments += ("-c", "ssl=on", "-c", f"ssl_cert_file={run_in}/server.pem", "-c", f"ssl_key_file={run_in}/server.key")
    else:
        first.arguments += (f"--ssl-cert={run_in}/server.pem", f"--ssl-key={run_in}/server.key", "--require-secure-transport=ON")
    return first.start()
