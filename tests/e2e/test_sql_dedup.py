"""The inbox's tables by `semel store migrate`: made with --inbox, and out of a table of the older shape with --old-dedup-table."""
import hashlib
import json
import signal
import struct
import subprocess
import threading

import pytest

import harness
from mysql_server import MysqlServer
from postgres_server import PgBouncer, PostgresServer
from sql_server import DATABASE, PASSWORD, USER, SqlError

SCOPE, SOURCE = "shop/stock", "orders"
OLD = ("--old-dedup-table", "processed", "--scope", SCOPE, "--source", SOURCE)
QUICK = ("--watch", "300ms")
DONE, FAILED, UNKNOWN = 1, 2, 4
INBOX_TABLES = ["message_dedup", "semel_assignments", "semel_crashes", "semel_flights", "semel_inbox_schema", "semel_offsets"]
# id, business_key, status, retry_count, error_message, the three times, what it becomes. The times are those of Vienna's winter.
AT, LATER = "'2026-11-20 08:30:00'", "'2026-11-21 08:30:00'"
ROWS = [("Order-1", "'key'", 1, "0", "NULL", AT, AT, LATER, DONE),
        ("order-1", "NULL", 2, "3", "'no stock'", AT, AT, LATER, FAILED),
        ("ORDER-1", "NULL", 0, "NULL", "NULL", AT, "NULL", "NULL", UNKNOWN),
        ("café", "NULL", 1, "NULL", "NULL", "NULL", "NULL", "NULL", DONE)]


@pytest.fixture(scope="module", params=[PostgresServer, MysqlServer], ids=["postgres", "mysql"])
def running(request):
    server = request.param()
    yield server
    server.clean_up()


@pytest.fixture
def server(running):
    return running.fresh()


@pytest.fixture
def migrate(server, tmp_path):
    """migrate("--inbox", …) -> what it did; `.command` for those who start it themselves."""
    config = tmp_path / "semel.yaml"
    config.write_text(f"store: {{ {server.kind}: {{ url: '{server.url()}' }} }}\n")

    def run(*arguments):
        done = harness.run_semel("store", "migrate", "--config", config, *arguments)
        assert PASSWORD not in done.stdout + done.stderr
        return done
    run.command = [str(harness.BINARY), "store", "migrate", "--config", str(config)]
    return run


def ask(server, text):
    """As the owner of the tables."""
    return server.sql(text, user=USER) if server.kind == "postgres" else server.sql(text)


def number(server, text):
    return int(ask(server, text)[0][0])


def tables(server):
    here = "current_schema()" if server.kind == "postgres" else "DATABASE()"
    return sorted(row[0] for row in ask(server, f"SELECT table_name FROM information_schema.tables WHERE table_schema = {here}"))


def make_old(server):
    """The older shape, nothing of it NOT NULL but what it cannot do without; ids are compared as bytes."""
    postgres = server.kind == "postgres"
    key = "bigserial PRIMARY KEY" if postgres else "bigint NOT NULL AUTO_INCREMENT PRIMARY KEY"
    text, small, time = ("varchar(64)", "smallint", "timestamp") if postgres else ("varchar(64) COLLATE utf8mb4_bin", "tinyint", "datetime")
    ask(server, f"CREATE TABLE processed (id {key}, message_id {text} NOT NULL UNIQUE, business_key varchar(128), status {small} NOT NULL, "
                f"retry_count int, error_message text, created_at {time} NULL, updated_at {time} NULL, expire_at {time} NULL)")


def fill(server):
    make_old(server)
    values = ", ".join(f"('{row[0]}', {', '.join(map(str, row[1:8]))})" for row in ROWS)
    ask(server, "INSERT INTO processed (message_id, business_key, status, retry_count, error_message, created_at, updated_at, expire_at) "
                f"VALUES {values}")


def fill_many(server, count):
    make_old(server)
    numbers = f"generate_series(1, {count}) AS g(seq)" if server.kind == "postgres" else f"seq_1_to_{count}"
    name = "'m-' || seq" if server.kind == "postgres" else "CONCAT('m-', seq)"
    ask(server, "INSERT INTO processed (message_id, status, retry_count, created_at, updated_at, expire_at) "
                f"SELECT {name}, 1, 0, {AT}, {AT}, {LATER} FROM {numbers}")


def contents(server, table):
    return ask(server, f"SELECT * FROM {table} ORDER BY id")


def key_hash(message_id, scope=SCOPE, source=SOURCE):
    parts = (part.encode() for part in (scope, source, message_id))
    return hashlib.sha256(b"".join(struct.pack(">I", len(part)) + part for part in parts)).hexdigest()


def migrated(server):
    """key_hash -> (message_id, status, retry_count)."""
    hexadecimal = "encode(key_hash, 'hex')" if server.kind == "postgres" else "LOWER(HEX(key_hash))"
    return {row[0]: (row[1], int(row[2]), int(row[3]))
            for row in ask(server, f"SELECT {hexadecimal}, message_id, status, retry_count FROM message_dedup")}


def test_the_inboxs_tables_are_shown_and_made_once_and_the_stores_own_are_left_alone(server, migrate):
    shown = migrate("--inbox", "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert "semel_offsets" in shown.stdout and "nothing was changed" in shown.stderr
    assert tables(server) == []
    made = migrate("--inbox")
    assert made.returncode == 0, made.stderr
    assert made.stdout == shown.stdout
    assert tables(server) == INBOX_TABLES
    again = migrate("--inbox", "--json")
    assert again.returncode == 0 and json.loads(again.stdout)["statements"] == []
    assert "there is nothing to do" in again.stderr
    beside = migrate("--inbox", "--dedup-table", "orders_done")
    assert beside.returncode == 0, beside.stderr
    assert tables(server) == sorted([*INBOX_TABLES, "orders_done"])


def test_a_dry_run_says_what_old_rows_become_and_the_migration_makes_that_of_them(server, migrate):
    fill(server)
    before = contents(server, "processed")
    shown = migrate(*OLD, "--utc-offset", "60", "--dry-run")
    assert shown.returncode == 0, shown.stderr
    assert "processed_before_semel" in shown.stdout and "nothing was changed" in shown.stderr
    assert ("4 rows of processed go to message_dedup, scope 'shop/stock', source 'orders': 2 of status 1 become done, 1 of status 2 "
            "failed and due again, 1 of status 0 unknown") in shown.stderr
    assert "held until somebody decides" in shown.stderr
    told = json.loads(migrate(*OLD, "--dry-run", "--json").stdout)
    assert (told["rows"], told["done"], told["failed"], told["undecided"], told["dry_run"]) == (4, 2, 1, 1, True)
    assert tables(server) == ["processed"] and contents(server, "processed") == before

    done = migrate(*OLD, *QUICK, "--utc-offset", "60", "--retention", "30d")
    assert done.returncode == 0, done.stderr
    assert "copied 4 of 4 rows" in done.stderr and "done, 4 rows copied; message_dedup has the new shape" in done.stderr
    assert tables(server) == sorted([*INBOX_TABLES, "processed_before_semel"])
    assert contents(server, "processed_before_semel") == before
    assert migrated(server) == {key_hash(row[0]): (row[0], row[8], 3 if row[0] == "order-1" else 0) for row in ROWS}
    now = "now() + interval '29 days'" if server.kind == "postgres" else "DATE_ADD(UTC_TIMESTAMP(), INTERVAL 29 DAY)"
    assert number(server, f"SELECT count(*) FROM message_dedup WHERE status = 1 AND expire_at > {now}") == 2
    assert number(server, "SELECT count(*) FROM message_dedup WHERE expire_at IS NULL") == 2
    utc = "to_char(created_at AT TIME ZONE 'UTC', 'HH24:MI')" if server.kind == "postgres" else "DATE_FORMAT(created_at, '%H:%i')"
    assert ask(server, f"SELECT {utc} FROM message_dedup WHERE message_id = 'Order-1'") == [["07:30"]]
    assert ask(server, "SELECT error_message FROM message_dedup WHERE status = 2") == [["no stock"]]
    assert "there is nothing to do" in migrate("--inbox").stderr
    again = migrate(*OLD, *QUICK)
    assert again.returncode == 1 and "there is no table processed" in again.stderr


def test_what_is_in_the_way_is_said_and_nothing_is_changed(server, migrate):
    fill(server)
    ask(server, "ALTER TABLE processed RENAME TO message_dedup")
    refused = migrate("--inbox")
    assert refused.returncode == 1 and "`semel store migrate --old-dedup-table`" in refused.stderr, refused.stderr
    ask(server, "UPDATE message_dedup SET status = 7 WHERE status = 0")
    refused = migrate("--old-dedup-table", "message_dedup", "--scope", SCOPE, *QUICK)
    assert refused.returncode == 1 and "1 rows of status 7" in refused.stderr, refused.stderr
    assert tables(server) == ["message_dedup"]
    ask(server, "UPDATE message_dedup SET status = 0 WHERE status = 7")
    done = migrate("--old-dedup-table", "message_dedup", "--scope", SCOPE, *QUICK)
    assert done.returncode == 0, done.stderr
    assert set(migrated(server)) == {key_hash(row[0], source="") for row in ROWS}
    again = migrate("--old-dedup-table", "message_dedup", "--scope", SCOPE)
    assert again.returncode == 1 and "has the new shape already" in again.stderr


def test_a_pooler_may_be_in_the_path(sql_servers, tmp_path):
    server = sql_servers("postgres")
    fill(server)
    pooler = sql_servers.keep(PgBouncer(server, connections=2))
    config = tmp_path / "semel.yaml"
    config.write_text(f"store: {{ postgres: {{ url: '{pooler.url}' }} }}\n")
    server.sql(f"ALTER ROLE {USER} SET statement_timeout = '7s'")
    done = harness.run_semel("store", "migrate", "--config", config, *OLD, *QUICK)
    assert done.returncode == 0, done.stderr
    assert set(migrated(server)) == {key_hash(row[0]) for row in ROWS}
    for _ in range(4):
        assert pooler.ask("SHOW statement_timeout", database=DATABASE) == [["7s"]], "its settings would be the next client's"


class OldConsumer:
    """Writes one row after the other until it is told to end, or is refused."""

    def __init__(self, server):
        self.server, self.acknowledged, self.refusal = server, [], None
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()
        harness.eventually(lambda: self.acknowledged, what="the old consumer writes")

    def work(self):
        while not self.over.is_set():
            name = f"live-{len(self.acknowledged)}"
            try:
                ask(self.server, f"INSERT INTO processed (message_id, status, expire_at) VALUES ('{name}', 1, {LATER})")
            except SqlError as problem:
                self.refusal = str(problem)
                return
            self.acknowledged.append(name)

    def end(self):
        self.over.set()
        self.thread.join(30)
        return self.acknowledged


def test_it_is_refused_while_an_old_consumer_writes_unless_that_is_accepted(server, migrate):
    fill(server)
    consumer = OldConsumer(server)
    refused = migrate(*OLD, "--watch", "2s")
    assert refused.returncode == 1, refused.stdout + refused.stderr
    assert "somebody writes to processed" in refused.stderr and "stop the old consumers first" in refused.stderr
    assert "--accept-writer" in refused.stderr
    assert tables(server) == ["processed"] and consumer.refusal is None
    accepted = migrate(*OLD, "--accept-writer")
    assert accepted.returncode == 0, accepted.stderr
    harness.eventually(lambda: consumer.refusal, what="the old consumer's next write fails")
    names = consumer.end()
    found = migrated(server)
    assert {key_hash(name) for name in names} <= set(found), "what it had been acknowledged is known"
    assert len(found) == len(names) + len(ROWS)


def test_a_migration_that_was_killed_is_begun_again_or_finished(server, migrate):
    rows = 40_000
    fill_many(server, rows)
    process = subprocess.Popen([*migrate.command, *OLD, *QUICK], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    for line in process.stderr:
        if f"copied 5000 of {rows} rows" in line:
            process.kill()
    assert process.wait(30) == -signal.SIGKILL
    left = tables(server)
    assert "processed" in left and "message_dedup_semel_new" in left and "message_dedup" not in left
    assert number(server, "SELECT count(*) FROM processed") == rows
    done = migrate(*OLD, *QUICK)
    assert done.returncode == 0, done.stderr
    assert f"done, {rows} rows copied" in done.stderr
    # What a death between the last two renamings leaves behind, and a copy that lacks something.
    ask(server, "ALTER TABLE message_dedup RENAME TO message_dedup_semel_new")
    ask(server, "DELETE FROM message_dedup_semel_new WHERE message_id IN ('m-7', 'm-39999')")
    shown = migrate(*OLD, "--dry-run")
    assert shown.returncode == 0 and "this finishes it" in shown.stderr, shown.stderr
    finished = migrate(*OLD, *QUICK)
    assert finished.returncode == 0, finished.stderr
    assert number(server, "SELECT count(*) FROM message_dedup WHERE status = 1") == rows
    assert {key_hash("m-7"), key_hash("m-39999")} <= set(migrated(server))
    assert tables(server) == sorted([*INBOX_TABLES, "processed_before_semel"])
