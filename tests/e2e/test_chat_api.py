"""/api/chat: shapes of every answer, turns in order and each once, ids that are gone."""
import json
import time

import pytest

import upstream
from harness import SHORT, background, eventually
from upstream import Gate


def messages(semel, session="s1", user="u1", query=""):
    answer = semel.ask("GET", f"/api/chat/sessions/{session}/messages{query}", headers={"X-User-Id": user})
    assert answer.status == 200, answer
    assert set(answer.json) == {"messages", "next"}
    return answer.json["messages"]


def session_of(semel, session="s1", user="u1"):
    return semel.ask("GET", f"/api/chat/sessions/{session}", headers={"X-User-Id": user})


def assert_problem(answer, status, slug, state=None, request_id=None):
    assert answer.status == status, answer
    assert answer.headers["content-type"].startswith("application/problem+json")
    problem = answer.json
    assert problem["status"] == status and problem["title"] and problem["detail"] and problem["message"]
    assert answer.code == slug, problem
    if state:
        assert problem["state"] == state
    if request_id:
        assert problem["requestId"] == request_id
    return problem


def events_of(body):
    """[(event name, parsed data)] of an SSE body."""
    found = []
    for block in body.decode().split("\n\n"):
        lines = [l for l in block.split("\n") if l and not l.startswith(":")]
        if lines:
            fields = dict(l.split(": ", 1) for l in lines)
            found.append((fields["event"], json.loads(fields["data"])))
    return found


def sent_messages(call):
    return [(m["role"], m["content"]) for m in call.json["messages"]]


def test_an_answer_has_the_whole_shape(semel, up):
    up.on("fast", upstream.plain("Hello é中🙂"))
    answer = semel.say("r1", "hi there")
    assert answer.status == 200 and answer.headers["content-type"].startswith("application/json")
    assert answer.json == {"requestId": "r1", "status": "COMPLETED", "content": "Hello é中🙂", "fromCache": False, "model": "fast",
                           "usage": {"inputTokens": 11, "outputTokens": 7}, "attempt": 1}
    assert answer.replayed == "false" and answer.headers["cache-control"] == "no-store"
    call, = up.paid()
    assert call.path == "/v1/chat/completions" and call.model == "fast" and sent_messages(call)[-1] == ("user", "hi there")


def test_a_replay_differs_only_in_from_cache(semel, up):
    first, again = semel.say("r1"), semel.say("r1")
    assert again.json == {**first.json, "fromCache": True}
    assert again.replayed == "true" and again.headers["idempotent-replayed"] == "true" and len(up.paid()) == 1


def test_the_id_may_come_as_idempotency_key_which_wins_over_the_request_id(semel, up):
    semel.say("r1")
    again = semel.ask("POST", "/api/chat", {"content": "hi", "sessionId": "s1"},
                      {"Idempotency-Key": "r1", "X-Request-Id": "made-by-a-proxy", "X-User-Id": "u1"})
    assert again.replayed == "true" and again.json["requestId"] == "r1" and len(up.paid()) == 1


def test_without_an_id_it_is_400(semel, up):
    refused = semel.ask("POST", "/api/chat", {"content": "hi", "sessionId": "s1"}, {"X-User-Id": "u1"})
    assert_problem(refused, 400, "key-missing")
    assert up.calls == []


@pytest.mark.parametrize("body", [b"{", b"[]", b'{"sessionId":"s1"}', b'{"content":7,"sessionId":"s1"}', b'{"content":"hi"}',
                                  b'{"content":"hi","sessionId":7}', b'{"content":"\xff","sessionId":"s1"}', b"",
                                  b'{"content":"hi","sessionId":""}', b'{"content":"hi","sessionId":"' + b"x" * 300 + b'"}'],
                         ids=["cut", "array", "no content", "content a number", "no session", "session a number", "not utf-8",
                              "empty", "empty session", "long session"])
def test_a_body_of_the_wrong_shape_is_400_and_claims_nothing(semel, up, body):
    refused = semel.ask("POST", "/api/chat", body, {"X-Request-Id": "r1", "X-User-Id": "u1"})
    assert refused.status == 400 and refused.headers["content-type"].startswith("application/problem+json")
    assert refused.json["status"] == 400 and refused.json["detail"]
    assert up.calls == [] and semel.say("r1").json["attempt"] == 1


def test_a_duplicate_in_flight_gets_202_with_where_to_look(semel, up):
    gate = Gate()
    up.on("fast", upstream.plain(gate=gate))
    first = background(semel.say, "r1")
    gate.wait_until_entered()
    running = semel.say("r1", timeout=10)
    assert running.status == 202
    assert set(running.json) >= {"requestId", "status", "message"}
    assert (running.json["requestId"], running.json["status"]) == ("r1", "PROCESSING") and running.json["message"]
    assert int(running.headers["retry-after"]) >= 1
    assert semel.status_of("r1").json["status"] == "PROCESSING"
    location = running.headers["location"]
    assert location.startswith("/") or location.startswith("http://")
    gate.open()
    assert first.result(20).json["status"] == "COMPLETED"
    path = "/" + location.split("/", 3)[3] if location.startswith("http") else location
    assert semel.ask("GET", path, headers={"X-User-Id": "u1"}).json["status"] == "COMPLETED"
    assert len(up.paid()) == 1


def test_with_on_running_join_a_duplicate_waits_and_gets_the_answer(make, up):
    semel = make(routes={"/api/chat": {"on_running": "join"}}).start()
    gate = Gate()
    up.on("fast", upstream.plain(gate=gate))
    first = background(semel.say, "r1")
    gate.wait_until_entered()
    second = background(semel.say, "r1")
    eventually(lambda: semel.metric("semel_joiners") >= 1)
    gate.open()
    joined = second.result(20)
    assert joined.json == {**first.result(20).json, "fromCache": True} and joined.replayed == "true" and len(up.paid()) == 1


def test_another_content_session_or_model_under_the_id(semel, up):
    semel.say("r1", "hi")
    refused = semel.say("r1", "other")
    problem = assert_problem(refused, 422, "key-reused", request_id="r1")
    assert problem["differs"] == ["content"] and refused.headers["x-should-retry"] == "false"
    assert_problem(semel.say("r1", "hi", model="another"), 422, "key-reused")
    assert semel.say("r1", "hi", session="s2").json["fromCache"] is False, "the session is part of the key"
    assert len(up.paid()) == 2


def test_a_changed_default_model_is_no_other_request(semel, up):
    first = semel.say("r1")
    semel.stop()
    semel.config["routes"]["/api/chat"]["model"] = "newer"
    semel.write_config()
    semel.start()
    assert semel.say("r1").json["content"] == first.json["content"] and len(up.paid()) == 1
    assert semel.say("r2").json["model"] == "newer"


def test_a_stream_tells_deltas_and_then_done(semel, up):
    up.on("fast", upstream.stream(events=4))
    answer = semel.say("r1", stream=True)
    assert answer.whole and answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.body)
    assert [name for name, _ in events] == ["delta"] * 4 + ["done"]
    text = "".join(data["content"] for name, data in events if name == "delta")
    assert text == "".join(f"call1 w{i} é中🙂 " for i in range(4))
    assert events[-1][1] == {"requestId": "r1", "status": "COMPLETED", "content": text, "fromCache": False, "model": "fast",
                             "usage": {"inputTokens": 11, "outputTokens": 4}, "attempt": 1}


def test_a_replayed_stream_is_the_same_bytes_but_for_from_cache(semel, up):
    up.on("fast", upstream.stream(events=4))
    first, again = semel.say("r1", stream=True), semel.say("r1", stream=True)
    assert again.body == first.body.replace(b'"fromCache":false', b'"fromCache":true').replace(b'"fromCache": false', b'"fromCache": true')
    assert again.body != first.body and again.replayed == "true" and len(up.paid()) == 1


def test_a_stream_cut_upstream_ends_with_an_error_event_and_runs_again(semel, up):
    up.on("fast", upstream.in_turn(upstream.broken_stream(3, "cut"), upstream.stream(2)))
    events = events_of(semel.say("r1", stream=True).body)
    assert [n for n, _ in events] == ["delta"] * 3 + ["error"]
    assert events[-1][1]["requestId"] == "r1" and events[-1][1]["status"] in (502, 504) and events[-1][1]["message"]
    assert events_of(semel.say("r1", stream=True).body)[-1][0] == "done" and len(up.paid()) == 2
    assert [m["requestId"] for m in messages(semel)] == ["r1", "r1"]


@pytest.mark.parametrize("status, passed", [(400, 400), (413, 413), (422, 422), (429, 429), (503, 503), (529, 529),
                                            (401, 502), (404, 502), (500, 502), (504, 502)])
def test_upstream_errors_become_problems(semel, up, status, passed):
    up.on("fast", upstream.in_turn(upstream.error(status, headers=[("Retry-After", "7")]), upstream.plain()))
    refused = semel.say("r1")
    assert refused.status == passed
    assert refused.headers["content-type"].startswith("application/problem+json")
    assert refused.json["status"] == passed and refused.json["requestId"] == "r1" and refused.json["message"]
    assert refused.json["state"] == "FAILED"
    if passed == status and status in (429, 503, 529):
        assert refused.headers["retry-after"] == "7"
    failed = semel.status_of("r1")
    assert failed.status == 200 and failed.json["status"] == "FAILED" and failed.json["errorMessage"]
    assert semel.say("r1").json["attempt"] == 2


def test_an_upstream_that_takes_too_long_is_504(make, up):
    semel = make(upstream_options={"first_byte_timeout": "500ms"}).start()
    gate = Gate()
    up.on("fast", upstream.plain(gate=gate))
    assert semel.say("r1").status == 504
    gate.open()


def test_every_status_has_its_shape(make, up):
    semel = make(routes={"/api/chat": {"on_unknown": "hold"}}).start()
    done = semel.say("done").json
    status = semel.status_of("done")
    assert status.status == 200
    assert {k: status.json[k] for k in ("requestId", "status", "content", "model", "usage", "attempt")} == \
        {k: done[k] for k in ("requestId", "status", "content", "model", "usage", "attempt")}
    up.on("fast", upstream.error(500))
    semel.say("lost")
    unknown = semel.status_of("lost")
    assert unknown.status == 200 and unknown.json["status"] == "UNKNOWN" and unknown.json["requestId"] == "lost"
    held = semel.say("lost")
    assert_problem(held, 409, "outcome-unknown", "UNKNOWN", "lost")
    assert held.headers["x-should-retry"] == "false"
    up.on("fast", upstream.error(400))
    semel.say("failed")
    failed = semel.status_of("failed").json
    assert (failed["requestId"], failed["status"]) == ("failed", "FAILED") and failed["errorMessage"]
    for request_id, session, user in (("nope", "s1", "u1"), ("done", "s2", "u1"), ("done", "s1", "u2"), ("done", "s1", "")):
        assert semel.status_of(request_id, session, user).status == 404


def test_a_purged_status_is_404_like_an_unknown_one(make, up):
    semel = make(engine=SHORT).start()
    semel.say("r1")
    unknown = semel.status_of("never")
    eventually(lambda: semel.status_of("r1").status == 404, what="retention passed")
    gone = semel.status_of("r1")
    assert gone.json.keys() == unknown.json.keys()


def test_the_conversation_goes_along_and_is_listed_in_order(semel, up):
    for n in (1, 2, 3):
        assert semel.say(f"r{n}", f"question {n}").status == 200
    assert sent_messages(up.paid()[2]) == [
        ("user", "question 1"), ("assistant", "answer of call 1 é中🙂"), ("user", "question 2"),
        ("assistant", "answer of call 2 é中🙂"), ("user", "question 3")]
    listed = messages(semel)
    assert [(m["requestId"], m["role"]) for m in listed] == [(f"r{n}", r) for n in (1, 2, 3) for r in ("user", "assistant")]
    assert [m["content"] for m in listed][:2] == ["question 1", "answer of call 1 é中🙂"]
    assert all(m["at"] for m in listed)
    summary = session_of(semel)
    assert summary.status == 200 and set(summary.json) == {"sessionId", "createdAt", "lastUsedAt", "turns"}
    assert summary.json["sessionId"] == "s1" and summary.json["turns"] == 3
    assert summary.json["createdAt"] <= summary.json["lastUsedAt"]


def test_messages_come_in_pages(semel):
    for n in range(5):
        semel.say(f"r{n}", f"q{n}")
    seen, query = [], "?limit=4"
    for _ in range(10):
        page = semel.ask("GET", f"/api/chat/sessions/s1/messages{query}", headers={"X-User-Id": "u1"}).json
        assert len(page["messages"]) <= 4
        seen += [(m["requestId"], m["role"]) for m in page["messages"]]
        if not page["next"]:
            break
        query = f"?limit=4&after={page['next']}"
    assert seen == [(f"r{n}", role) for n in range(5) for role in ("user", "assistant")]


def test_a_replayed_turn_is_not_added_again(semel):
    for _ in range(3):
        semel.say("r1")
    assert session_of(semel).json["turns"] == 1 and len(messages(semel)) == 2


def test_a_failed_turn_leaves_nothing_in_the_conversation_and_frees_the_session(semel, up):
    up.on("fast", upstream.in_turn(upstream.error(500), upstream.plain()))
    assert semel.say("r1", "bad").status == 502
    assert semel.say("r2", "good").status == 200
    assert sent_messages(up.paid()[1]) == [("user", "good")]
    assert [m["requestId"] for m in messages(semel)] == ["r2", "r2"]


def test_a_turn_held_unknown_leaves_nothing_and_frees_the_session(make, up):
    semel = make(routes={"/api/chat": {"on_unknown": "hold"}}).start()
    up.on("fast", upstream.in_turn(upstream.error(500), upstream.plain()))
    semel.say("r1", "bad")
    assert semel.status_of("r1").json["status"] == "UNKNOWN"
    assert semel.say("r2", "good", timeout=10).status == 200
    assert [m["requestId"] for m in messages(semel)] == ["r2", "r2"] and len(up.paid()) == 2


def test_two_turns_of_one_session_at_once_run_one_after_the_other(semel, up):
    gate = Gate()
    up.on("fast", upstream.in_turn(upstream.plain(gate=gate), upstream.plain()))
    first = background(semel.say, "r1", "one")
    gate.wait_until_entered()
    second = background(semel.say, "r2", "two")
    time.sleep(0.5)
    assert len(up.paid()) == 1, "the second waits for the first"
    gate.open()
    assert first.result(20).status == second.result(20).status == 200
    assert sent_messages(up.paid()[1]) == [("user", "one"), ("assistant", "answer of call 1 é中🙂"), ("user", "two")]
    assert [m["requestId"] for m in messages(semel)] == ["r1", "r1", "r2", "r2"]


def test_turns_of_different_sessions_do_not_wait_for_each_other(semel, up):
    gate = Gate()
    up.on("fast", upstream.in_turn(upstream.plain(gate=gate), upstream.plain()))
    first = background(semel.say, "r1", session="s1")
    gate.wait_until_entered()
    assert semel.say("r2", session="s2", timeout=10).status == 200
    assert semel.say("r2", session="s1", user="u2", timeout=10).status == 200
    gate.open()
    assert first.result(20).status == 200


def test_a_turn_that_waited_too_long_is_409_and_claimed_nothing(make, up):
    semel = make(routes={"/api/chat": {"join_timeout": "1s"}}).start()
    gate = Gate()
    up.on("fast", upstream.in_turn(upstream.plain(gate=gate), upstream.plain()))
    first = background(semel.say, "r1", "one")
    gate.wait_until_entered()
    refused = semel.say("r2", "two", timeout=15)
    assert_problem(refused, 409, "in-flight", request_id="r2")
    assert int(refused.headers["retry-after"]) >= 1
    assert semel.status_of("r2").status == 404, "nothing was claimed"
    gate.open()
    assert first.result(20).status == 200
    # Not claimed: even another content under the id is no mismatch.
    assert semel.say("r2", "two, rephrased").json["attempt"] == 1


def test_many_turns_at_once_are_each_there_once_in_one_order(semel, up):
    calls = [background(semel.say, f"r{n % 6}", f"q{n % 6}") for n in range(18)]
    assert {c.result(60).status for c in calls} <= {200, 202}
    eventually(lambda: session_of(semel).json["turns"] == 6, what="six turns")
    assert len(up.paid()) == 6
    ids = [m["requestId"] for m in messages(semel)]
    assert sorted(ids) == sorted([f"r{n}" for n in range(6)] * 2) and ids[0::2] == ids[1::2]


@pytest.mark.parametrize("restart", [False, True], ids=["running", "restarted"])
def test_an_id_whose_record_is_gone_makes_no_second_turn_while_the_session_lives(make, up, restart):
    semel = make(engine=SHORT).start()
    semel.say("r1", "one")
    eventually(lambda: semel.status_of("r1").status == 404, what="retention passed")
    if restart:
        semel.kill()
        semel.start()
    refused = semel.say("r1", "one")
    assert_problem(refused, 409, "expired", request_id="r1")
    assert refused.headers["x-should-retry"] == "false"
    assert len(up.paid()) == 1 and session_of(semel).json["turns"] == 1
    assert semel.say("r2", "two").status == 200


def test_a_session_can_be_deleted_when_no_turn_runs(semel, up):
    gate = Gate()
    up.on("fast", upstream.in_turn(upstream.plain(), upstream.plain(gate=gate)))
    semel.say("r1")
    second = background(semel.say, "r2")
    gate.wait_until_entered()
    assert_problem(semel.ask("DELETE", "/api/chat/sessions/s1", headers={"X-User-Id": "u1"}), 409, "in-flight")
    gate.open()
    assert second.result(20).status == 200
    assert semel.ask("DELETE", "/api/chat/sessions/s1", headers={"X-User-Id": "u2"}).status == 404
    assert semel.ask("DELETE", "/api/chat/sessions/s1", headers={"X-User-Id": "u1"}).status == 204
    assert session_of(semel).status == 404
    assert semel.ask("DELETE", "/api/chat/sessions/s1", headers={"X-User-Id": "u1"}).status == 404


def test_a_session_survives_a_kill(semel, up):
    semel.say("r1", "one")
    semel.kill()
    semel.start()
    assert semel.say("r2", "two").status == 200
    assert sent_messages(up.paid()[1])[:2] == [("user", "one"), ("assistant", "answer of call 1 é中🙂")]
    assert session_of(semel).json["turns"] == 2


def test_sessions_separate_users_with_odd_names(semel, up):
    """Parts of a key may hold what others use to join them."""
    parts = [("a:b", "c", "d"), ("a", "b:c", "d"), ("a", "b", "c:d"), ("a/b", "c", "d"), ("a", "b/c", "d"), ("a|b", "c", "d")]
    for user, session, request_id in parts:
        answer = semel.say(request_id, "same", session=session, user=user)
        assert answer.status == 200 and answer.json["fromCache"] is False, (user, session, request_id)
    assert len(up.paid()) == len(parts)


def test_a_client_gone_finds_its_answer_by_status(semel, up):
    gate = Gate()
    up.on("fast", upstream.plain("the answer", gate=gate))
    e = semel.open("POST", "/api/chat", {"content": "hi", "sessionId": "s1"}, {"X-Request-Id": "r1", "X-User-Id": "u1"})
    gate.wait_until_entered()
    e.close()
    gate.open()
    done = eventually(lambda: (s := semel.status_of("r1")).json["status"] == "COMPLETED" and s)
    assert done.json["content"] == "the answer" and len(up.paid()) == 1


def test_a_dead_owner_is_settled_by_asking(make, up):
    semel = make().start(fault="gateway.call.sent=kill")
    with pytest.raises(Exception):
        semel.say("r1")
    semel.wait_dead()
    semel.start()
    settled = eventually(lambda: (s := semel.status_of("r1")).json["status"] == "FAILED" and s, what="FAILED")
    assert settled.json["errorMessage"]
    assert semel.say("r1").json["attempt"] == 2


@pytest.mark.parametrize("method, path", [("PUT", "/api/chat"), ("GET", "/api/chat"), ("GET", "/api/chat/nothing"),
                                          ("POST", "/api/chat/sessions/s1"), ("GET", "/api/other")])
def test_what_is_no_route_is_404_or_405_and_never_goes_upstream(semel, up, method, path):
    assert semel.ask(method, path, {"content": "x", "sessionId": "s"} if method != "GET" else None,
                     {"X-Request-Id": "r1"}).status in (404, 405)
    assert up.calls == []
