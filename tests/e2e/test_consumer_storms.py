"""Rebalance storms: members of one group join, leave and are killed without a pause, while numbered messages of many keys flow.
SEMEL_STORM_SECONDS says how long (12)."""
import os
import random
import threading
import time

import pytest

import consumers
from consumers import Rows, consumer, message, settles
from harness import Died, eventually

KEYS, MEMBERS = 12, 3
STORM_SECONDS = float(os.environ.get("SEMEL_STORM_SECONDS", 12))
ASSIGNORS = {"eager": {}, "cooperative": {"partition.assignment.strategy": "cooperative-sticky"}}


class Flow:
    """Sends numbered messages, round the keys, until it is told to end."""

    def __init__(self, topic):
        self.topic, self.sent, self.failed = topic, 0, None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        try:
            while not self._over.is_set():
                first, self.sent = self.sent, self.sent + KEYS
                self.topic.send(*[message(f"m{n}", f"k{n % KEYS}", k=f"k{n % KEYS}", amount=1) for n in range(first, self.sent)])
                self._over.wait(0.05)
        except Exception as problem:
            self.failed = problem

    def end(self):
        self._over.set()
        self._thread.join()
        assert self.failed is None, self.failed


def weather(members, chosen, seconds):
    """Every half second somebody leaves, is killed or comes back; one of them is always there. How often each happened."""
    happened = {"killed": 0, "left": 0, "joined": 0}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        up = [member for member in members if member.process.poll() is None]
        down = [member for member in members if member not in up]
        what = chosen.choice(["killed", "left", "joined"])
        if what == "joined" and down:
            chosen.choice(down).launch()
        elif what != "joined" and len(up) > 1:
            one = chosen.choice(up)
            one.kill() if what == "killed" else one.stop()
        else:
            continue
        happened[what] += 1
        time.sleep(chosen.random())
    return happened


@pytest.mark.parametrize("assignor", ASSIGNORS)
def test_members_come_go_and_are_killed_and_every_number_has_one_effect_in_its_keys_order(assignor, topic, databases, run):
    rows = Rows(databases("postgres"))
    entry = consumer(topic, rows.handler, ordering="key", source=topic.source(properties=ASSIGNORS[assignor]))
    try:
        members = [run(entry, store=rows.server)]
    except Died as died:
        # The older library is refused an assignor under which it can lose its assignment.
        assert assignor == "cooperative" and "can lose its assignment" in died.text
        return
    members += [run(entry, store=rows.server) for _ in range(MEMBERS - 1)]
    flow = Flow(topic)
    happened = weather(members, random.Random(3), STORM_SECONDS)
    for member in members:
        if member.process.poll() is not None:
            member.launch()
    flow.end()
    assert happened["killed"] >= 2 and happened["left"] >= 2, happened
    eventually(lambda: rows.count() >= flow.sent, 60, f"{flow.sent} effects")
    settles(topic, 30)
    assert rows.count() == flow.sent
    for key in range(KEYS):
        assert rows.of_key(f"k{key}") == [f"m{n}" for n in range(key, flow.sent, KEYS)]
    assert topic.letters() == []
    assert not any("FATAL" in member.said() or "cannot go on" in member.said() for member in members)
