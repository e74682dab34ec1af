"""SIGKILL at named points of a call, then a restart and a retry: calls, attempts and bytes."""
import re
import signal
import time

import pytest

import upstream
from harness import SHORT_LEASE, background, eventually, together
from upstream import DONE, Gate

EVENTS = 80


def ask_until_killed(semel, fault, *, model, stream, key="k"):
    """Starts the gateway with a fault point, asks once, waits for its death -> the bytes that the client saw."""
    semel.start(fault=fault)
    e = semel.open_chat(key, model=model, stream=stream)
    seen = b""
    try:
        while piece := e.read_some():
            seen += piece
        assert not e.whole or fault.startswith("gateway.answered"), f"a whole answer in spite of {fault}"
    except (OSError, ValueError):
        pass
    except Exception as lost:
        assert type(lost).__name__ == "Lost", lost
    e.close()
    assert semel.wait_dead() == -signal.SIGKILL
    return seen


@pytest.fixture(params=["plain", "stream"])
def stream(request):
    return request.param == "stream"


@pytest.fixture
def model(up):
    up.on("model", lambda call, reply: (upstream.stream(EVENTS) if call.json.get("stream") else upstream.plain())(call, reply))
    return "model"



@pytest.mark.parametrize("policy", ["rerun", "hold"])
def test_killed_after_the_claim_and_before_the_call_there_is_one_call_in_all(make, up, model, stream, policy):
    semel = make(routes={"/v1/chat/completions": {"on_unknown": policy}})
    ask_until_killed(semel, "engine.acquired=kill", model=model, stream=stream)
    assert up.paid() == []
    semel.start()
    retry = semel.chat("k", model=model, stream=stream)
    assert retry.status == 200 and retry.whole and len(up.paid()) == 1
    assert retry.attempt == 2, "attempts are counted before they start"
    assert semel.chat("k", model=model, stream=stream).body == retry.body and len(up.paid()) == 1


PAID_POINTS = {
    "after the request has left": "gateway.call.sent=kill",
    "between the last upstream byte and complete": "engine.complete.before=kill",
}


@pytest.mark.parametrize("point", PAID_POINTS.values(), ids=PAID_POINTS.keys())
def test_killed_in_the_call_rerun_pays_once_more_and_counts_it(make, up, model, stream, point):
    semel = make()
    seen = ask_until_killed(semel, point, model=model, stream=stream)
    eventually(lambda: len(up.paid()) == 1, what="the first call arrived")
    assert DONE not in seen
    if not stream:
        assert seen == b"", "a plain answer leaves only after its record"
    semel.start()
    retry = semel.chat("k", model=model, stream=stream)
    assert retry.status == 200 and retry.whole and retry.attempt == 2
    assert retry.outcome in ("taken-over", "executed")
    assert len(up.paid()) == 2
    if stream:
        assert retry.body == up.paid()[1].visible, "bytes of one attempt only"
    assert semel.metric("semel_paid_maybe_twice_total") == 1
    assert semel.chat("k", model=model, stream=stream).body == retry.body and len(up.paid()) == 2


@pytest.mark.parametrize("point", PAID_POINTS.values(), ids=PAID_POINTS.keys())
def test_killed_in_the_call_hold_never_pays_again_by_itself(make, up, model, stream, point):
    semel = make(routes={"/v1/chat/completions": {"on_unknown": "hold"}})
    ask_until_killed(semel, point, model=model, stream=stream)
    semel.start()
    for _ in range(3):
        refused = semel.chat("k", model=model, stream=stream)
        assert refused.status == 409 and refused.code == "outcome-unknown"
        assert refused.headers["x-should-retry"] == "false"
    assert len(up.paid()) <= 1
    semel.kill()
    semel.start()
    assert semel.chat("k", model=model, stream=stream).code == "outcome-unknown", "the state survives a restart"
    assert len(up.paid()) <= 1


@pytest.mark.parametrize("policy", ["rerun", "hold"])
def test_killed_after_fifty_events(make, up, model, policy):
    semel = make(routes={"/v1/chat/completions": {"on_unknown": policy}})
    seen = ask_until_killed(semel, "gateway.stream.event=kill:50", model=model, stream=True)
    assert up.paid()[0].sent.startswith(seen) and DONE not in seen
    assert seen.count(b"\n\n") <= 50
    semel.start()
    retry = semel.chat("k", model=model, stream=True)
    if policy == "hold":
        assert retry.code == "outcome-unknown" and len(up.paid()) == 1
    else:
        assert retry.whole and retry.body == up.paid()[1].visible and retry.attempt == 2 and len(up.paid()) == 2
        assert b"call1 " not in retry.body


@pytest.mark.parametrize("durability", ["sync", "async"])
def test_killed_between_complete_and_the_last_bytes_the_record_answers(make, up, model, stream, durability):
    semel = make(durability=durability)
    seen = ask_until_killed(semel, "engine.complete.after=kill", model=model, stream=stream)
    assert DONE not in seen
    if not stream:
        assert seen == b""
    semel.start()
    retry = semel.chat("k", model=model, stream=stream)
    assert len(up.paid()) == 1
    assert retry.status == 200 and retry.whole and retry.replayed == "true" and retry.attempt == 1
    assert retry.body.startswith(seen)
    if stream:
        assert retry.body == up.paid()[0].visible
    assert semel.metric("semel_paid_maybe_twice_total") == 0


@pytest.mark.parametrize("durability", ["sync", "async"])
def test_killed_after_the_answer_the_record_answers(make, up, model, stream, durability):
    semel = make(durability=durability)
    seen = ask_until_killed(semel, "gateway.answered=kill", model=model, stream=stream)
    semel.start()
    retry = semel.chat("k", model=model, stream=stream)
    assert len(up.paid()) == 1 and retry.whole and retry.replayed == "true"
    assert retry.body.startswith(seen)
    if stream:
        assert retry.body == up.paid()[0].visible


def test_retries_that_arrive_together_after_a_crash_make_one_new_call(make, up, model):
    semel = make()
    ask_until_killed(semel, "gateway.call.sent=kill", model=model, stream=False)
    up.on("model", upstream.plain(delay=0.3))
    semel.start()
    answers = together(50, lambda i: semel.chat("k", model=model))
    assert {(a.status, a.body) for a in answers} == {(200, answers[0].body)}
    assert len(up.paid()) == 2


def test_crash_after_crash_every_attempt_is_counted(make, up, model):
    semel = make()
    for n in range(3):
        ask_until_killed(semel, "engine.complete.before=kill", model=model, stream=False)
        assert len(up.paid()) == n + 1
    semel.start()
    last = semel.chat("k", model=model)
    assert last.attempt == 4 and len(up.paid()) == 4


@pytest.mark.parametrize("point", ["engine.acquired", "gateway.call.sent", "engine.complete.before", "engine.complete.after"])
def test_no_record_stays_in_progress_after_a_kill(make, up, model, point):
    semel = make(engine={"lease": SHORT_LEASE})
    ask_until_killed(semel, f"{point}=kill", model=model, stream=False)
    semel.start()
    answer = semel.chat("k", model=model, timeout=10)  # lease and a poll at the most
    assert answer.status == 200 and len(up.paid()) <= 2


def test_kill_under_load_loses_no_answer_that_was_given(make, up):
    semel = make().start()
    given = {}

    def worker(i):
        for n in range(1000):
            key = f"k{i}-{n}"
            answer = semel.try_chat(key, f"text {key}")
            if answer is None or not answer.whole:
                return
            given[key] = answer.body
    workers = [background(worker, i) for i in range(8)]
    eventually(lambda: len(given) > 100, what="100 answers")
    semel.kill()
    for w in workers:
        w.result(30)
    semel.start()
    paid = len(up.paid())
    for key, body in given.items():
        again = semel.chat(key, f"text {key}")
        assert again.body == body and again.replayed == "true", key
    assert len(up.paid()) == paid


def test_a_process_paused_past_its_lease_gives_everyone_the_same_answer(make, up):
    semel = make(engine={"lease": SHORT_LEASE}).start()
    gate = Gate()
    up.on("held", upstream.plain(gate=gate))
    first = background(semel.chat, "k", model="held")
    gate.wait_until_entered()
    semel.process.send_signal(signal.SIGSTOP)
    joined = [background(semel.chat, "k", model="held") for _ in range(5)]
    time.sleep(4)  # longer than the lease, measured by the stopped process's own clock
    gate.open()
    semel.process.send_signal(signal.SIGCONT)
    answers = [f.result(30) for f in [first, *joined]]
    assert {(a.status, a.body) for a in answers} == {(200, answers[0].body)}
    assert len(up.paid()) - 1 == semel.metric("semel_paid_maybe_twice_total")
    assert semel.chat("k", model="held").body == answers[0].body


def test_a_call_longer_than_many_leases_is_never_taken_over(make, up):
    semel = make(engine={"lease": SHORT_LEASE}).start()
    up.on("slow", upstream.plain(delay=6))
    answers = together(5, lambda i: semel.chat("k", model="slow"))
    assert len(up.paid()) == 1 and len({a.body for a in answers}) == 1
    assert {a.attempt for a in answers} == {1}


@pytest.mark.parametrize("point, state", [("gateway.call.sent", "UNKNOWN"), ("engine.complete.after", "COMPLETED")])
def test_a_turn_of_a_session_killed_leaves_the_session_usable_and_each_turn_once(make, up, point, state):
    semel = make(routes={"/api/chat": {"on_unknown": "hold"}})
    semel.start()
    semel.say("r1", "one")
    semel.kill()
    semel.start(fault=f"{point}=kill")
    try:
        semel.say("r2", "two")
    except Exception:
        pass
    assert semel.wait_dead() == -signal.SIGKILL
    semel.start()
    assert eventually(lambda: semel.status_of("r2").json["status"] == state, what=state)
    third = semel.say("r3", "three")
    assert third.status == 200
    messages = semel.ask("GET", "/api/chat/sessions/s1/messages", headers={"X-User-Id": "u1"}).json["messages"]
    turns = ["r1", "r3"] if state == "UNKNOWN" else ["r1", "r2", "r3"]
    assert [(m["requestId"], m["role"]) for m in messages] == [(r, role) for r in turns for role in ("user", "assistant")]
    assert len(up.paid('"two"')) >= 1


def test_the_fault_points_say_at_start_that_they_are_armed_or_refuse_nonsense(make):
    semel = make()
    semel.launch(fault="engine.acquired=explode")
    assert semel.wait_dead() != 0
    assert re.search(r"explode|kill or stop", semel.said())
