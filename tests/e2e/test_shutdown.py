"""SIGTERM: what runs ends well, nothing new begins, the process ends with 0."""
import signal
import time

import pytest

import upstream
from harness import Lost, background, eventually
from upstream import Gate


def test_an_idle_gateway_ends_at_once(semel):
    semel.chat("k")
    begun = time.monotonic()
    assert semel.stop() == 0
    assert time.monotonic() - begun < 10


def test_an_interrupt_ends_it_too(semel):
    semel.process.send_signal(signal.SIGINT)
    assert semel.wait_dead() == 0


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
def test_a_running_call_ends_whole_and_is_recorded(semel, up, stream):
    gate = Gate()
    up.on("held", upstream.stream(events=20, gate=gate, gate_after=10) if stream else upstream.plain(gate=gate))
    first = background(semel.chat, "k", model="held", stream=stream)
    gate.wait_until_entered()
    joiner = background(semel.chat, "k", model="held", stream=stream)
    eventually(lambda: semel.metric("semel_joiners") >= 1)
    semel.process.send_signal(signal.SIGTERM)
    eventually(lambda: semel.ask_admin("/readyz").status == 503, what="not ready while draining")
    assert semel.ask_admin("/healthz").status == 200
    assert semel.process.poll() is None
    gate.open()
    a, b = first.result(20), joiner.result(20)
    assert a.whole and b.whole and a.status == b.status == 200 and a.body == b.body
    assert semel.wait_dead() == 0
    semel.start()
    assert semel.chat("k", model="held", stream=stream).body == a.body and len(up.paid()) == 1


def test_nothing_new_begins_while_draining(semel, up):
    gate = Gate()
    up.on("held", upstream.plain(gate=gate))
    first = background(semel.chat, "k", model="held")
    gate.wait_until_entered()
    semel.process.send_signal(signal.SIGTERM)
    eventually(lambda: semel.ask_admin("/readyz").status == 503)
    try:
        refused = semel.chat("new", "must not be paid")
        assert refused.status == 503 and int(refused.headers["retry-after"]) >= 1
    except (OSError, Lost):
        pass  # no longer listening
    gate.open()
    assert first.result(20).status == 200
    assert semel.wait_dead() == 0
    assert up.paid("must not be paid") == []


def test_a_keyed_call_whose_client_left_is_finished_before_the_end(semel, up):
    gate = Gate()
    up.on("held", upstream.stream(events=20, gate=gate, gate_after=5))
    e = semel.open_chat("k", model="held", stream=True)
    e.read_events(5)
    e.close()
    semel.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    gate.open()
    assert semel.wait_dead() == 0
    semel.start()
    replay = semel.chat("k", model="held", stream=True)
    assert replay.whole and replay.body == up.paid()[0].visible and len(up.paid()) == 1


def test_after_drain_timeout_it_ends_all_the_same_and_the_call_is_taken_over(make, up):
    semel = make(drain_timeout="1s").start()
    gate = Gate()
    up.on("held", upstream.in_turn(upstream.plain(gate=gate), upstream.plain()))
    first = background(semel.try_chat, "k", model="held")
    gate.wait_until_entered()
    semel.process.send_signal(signal.SIGTERM)
    assert semel.wait_dead(20) >= 0, "ended by itself"
    lost = first.result(20)
    assert lost is None or not lost.whole or lost.status >= 500
    gate.open()
    semel.start()
    answer = semel.chat("k", model="held")
    assert answer.status == 200 and answer.attempt == 2 and len(up.paid()) == 2


def test_a_second_signal_ends_it_at_once(semel, up):
    gate = Gate()
    up.on("held", upstream.plain(gate=gate))
    background(semel.try_chat, "k", model="held")
    gate.wait_until_entered()
    semel.process.send_signal(signal.SIGTERM)
    eventually(lambda: semel.ask_admin("/readyz").status == 503)
    semel.process.send_signal(signal.SIGTERM)
    semel.wait_dead(10)
    gate.open()


def test_everything_answered_before_the_end_is_replayed_after_it(make, up):
    for durability in ("sync", "async"):
        semel = make(durability=durability).start()
        answers = {f"{durability}-{i}": semel.chat(f"{durability}-{i}", f"{i}").body for i in range(30)}
        assert semel.stop() == 0
        semel.start()
        for key, body in answers.items():
            assert semel.chat(key, key.rsplit("-")[-1]).body == body
        assert semel.stop() == 0
    assert len(up.paid()) == 60
