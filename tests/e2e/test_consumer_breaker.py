"""When a consumer stops by itself while batches are on its connections: those end, and nothing behind them starts."""
import datetime
import re
import time

import consumers
from consumers import Rows, consumer, in_database, message, settles
from harness import eventually

EACH = 10  # messages of a batch
FIRST_PROBE = 1.0  # seconds after it has stopped
HOLDS, ILL, WELL = "holds", "ill", "well"

# Whoever inserts an effect says so in the server's log, and waits for as long as his partition's mood is that. What is ill cannot run, as
# where a table is missing.
MOODS = """
CREATE TABLE moods (k varchar(20) PRIMARY KEY, mood varchar(20) NOT NULL);
CREATE FUNCTION works() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE now_it_is varchar(20);
BEGIN
    RAISE LOG 'starts %', NEW.k;
    PERFORM set_config('application_name', 'holds ' || NEW.k, true);
    LOOP
        SELECT mood INTO now_it_is FROM moods WHERE k = NEW.k;
        EXIT WHEN now_it_is <> 'holds';
        PERFORM pg_sleep(0.01);
    END LOOP;
    IF now_it_is = 'ill' THEN RAISE EXCEPTION 'ill %', NEW.k USING ERRCODE = 'undefined_table'; END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER works BEFORE INSERT ON effects FOR EACH ROW EXECUTE FUNCTION works();
"""


def said(server, since):
    """(seconds of the day, what: starts or ill, partition), as the server's log has them."""
    lines = server.log.read_text(errors="replace")[since:]
    found = re.findall(r"^\S+ ([\d:.]+) \S+ \[\d+\] (?:LOG|ERROR):  (starts|ill) (k\d)$", lines, re.M)
    midnight = datetime.datetime(1900, 1, 1)
    return [((datetime.datetime.strptime(at, "%H:%M:%S.%f") - midnight).total_seconds(), what, k) for at, what, k in found]


def test_a_batch_on_its_connection_ends_and_none_behind_it_starts_until_a_probe_does(kafka, databases, run):
    topic, server = consumers.Topic(kafka, partitions=5), databases("postgres")
    rows, keys = Rows(server), [f"k{partition}" for partition in range(5)]
    since = len(server.log.read_text(errors="replace"))
    in_database(server, MOODS)
    in_database(server, "INSERT INTO moods VALUES " + ", ".join(f"('{k}', '{HOLDS}')" for k in keys))

    def send(k, count):
        partition = int(k[1:])
        topic.send(*[message(f"{k}-{i}", k=k, amount=1, partition=partition) for i in range(count)])

    def become(mood, *which):
        in_database(server, f"UPDATE moods SET mood = '{mood}' WHERE k IN ({', '.join(map(repr, which))})")

    def holding():
        return {row[0].split()[1] for row in server.sql("SELECT application_name FROM pg_stat_activity WHERE application_name LIKE 'holds k%'")}

    def condition():
        return consumers.state_of(semel)["condition"]
    entry = consumer(topic, rows.handler, ordering="partition")
    entry["database"] = {"postgres": {"url": server.url(), "connections": 2}}
    semel = run(entry)
    send("k0", 1)
    send("k1", 1)
    eventually(lambda: holding() == {"k0", "k1"}, 30, "both connections have a batch")
    for k in keys[2:]:
        send(k, EACH)
    eventually(lambda: semel.metric("semel_incomplete_offsets") == 2 + 3 * EACH, 30, "all are in hand")
    # One connection for three batches: one is under way, two wait for it.
    become(WELL, "k0")
    under_way = eventually(lambda: holding() - {"k0", "k1"}, 30, "the next batch").pop()
    behind = set(keys[2:]) - {under_way}
    become(ILL, "k1", *behind)
    eventually(lambda: condition() == "ill", 30, "it has stopped")
    log = said(server, since)
    fell_ill = max(at for at, what, _ in log if what == "ill")

    def started():
        return [at - fell_ill for at, what, k in said(server, since)[len(log):] if what == "starts" and k != under_way]
    stopped = time.monotonic()
    while time.monotonic() < stopped + 1.5 * FIRST_PROBE:  # what runs may be what will show that all is well: no probe beside it
        assert holding() == {under_way} and not started()
        time.sleep(0.1)
    become(WELL, under_way)
    eventually(lambda: rows.count() == 1 + EACH, 30, "the batch that was under way has ended")
    assert rows.of_key(under_way) == [f"{under_way}-{i}" for i in range(EACH)] and condition() == "ill"
    assert eventually(started, 60, "a probe")[0] >= FIRST_PROBE and condition() == "ill"
    assert not behind & {k for _, what, k in log if what == "starts"}
    become(WELL, *keys)
    eventually(lambda: rows.count() == 2 + 3 * EACH, 60, "all has happened")
    settles(topic)
    eventually(lambda: condition() == "running", 30, "it runs again")
    assert not topic.letters()
    for k in keys[2:]:
        assert rows.of_key(k) == [f"{k}-{i}" for i in range(EACH)]
