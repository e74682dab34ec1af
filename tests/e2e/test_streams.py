"""Streams: every byte as the upstream sent it, whole or visibly cut, for the first asker and for everyone after."""
import re
import time

import pytest

import upstream
from harness import SHORT, background, eventually, together
from upstream import DONE, Gate


@pytest.mark.parametrize("leave", ["close", "reset"])
def test_a_client_that_leaves_after_event_10_of_200_gets_all_of_them_on_its_retry(semel, up, leave):
    up.on("long", upstream.stream(events=200, gap=0.01))
    first = semel.open_chat("k", model="long", stream=True)
    seen = first.read_events(10)
    getattr(first, leave)()
    retry = semel.chat("k", model="long", stream=True)
    call, = up.paid()
    assert retry.whole and retry.body == call.visible and retry.body.startswith(seen)
    assert retry.body.count(b"data: ") == 202 and not call.client_left
    later = semel.chat("k", model="long", stream=True)
    assert later.body == retry.body and later.outcome == "replayed" and len(up.paid()) == 1


def test_a_joiner_gets_the_stream_from_its_first_event_and_then_live(semel, up):
    gate = Gate()
    up.on("held", upstream.stream(events=6, gate=gate, gate_after=3))
    first = semel.open_chat("k", model="held", stream=True)
    first.read_events(3)
    joiner = semel.open_chat("k", model="held", stream=True)
    assert joiner.read_events(3).startswith(first.body[:50])
    assert joiner.body == first.body  # live: nothing after event 3 is there yet
    gate.open()
    a, b = first.rest(), joiner.rest()
    assert a.whole and b.whole and a.body == b.body == up.paid()[0].visible
    assert (b.outcome, b.replayed) == ("joined", "true")


def test_events_arrive_one_by_one_and_not_at_the_end(semel, up):
    gates = [Gate() for _ in range(5)]

    def run(call, reply):
        reply.start()
        for i, gate in enumerate(gates):
            reply.event(upstream.delta(call, f"w{i}"))
            gate.wait()
        upstream.finish_stream(call, reply, 5)
    up.on("stepwise", run)
    e = semel.open_chat("k", model="stepwise", stream=True, timeout=15)
    for i, gate in enumerate(gates):
        assert e.read_events(i + 1).count(b"data: ") == i + 1
        gate.open()
    assert e.rest().whole


def test_nothing_is_sent_before_the_upstreams_status_is_known(semel, up):
    gate = Gate()
    up.on("held", upstream.error(429, gate=gate))
    e = semel.open_chat("k", model="held", stream=True, timeout=1)
    gate.wait_until_entered()
    with pytest.raises(TimeoutError):
        e.read_head()
    e.socket.settimeout(20)
    gate.open()
    assert e.rest().status == 429


NASTY = ("\ufeffdata: {\"choices\":[{\"delta\":{\"content\":\"漢字 🙂\"}}]}\n\n".encode()
         + b": a comment\n\n"
         + b"data: {\"choices\":[{\"delta\":{\"content\":\"crlf\"}}]}\r\n\r\n"
         + b"data: {\"choices\":\rdata: [{\"delta\":{}}]}\r\r"
         + b"event: x\nid: 1\nretry: 10\ndata: {\"a\":\ndata: 1}\n\n"
         + b"data: {\"raw\":\"\xff\xfe\"}\n\n"
         + b"data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n"
         + DONE)


@pytest.mark.parametrize("size", range(1, 8))
@pytest.mark.parametrize("usage", ["inject", "passive"])
def test_a_stream_in_pieces_of_any_size_keeps_its_bytes(make, up, size, usage):
    semel = make(upstream_options={"stream_usage": usage}).start()
    up.on("nasty", upstream.raw_stream([NASTY[i:i + size] for i in range(0, len(NASTY), size)]))
    for expected in ("executed", "replayed"):
        answer = semel.chat("k", model="nasty", stream=True)
        assert answer.whole and answer.body == NASTY and answer.outcome == expected
    assert len(up.paid()) == 1


def test_an_event_of_8_mib_passes_and_is_replayed(semel, up):
    big = b'data: {"choices":[{"delta":{"content":"' + b"x" * (8 << 20) + b'"}}]}\n\n'
    end = b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n' + DONE
    up.on("big", upstream.raw_stream([big[:1 << 20], big[1 << 20:], end]))
    for expected in ("executed", "replayed"):
        answer = semel.chat("k", model="big", stream=True)
        assert answer.whole and answer.outcome == expected and answer.body == big + end
    assert len(up.paid()) == 1


def test_usage_is_asked_for_and_taken_out_unless_the_client_wanted_it(semel, up):
    plain = semel.chat("k1", stream=True)
    assert up.paid()[0].json["stream_options"] == {"include_usage": True}
    assert b'"usage": {' not in plain.body and plain.body == up.paid()[0].visible
    wanted = semel.chat("k2", stream=True, more={"stream_options": {"include_usage": True}})
    assert b'"usage": {"prompt_tokens": 11' in wanted.body and wanted.body == up.paid()[1].sent
    refused = semel.chat("k3", stream=True, more={"stream_options": {"include_usage": False, "include_obfuscation": False}})
    assert b'"usage": {' not in refused.body
    assert up.paid()[2].json["stream_options"] == {"include_usage": True, "include_obfuscation": False}


def test_passive_usage_leaves_the_request_alone(make, up):
    semel = make(upstream_options={"stream_usage": "passive"}).start()
    body = b'{ "model":"fast",  "stream":true, "messages":[] }'
    answer = semel.ask("POST", "/v1/chat/completions", body, {"Idempotency-Key": "k"})
    assert up.paid()[0].body == body and answer.body == up.paid()[0].sent and answer.whole


def test_a_usage_null_on_other_chunks_stays(semel, up):
    def run(call, reply):
        reply.start()
        reply.event({**upstream.delta(call, "a"), "usage": None})
        upstream.finish_stream(call, reply, 1)
    up.on("null", run)
    assert b'"usage": null' in semel.chat("k", model="null", stream=True).body


@pytest.mark.parametrize("how", ["cut", "reset", "no_terminator", "half_event", "error_event", "error_data"])
def test_a_stream_that_does_not_end_well_is_visible_and_runs_again(semel, up, how):
    up.on("bad", upstream.in_turn(upstream.broken_stream(8, how), upstream.stream(3)))
    first = semel.chat("k", model="bad", stream=True)
    call = up.paid()[0]
    assert first.body == call.sent or (how in ("cut", "reset", "half_event") and call.sent.startswith(first.body))
    if how in ("error_event", "error_data"):
        assert b"overloaded" in first.body and not first.body.endswith(DONE)
    else:
        assert not first.whole, "a clean end would be a silent success"
    second = semel.chat("k", model="bad", stream=True)
    assert second.whole and second.body == up.paid()[1].visible and second.attempt == 2
    assert semel.chat("k", model="bad", stream=True).body == second.body and len(up.paid()) == 2
    assert semel.metric("semel_paid_maybe_twice_total") == 1


@pytest.mark.parametrize("how", ["short", "short chunked", "empty"])
def test_a_plain_answer_that_is_cut_short_is_not_an_answer(semel, up, how):
    def short(call, reply):
        if how == "short":
            reply.head(200, [("Content-Type", "application/json"), ("Content-Length", "1000")])
            reply.bytes(b'{"id": "chatcmpl-1", "choices": [')
        elif how == "short chunked":
            reply.head(200, [("Content-Type", "application/json"), ("Transfer-Encoding", "chunked")])
            reply.chunk(b'{"id": "chatcmpl-1", "choices": [')
        reply.close()
    up.on("short", upstream.in_turn(short, upstream.plain()))
    first = semel.try_chat("k", model="short")
    assert first is None or first.status == 502 or not first.whole
    second = semel.chat("k", model="short")
    assert second.status == 200 and second.whole and second.attempt == 2
    assert semel.metric("semel_paid_maybe_twice_total") == 1


@pytest.mark.parametrize("how", ["cut", "error_event", "no_terminator"])
def test_under_hold_a_broken_stream_is_an_unknown_outcome(make, up, how):
    semel = make(routes={"/v1/chat/completions": {"on_unknown": "hold"}}).start()
    up.on("bad", upstream.broken_stream(8, how))
    semel.chat("k", model="bad", stream=True)
    for _ in range(2):
        refused = semel.chat("k", model="bad", stream=True)
        assert refused.status == 409 and refused.code == "outcome-unknown"
        assert refused.headers["x-should-retry"] == "false"
    assert len(up.paid()) == 1


def test_heartbeats_fill_the_silence_and_are_not_recorded(make, up):
    semel = make(routes={"/v1/chat/completions": {"heartbeat": "1s"}}).start()
    gate = Gate()
    up.on("silent", upstream.stream(events=4, gate=gate, gate_after=2))
    first = semel.open_chat("k", model="silent", stream=True)
    first.read_events(2)
    while first.body.count(b": semel\n") < 2:
        assert first.read_some()
    gate.open()
    answer = first.rest()
    assert answer.whole and b": semel\n\n" not in answer.body, "an empty event breaks decoders"
    assert re.sub(rb"(?m)^: semel\n", b"", answer.body) == up.paid()[0].visible
    assert semel.chat("k", model="silent", stream=True).body == up.paid()[0].visible


def test_no_heartbeat_cuts_into_an_event(make, up):
    semel = make(routes={"/v1/chat/completions": {"heartbeat": "500ms"}}).start()

    def run(call, reply):
        reply.start()
        for piece in (b'data: {"choices":[{"delta":', b'{"content":"x"}}]}\n\n'):
            call.events.append(piece)
            reply.chunk(piece)
            time.sleep(1.5)
        upstream.finish_stream(call, reply, 1)
    up.on("half", run)
    body = semel.chat("k", model="half", stream=True).body
    assert b'{"delta":{"content":"x"}}' in body


def test_a_slow_reader_gets_everything_and_stops_nobody(semel, up):
    up.on("bulky", upstream.stream(events=400, pad="x" * 20000))
    slow = semel.open_chat("k", model="bulky", stream=True, receive_buffer=8192)
    slow.read_head()
    fast = semel.chat("k", model="bulky", stream=True, timeout=30)
    assert fast.whole and fast.body == up.paid()[0].visible
    assert semel.chat("other").status == 200
    late = slow.rest()
    assert late.whole and late.body == fast.body and len(up.paid(model="bulky")) == 1


def test_a_record_may_expire_while_a_slow_reader_is_given_it(make, up):
    semel = make(engine=SHORT, memory={"hot_records": "1MiB"}).start()
    up.on("bulky", upstream.stream(events=600, pad="x" * 20000))
    whole = semel.chat("k", model="bulky", stream=True)
    assert whole.whole
    slow = semel.open_chat("k", model="bulky", stream=True, receive_buffer=8192)
    slow.read_events(3)
    time.sleep(4)  # past the retention; the reader is at its start
    for i in range(20):  # the store has work, so that it can purge
        semel.chat(f"other-{i}")
    late = slow.rest()
    if late.whole:
        assert late.body == whole.body, "a short body must not look whole"
    else:
        assert whole.body.startswith(late.body)
    assert semel.chat("k", model="bulky", stream=True).attempt == 1 and len(up.paid(model="bulky")) == 2


def test_fifty_joiners_of_a_killed_gateway_get_one_new_call_and_the_bytes_of_one_attempt(make, up):
    semel = make().start()
    gate = Gate()
    up.on("held", upstream.in_turn(upstream.stream(events=40, gate=gate, gate_after=20), upstream.stream(events=40, gap=0.02)))

    def until_it_breaks(i):
        e = semel.open_chat("k", model="held", stream=True)
        while e.read_some():
            pass
        return e.whole, e.body
    readers = [background(until_it_breaks, i) for i in range(51)]
    gate.wait_until_entered()
    eventually(lambda: semel.metric("semel_joiners") >= 50, what="50 joiners")
    semel.kill()
    for r in readers:
        whole, body = r.result(20)
        assert not whole and up.paid()[0].sent.startswith(body)
    gate.open()
    semel.start()
    answers = together(51, lambda i: semel.chat("k", model="held", stream=True))
    assert len(up.paid()) == 2
    assert {(a.whole, a.body) for a in answers} == {(True, up.paid()[1].visible)}
    assert {a.attempt for a in answers} == {2}


def test_a_client_gone_in_mid_stream_with_on_disconnect_cancel_ends_the_call(make, up):
    semel = make(routes={"/v1/chat/completions": {"on_disconnect": "cancel"}}).start()
    up.on("long", upstream.stream(events=2000, gap=0.01))
    e = semel.open_chat("k", model="long", stream=True)
    e.read_events(10)
    e.close()
    eventually(lambda: up.paid()[0].client_left, what="the upstream call was ended")
    assert len(up.paid()[0].events) < 1500


def test_one_who_stays_keeps_a_call_with_on_disconnect_cancel_alive(make, up):
    semel = make(routes={"/v1/chat/completions": {"on_disconnect": "cancel"}}).start()
    up.on("long", upstream.stream(events=150, gap=0.01))
    first = semel.open_chat("k", model="long", stream=True)
    first.read_events(5)
    joiner = semel.open_chat("k", model="long", stream=True)
    joiner.read_events(5)
    first.close()
    rest = joiner.rest()
    assert rest.whole and rest.body == up.paid()[0].visible and len(up.paid()) == 1


def test_the_answer_carries_the_streams_own_headers(semel, up):
    up.on("headers", upstream.stream(headers=[("X-Request-Id", "req_s"), ("Cache-Control", "no-cache")]))
    first, replay = (semel.chat("k", model="headers", stream=True) for _ in range(2))
    for answer in (first, replay):
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["x-request-id"] == "req_s"
        assert "transfer-encoding" in answer.headers or "content-length" in answer.headers


def test_many_streams_at_once_do_not_mix(semel, up):
    up.default = upstream.stream(events=30, gap=0.005)
    answers = together(60, lambda i: semel.chat(f"k{i % 20}", f"text {i % 20}", stream=True))
    assert len(up.paid()) == 20
    by_key = {}
    for i, a in enumerate(answers):
        assert a.whole
        by_key.setdefault(i % 20, set()).add(a.body)
    assert all(len(bodies) == 1 for bodies in by_key.values())
    assert {b for bodies in by_key.values() for b in bodies} == {c.visible for c in up.paid()}


def test_an_http_1_0_client_gets_the_stream_and_a_close(semel, up):
    e = semel.raw(b"POST /v1/chat/completions HTTP/1.0\r\nHost: 127.0.0.1\r\nAuthorization: Bearer x\r\nIdempotency-Key: k\r\n"
                  b"Content-Type: application/json\r\nContent-Length: 45\r\n\r\n"
                  b'{"model":"fast","stream":true,"messages":[]} ', timeout=15)
    answer = e.rest()
    assert answer.status == 200 and answer.body == up.paid()[0].visible
    assert "transfer-encoding" not in answer.headers
