"""The same id many times: one paid call, equal answers; another request under the id: refused at once."""
import re
import time

import pytest

import upstream
from harness import SHORT, background, chat_body, eventually, together
from upstream import Gate


def problem_of(answer):
    """The members of an error in the OpenAI shape."""
    error = answer.json["error"]
    assert set(error) >= {"message", "type", "param", "code"}, error
    return error


def test_two_hundred_duplicates_released_together_make_one_paid_call(semel, up):
    up.on("slow", upstream.plain(delay=1.0))
    answers = together(200, lambda i: semel.chat("click-1", "once", model="slow"))
    assert len(up.paid()) == 1
    assert {(a.status, a.body, a.whole) for a in answers} == {(200, answers[0].body, True)}
    outcomes = sorted(a.outcome for a in answers)
    assert outcomes.count("executed") == 1
    assert set(outcomes) <= {"executed", "joined", "replayed"}
    assert all(a.replayed == ("false" if a.outcome == "executed" else "true") for a in answers)
    assert all(a.headers["content-type"] == "application/json" for a in answers)


def test_two_hundred_streaming_duplicates_released_together_make_one_paid_call(semel, up):
    up.on("slow", upstream.stream(events=30, gap=0.05))
    answers = together(200, lambda i: semel.chat("click-1", "once", model="slow", stream=True))
    call, = up.paid()
    assert {(a.status, a.body, a.whole) for a in answers} == {(200, call.visible, True)}
    assert call.visible.endswith(b"data: [DONE]\n\n")


def test_the_first_answer_says_executed_and_the_second_replayed(semel, up):
    first, second = semel.chat("click-1"), semel.chat("click-1")
    assert first.body == second.body and len(up.paid()) == 1
    assert (first.outcome, first.replayed, first.headers.get("idempotent-replayed")) == ("executed", "false", None)
    assert (second.outcome, second.replayed, second.headers.get("idempotent-replayed")) == ("replayed", "true", "true")
    assert first.headers["semel-intent"] == second.headers["semel-intent"]
    for answer in (first, second):
        assert answer.attempt == 1
        assert answer.headers["idempotency-key"] == "click-1"
        assert answer.headers["cache-control"] == "no-store"


def test_a_duplicate_in_flight_is_marked_joined(semel, up):
    gate = Gate()
    up.on("held", upstream.plain(gate=gate))
    first = background(semel.chat, "click-1", model="held")
    gate.wait_until_entered()
    second = background(semel.chat, "click-1", model="held")
    eventually(lambda: semel.metric("semel_joiners") >= 1, what="a joiner in /metrics")
    gate.open()
    assert first.result(20).outcome == "executed"
    joined = second.result(20)
    assert (joined.outcome, joined.replayed, joined.headers["idempotent-replayed"]) == ("joined", "true", "true")
    assert joined.body == first.result(0).body and len(up.paid()) == 1


def test_the_same_text_under_two_ids_is_two_calls(semel, up):
    one, two = semel.chat("click-1", "same text"), semel.chat("click-2", "same text")
    assert len(up.paid("same text")) == 2
    assert one.body != two.body
    assert one.headers["semel-intent"] != two.headers["semel-intent"]


def test_the_key_goes_upstream_only_where_the_config_says_so(make, up):
    make().start().chat("click-dropped")
    make(upstream_options={"idempotency_key": "forward"}).start().chat("click-forwarded")
    dropped, forwarded = up.paid()
    assert dropped.header("idempotency-key") is None
    assert forwarded.header("idempotency-key")


OTHER_REQUESTS = {
    "text": (dict(text="PRIVATE-TEXT"), "messages"),
    "model": (dict(model="another"), "model"),
    "model of another upstream": (dict(model="elsewhere-1"), "model"),
    "stream": (dict(stream=True), "stream"),
    "a parameter": (dict(more={"temperature": 1}), "temperature"),
}


@pytest.mark.parametrize("change, field", OTHER_REQUESTS.values(), ids=OTHER_REQUESTS.keys())
@pytest.mark.parametrize("running", [False, True], ids=["done", "running"])
def test_another_request_under_the_same_id_is_refused_at_once(make, up, change, field, running):
    other = upstream.Upstream()
    semel = make()
    semel.config["upstreams"].insert(0, {**semel.config["upstreams"][0], "name": "other", "base_url": other.url,
                                         "models": ["elsewhere-*"]})
    semel.write_config()
    semel.start()
    gate = Gate()
    up.on("fast", upstream.plain(gate=gate))
    first = background(semel.chat, "click-1")
    gate.wait_until_entered()
    if not running:
        gate.open()
        first.result(20)
    refused = semel.chat("click-1", **{"text": "hi", **change}, timeout=10)  # a wait for the first would be a time-out here
    assert refused.status == 422
    assert refused.code == "key-reused"
    assert refused.headers["x-should-retry"] == "false"
    assert field in problem_of(refused)["message"]
    assert "PRIVATE-TEXT" not in problem_of(refused)["message"]
    gate.open()
    assert first.result(20).status == 200
    assert len(up.paid()) == 1 and other.calls == []
    assert semel.chat("click-1").body == first.result(0).body
    other.close()


def test_members_in_another_order_are_the_same_request(semel, up):
    a = b'{"model": "fast", "messages": [{"role": "user", "content": "x"}], "temperature": 1}'
    b = b'{"temperature":1,"messages":[{"content":"x","role":"user"}],"model":"fast"}'
    first = semel.ask("POST", "/v1/chat/completions", a, {"Idempotency-Key": "k"})
    second = semel.ask("POST", "/v1/chat/completions", b, {"Idempotency-Key": "k"})
    assert second.status == 200 and second.body == first.body and second.replayed == "true"
    assert len(up.paid()) == 1
    assert up.paid()[0].body == a or up.paid()[0].json["temperature"] == 1


@pytest.mark.parametrize("other", [b'{"model":"fast","messages":[],"n":1.0}', b'{"model":"fa\\u0073t","messages":[],"n":1}',
                                   b'{"model":"fast","messages":[],"n":1,"n":1}'],
                         ids=["number spelled otherwise", "string spelled otherwise", "duplicate member"])
def test_values_spelled_otherwise_are_another_request(semel, up, other):
    semel.ask("POST", "/v1/chat/completions", b'{"model":"fast","messages":[],"n":1}', {"Idempotency-Key": "k"})
    assert semel.ask("POST", "/v1/chat/completions", other, {"Idempotency-Key": "k"}).status == 422
    assert len(up.paid()) == 1


@pytest.mark.parametrize("header", ["OpenAI-Organization", "OpenAI-Project", "OpenAI-Beta"])
def test_a_header_that_changes_the_meaning_belongs_to_the_request(semel, up, header):
    assert semel.chat("k", headers={header: "a"}).status == 200
    assert semel.chat("k", headers={header: "a"}).replayed == "true"
    assert semel.chat("k", headers={header: "b"}).status == 422
    assert up.paid()[0].header(header) == "a" and len(up.paid()) == 1


def test_a_header_that_changes_nothing_does_not_make_another_request(semel, up):
    semel.chat("k", headers={"User-Agent": "a/1", "X-Stainless-Retry-Count": "0", "Traceparent": "00-1"})
    again = semel.chat("k", headers={"User-Agent": "b/2", "X-Stainless-Retry-Count": "1", "Traceparent": "00-2"})
    assert again.replayed == "true" and len(up.paid()) == 1


def test_the_quoted_form_of_a_key_is_the_same_key(semel, up):
    bare = semel.chat("8e03978e-40d5-43dd-bc93-6894a57f9324")
    quoted = semel.chat('"8e03978e-40d5-43dd-bc93-6894a57f9324"')
    assert quoted.replayed == "true" and quoted.body == bare.body and len(up.paid()) == 1


def test_two_equal_key_lines_count_as_one(semel, up):
    first = semel.ask("POST", "/v1/chat/completions", chat_body(), {"Idempotency-Key": ["k", "k"]})
    assert first.status == 200 and semel.chat("k").replayed == "true" and len(up.paid()) == 1


def test_keys_that_differ_only_in_case_are_two_intents(semel, up):
    assert semel.chat("Click").body != semel.chat("click").body
    assert len(up.paid()) == 2


def test_a_request_id_is_no_key_on_v1(semel, up):
    for _ in range(2):
        semel.chat(None, headers={"X-Request-Id": "from-a-proxy"})
    assert len(up.paid()) == 2


def test_keyless_calls_pass_through_and_are_counted(semel, up):
    answers = [semel.chat(None, "keyless") for _ in range(3)]
    assert len(up.paid("keyless")) == 3 and len({a.body for a in answers}) == 3
    assert semel.metric("semel_unprotected_total") == 3


def test_a_route_that_requires_a_key_answers_400_without_one(make, up):
    semel = make(routes={"/v1/chat/completions": {"key": "required"}}).start()
    refused = semel.chat(None)
    assert refused.status == 400 and refused.code == "key-missing"
    problem_of(refused)
    assert up.calls == []


def test_on_running_reject_answers_409_and_the_first_goes_on(make, up):
    semel = make(routes={"/v1/chat/completions": {"on_running": "reject"}}).start()
    gate = Gate()
    up.on("held", upstream.plain(gate=gate))
    first = background(semel.chat, "k", model="held")
    gate.wait_until_entered()
    refused = semel.chat("k", model="held")
    assert refused.status == 409 and refused.code == "in-flight"
    assert 1 <= int(refused.headers["retry-after"]) <= 8
    gate.open()
    assert first.result(20).status == 200
    assert semel.chat("k", model="held").replayed == "true" and len(up.paid()) == 1


def test_a_joiner_whose_patience_ends_gets_409_that_sdks_retry(make, up):
    semel = make(routes={"/v1/chat/completions": {"join_timeout": "1s"}}).start()
    gate = Gate()
    up.on("held", upstream.plain(gate=gate))
    first = background(semel.chat, "k", model="held")
    gate.wait_until_entered()
    refused = semel.chat("k", model="held", timeout=20)
    assert refused.status == 409 and refused.code == "in-flight"
    assert refused.headers["x-should-retry"] == "true"
    assert re.fullmatch("[1-8]", refused.headers["retry-after"])
    gate.open()
    assert first.result(20).outcome == "executed"
    assert semel.chat("k", model="held").body == first.result(0).body and len(up.paid()) == 1


def test_a_joiner_is_answered_before_its_own_read_timeout(semel, up):
    gate = Gate()
    up.on("held", upstream.plain(gate=gate))
    first = background(semel.chat, "k", model="held")
    gate.wait_until_entered()
    # 4 s: the answer has to come a quarter of that, 1 s, before. With no answer in 4 s the socket of this test times out.
    refused = semel.chat("k", model="held", headers={"X-Stainless-Read-Timeout": "4"}, timeout=4)
    assert refused.status == 409 and int(refused.headers["retry-after"]) >= 1
    gate.open()
    assert first.result(20).status == 200 and len(up.paid()) == 1


def test_a_failure_goes_to_all_who_joined_and_none_of_them_calls_again(semel, up):
    gate = Gate()
    up.on("held", upstream.in_turn(upstream.error(500, gate=gate), upstream.plain()))
    first = background(semel.chat, "k", model="held")
    gate.wait_until_entered()
    joined = [background(semel.chat, "k", model="held") for _ in range(20)]
    eventually(lambda: semel.metric("semel_joiners") >= 20, what="20 joiners")
    gate.open()
    answers = [f.result(20) for f in [first, *joined]]
    assert {(a.status, a.body) for a in answers} == {(500, answers[0].body)}
    assert len(up.paid()) == 1
    retry = semel.chat("k", model="held")
    assert retry.status == 200 and retry.attempt == 2 and len(up.paid()) == 2


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 429, 500, 503, 529])
def test_a_failure_is_passed_on_as_it_came_and_runs_again(semel, up, status):
    up.on("moody", upstream.in_turn(upstream.error(status, headers=[("Retry-After", "3"), ("X-Request-Id", "req_up")]),
                                    upstream.plain()))
    first = semel.chat("k", model="moody")
    assert first.status == status and b"the upstream says no" in first.body
    assert first.headers["retry-after"] == "3"
    assert first.headers["x-request-id"] == "req_up"
    second = semel.chat("k", model="moody")
    assert second.status == 200 and second.attempt == 2 and len(up.paid()) == 2
    assert semel.chat("k", model="moody").body == second.body and len(up.paid()) == 2


def test_only_failures_that_may_have_been_paid_are_counted_as_a_possible_second_payment(semel, up):
    for i, status in enumerate([400, 401, 429, 503, 529]):
        up.on("moody", upstream.in_turn(upstream.error(status), upstream.plain()))
        semel.chat(f"free-{i}", model="moody")
        assert semel.chat(f"free-{i}", model="moody").status == 200
    assert semel.metric("semel_paid_maybe_twice_total") == 0
    up.on("moody", upstream.in_turn(upstream.error(500), upstream.plain()))
    semel.chat("dear", model="moody")
    assert semel.chat("dear", model="moody").status == 200
    assert semel.metric("semel_paid_maybe_twice_total") == 1


def test_on_failed_replay_gives_the_upstreams_verdict_again(make, up):
    semel = make(routes={"/v1/chat/completions": {"on_failed": "replay"}}).start()
    up.on("verdict", upstream.error(400, headers=[("X-Request-Id", "req_1")]))
    first, second = semel.chat("k", model="verdict"), semel.chat("k", model="verdict")
    assert (second.status, second.body) == (400, first.body) and second.replayed == "true"
    assert second.headers["x-should-retry"] == "false"
    assert len(up.paid()) == 1
    up.on("busy", upstream.in_turn(upstream.error(429), upstream.plain()))
    assert semel.chat("k2", model="busy").status == 429
    assert semel.chat("k2", model="busy").status == 200


def test_max_paid_attempts_stops_reruns_and_free_failures_do_not_count(make, up):
    semel = make(routes={"/v1/chat/completions": {"max_paid_attempts": 2}}).start()
    up.on("bad", upstream.in_turn(upstream.error(429), upstream.error(503), upstream.error(500), upstream.error(500),
                                  upstream.plain()))
    assert [semel.chat("k", model="bad").status for _ in range(4)] == [429, 503, 500, 500]
    refused = semel.chat("k", model="bad")
    assert refused.status == 409 and refused.code == "attempts-used-up"
    assert refused.headers["x-should-retry"] == "false"
    assert len(up.paid()) == 4


def test_twenty_429_with_one_key_and_then_200(semel, up):
    up.on("busy", upstream.in_turn(*[upstream.error(429, headers=[("Retry-After", "1")])] * 20, upstream.plain()))
    answers = [semel.chat("k", model="busy") for _ in range(21)]
    assert [a.status for a in answers] == [429] * 20 + [200]
    assert answers[-1].attempt == 21
    assert semel.chat("k", model="busy").body == answers[-1].body and len(up.paid()) == 21
    assert semel.metric("semel_paid_maybe_twice_total") == 0


def test_mode_off_and_observe_change_nothing(make, up):
    for mode in ("off", "observe"):
        semel = make(routes={"/v1/chat/completions": {"mode": mode}}).start()
        answers = [semel.chat("k", mode) for _ in range(2)]
        assert len(up.paid(mode)) == 2 and answers[0].body != answers[1].body
        assert up.paid(mode)[0].body == up.paid(mode)[1].body
        assert "semel-outcome" not in answers[0].headers
        semel.stop()


def test_a_record_ends_with_its_retention_and_the_id_is_free_again(make, up):
    semel = make(engine=SHORT).start()
    first = semel.chat("k")
    assert semel.chat("k").body == first.body
    time.sleep(3.5)  # nothing can be asked in between: every look would be a duplicate served
    anew = semel.chat("k", "another text, too")
    assert anew.status == 200 and anew.attempt == 1 and anew.outcome == "executed"
    assert anew.body != first.body and len(up.paid()) == 2


def test_a_replay_keeps_what_describes_the_answer_and_drops_what_belonged_to_one_connection(semel, up):
    kept = [("X-Request-Id", "req_abc"), ("OpenAI-Processing-Ms", "12"), ("Location", "/v1/things/1")]
    dropped = [("Set-Cookie", "session=of-the-first-caller"), ("X-RateLimit-Remaining-Requests", "7"),
               ("Keep-Alive", "timeout=5"), ("Connection", "Foo"), ("Foo", "hop"), ("Proxy-Authenticate", "Basic")]
    up.on("headers", upstream.plain(headers=kept + dropped))
    first, replay = semel.chat("k", model="headers"), semel.chat("k", model="headers")
    assert first.headers["x-request-id"] == replay.headers["x-request-id"] == "req_abc"
    assert replay.headers["location"] == "/v1/things/1"
    for name in ("set-cookie", "x-ratelimit-remaining-requests"):
        assert name not in replay.headers, name
    for answer in (first, replay):
        for name in ("foo", "proxy-authenticate"):
            assert name not in answer.headers, name
        assert answer.headers.get("connection", "").lower() != "foo"


def test_a_duplicate_of_an_answer_without_json_is_equal_too(semel, up):
    blob = bytes(range(256)) * 64
    up.on("blob", lambda call, reply: reply.answer(200, blob, "application/octet-stream"))
    first, second = semel.chat("k", model="blob"), semel.chat("k", model="blob")
    assert first.body == blob
    if second.replayed == "true":
        assert second.body == blob and len(up.paid()) == 1
    else:  # not JSON, so not a full answer of this dialect: failed, run again
        assert second.body == blob and len(up.paid()) == 2


@pytest.mark.parametrize("body", [b"", b"{", b"[1,2", b"\xff\xfe{}", b'{"model":"fast","messages":"\xc3\x28"}', b"null",
                                  b'"text"', b'{"model":7}', b"[" * 2000 + b"]" * 2000],
                         ids=["empty", "open brace", "cut array", "not utf-8", "bad utf-8 in a string", "null", "a string",
                              "model is a number", "deep"])
def test_a_body_that_is_no_request_is_judged_by_the_upstream_and_never_crashes(semel, up, body):
    up.default = upstream.error(400, message="we could not parse the JSON body of your request")
    for _ in range(2):
        answer = semel.ask("POST", "/v1/chat/completions", body, {"Idempotency-Key": "k"})
        assert 400 <= answer.status < 500, answer
    assert all(c.body == body for c in up.paid())
    up.default = upstream.default_behaviour
    assert semel.chat("after").status == 200
