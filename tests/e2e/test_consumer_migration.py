"""From a consumer in Java that kept a table by hand to ours: its group, its position and its table are taken over, what it had lost is
found, and nothing happens twice. The steps are those of docs/guides/inbox.md."""
import random
import threading

import pytest

import consumers
import old_java
from consumers import Rows, consumer, happens, in_database, message, settles
from harness import eventually

DONE, FAILED, UNKNOWN = 1, 2, 4
KINDS = pytest.mark.parametrize("kind", ["postgres", "mysql"])


@pytest.fixture
def old():
    """old(topic, server) -> an old consumer that works. All are ended after the test."""
    made = []

    def start(topic, server):
        made.append(old_java.OldConsumer(topic, server))
        return made[-1]
    yield start
    for one in made:
        one.clean_up()


class Feed:
    """Numbered messages that keep coming, and copies of any that came before, on any partition."""

    def __init__(self, topic, partitions):
        self.topic, self.partitions = topic, partitions
        self.bodies, self.chosen = {}, random.Random(7)
        self._turn, self._over = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        while not self._over.wait(0.01):
            number = len(self.bodies)
            self.send(f"m{number}")
            if number % 3 == 0:
                self.copies_of([self.chosen.choice(list(self.bodies))])

    def send(self, id, **more):
        with self._turn:
            self.bodies[id] = {"k": "new", "amount": 1, **more}
        self.copies_of([id])

    def copies_of(self, ids):
        with self._turn:
            self.topic.send(*[message(id, partition=self.chosen.randrange(self.partitions), **self.bodies[id]) for id in ids])

    def end(self):
        self._over.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


def migrate(semel, topic, *arguments):
    return semel.command_line("store", "migrate", "--config", semel.config_file, "--old-dedup-table", "message_dedup", "--scope",
                              f"{topic.group}/under-test", "--source", topic.name, *arguments)


def reset(semel, to):
    done = semel.command_line("consumer", "reset", "under-test", "--config", semel.config_file, "--to", to, "--yes")
    assert done.returncode == 0, done.stderr


def has_no_members(topic):
    eventually(lambda: not topic.server.members(topic.group), 60, "nobody is in the group")


def statuses(server):
    return {id: int(status) for id, status in in_database(server, "SELECT message_id, status FROM message_dedup")}


def more_of(effects, count):
    wanted = sum(effects.effects().values()) + count
    eventually(lambda: sum(effects.effects().values()) >= wanted, 60, f"{count} more effects")


@KINDS
def test_the_place_of_an_old_consumer_is_taken_and_what_it_was_in_the_middle_of_waits_for_a_person(kind, kafka, databases, run, old):
    topic, server = consumers.Topic(kafka, partitions=1), databases(kind)
    rows, fail = Rows(server), {"m3", "m7"}
    old_java.make_table(server)
    topic.send(*[message(f"m{i}", k="new", amount=1, old="fails" if f"m{i}" in fail else "before" if i == 15 else "")
                 for i in range(20)])
    before = old(topic, server)
    before.says("stands before the effect of m15")
    before.kill()
    assert topic.unsettled() == 5 and len(rows.effects()) == 13  # it has passed over the two that failed
    semel = run(consumer(topic, rows.handler), store=server, started=False)
    done = migrate(semel, topic, "--watch", "300ms")
    assert done.returncode == 0, done.stderr
    has_no_members(topic)
    semel.start()
    happens(rows, [f"m{i}" for i in range(16, 20)])
    settles(topic)
    # Whether m15 happened nobody knows: a person decides.
    assert [(letter.header("semel-message-id"), letter.header("semel-error-class")) for letter in topic.letters()] == [("m15", "unknown")]
    semel.stop()
    has_no_members(topic)
    reset(semel, "earliest")
    semel.start()
    found = happens(rows, fail)
    settles(topic)
    assert found == {f"m{i}": 1 for i in range(20) if i != 15}


@KINDS
@pytest.mark.parametrize("way", ["stopped", "writing"])
def test_an_old_consumer_in_java_is_replaced_while_messages_and_copies_come_and_each_happens_once(way, kind, kafka, databases, run, old):
    topic, server = consumers.Topic(kafka, partitions=2), databases(kind)
    rows, feed = Rows(server), Feed(topic, 2)
    old_java.make_table(server)
    semel = run(consumer(topic, rows.handler), store=server, started=False)
    try:
        first = old(topic, server)
        feed.send("fails", old="fails")
        more_of(rows, 20)
        feed.send("cut-before", old="before")
        first.says("stands before the effect of cut-before")
        first.kill()
        # Another one acknowledges what the first was in the middle of, and the group goes on.
        second = old(topic, server)
        more_of(rows, 20)
        refused = migrate(semel, topic)
        assert refused.returncode == 1 and "somebody writes to message_dedup" in refused.stderr, refused.stdout + refused.stderr
        feed.send("cut-after", old="after" if way == "stopped" else "")
        if way == "stopped":
            second.says("stands after the effect of cut-after")
            second.kill()
            done = migrate(semel, topic)
        else:
            done = migrate(semel, topic, "--accept-writer")
        assert done.returncode == 0, done.stderr
        if way == "writing":
            second.says("not acknowledged: ")
            second.says("key_hash")  # the column that it does not know
            second.kill()
        # A person decides, who can see which effects are there.
        happened = rows.effects()
        assert set(happened.values()) == {1}
        undecided = [id for id, status in statuses(server).items() if status == UNKNOWN]
        assert "cut-before" in undecided and (way == "writing" or sorted(undecided) == ["cut-after", "cut-before"])
        for id in undecided:
            in_database(server, f"UPDATE message_dedup SET status = {DONE if id in happened else FAILED} WHERE message_id = '{id}'")
        has_no_members(topic)
        reset(semel, "-12h")
        semel.start()
        more_of(rows, 20)
        feed.copies_of(happened)
    finally:
        feed.end()
    found = happens(rows, feed.bodies)
    settles(topic, 60)
    assert rows.effects() == found == {id: 1 for id in feed.bodies}
    assert set(statuses(server)) == set(feed.bodies) and set(statuses(server).values()) == {DONE}
    assert topic.letters() == []
    by_whom = dict(in_database(server, "SELECT k, count(*) FROM effects GROUP BY k"))
    assert int(by_whom["old"]) == sum(happened.values()) and int(by_whom["new"]) > 0
