"""Everything else under /v1/: as if the gateway were not there."""
import gzip
import hashlib
import threading
import time

import pytest

import upstream
from harness import Lost, eventually, format_request

PIECE = bytes(range(256)) * 4096  # 1 MiB


def test_models_and_the_query_pass_untouched(semel, up):
    answer = semel.ask("GET", "/v1/models?limit=2&after=a%2Fb&x=%20y+z&empty=&flag")
    assert answer.json["data"][0]["id"] == "gpt-4o-mini"
    assert up.calls[0].target == "/v1/models?limit=2&after=a%2Fb&x=%20y+z&empty=&flag"


@pytest.mark.parametrize("method", ["GET", "DELETE", "PUT", "PATCH", "OPTIONS"])
def test_every_method_passes(semel, up, method):
    body = b'{"a":1}' if method in ("PUT", "PATCH") else None
    semel.ask(method, "/v1/fine_tuning/jobs/j1", body)
    assert (up.calls[0].method, up.calls[0].path, up.calls[0].body) == (method, "/v1/fine_tuning/jobs/j1", body or b"")


def test_head_passes_and_has_no_body(semel, up):
    e = semel.open("HEAD", "/v1/models", timeout=10)
    e.read_head()
    assert e.status == 200 and e._in == b"" and up.calls[0].method == "HEAD"


def test_end_to_end_headers_pass_both_ways_and_hop_by_hop_ones_do_not(semel, up):
    up.at("/v1/models", lambda call, reply: reply.json(200, {}, [
        ("X-Odd", "a, b;c=\"d\""), ("x-lower", "1"), ("Set-Cookie", "a=1; Path=/"), ("Set-Cookie", "b=2"), ("ETag", '"v1"'),
        ("Keep-Alive", "timeout=5"), ("Connection", "X-Hop"), ("X-Hop", "1"), ("OpenAI-Version", "2020-10-01")]))
    answer = semel.ask("GET", "/v1/models", headers={"X-Custom": "a  b", "OpenAI-Beta": "assistants=v2", "Cookie": "c=d",
                                                    "If-None-Match": '"v0"', "Connection": "keep-alive, X-Mine", "X-Mine": "hop",
                                                    "Proxy-Authorization": "Basic eHk6eg==", "TE": "trailers"})
    sent = up.calls[0]
    assert (sent.header("x-custom"), sent.header("openai-beta"), sent.header("cookie")) == ("a  b", "assistants=v2", "c=d")
    assert sent.header("if-none-match") == '"v0"' and sent.header("authorization") == "Bearer sk-test-credential"
    assert sent.header("host") == f"127.0.0.1:{up.port}"
    for name in ("x-mine", "proxy-authorization"):
        assert sent.header(name) is None, name
    assert answer.headers["x-odd"] == 'a, b;c="d"' and answer.headers["x-lower"] == "1" and answer.headers["etag"] == '"v1"'
    assert b"a=1; Path=/" in answer.head and b"b=2" in answer.head and answer.headers["openai-version"] == "2020-10-01"
    for name in ("x-hop", "keep-alive"):
        assert name not in answer.headers, name


def test_gzip_passes_as_it_is(semel, up):
    packed = gzip.compress(b'{"object":"list"}' * 100)
    up.at("/v1/models", lambda call, reply: reply.answer(200, packed, headers=[("Content-Encoding", "gzip")]))
    answer = semel.ask("GET", "/v1/models", headers={"Accept-Encoding": "gzip, br"})
    assert answer.body == packed and answer.headers["content-encoding"] == "gzip"
    assert up.calls[0].header("accept-encoding") == "gzip, br"


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/responses", "/v1/images/generations", "/v1/files"])
def test_a_keyed_post_on_an_unprotected_route_passes_and_is_counted(semel, up, path):
    answers = [semel.ask("POST", path, {"model": "fast", "input": "x"}, {"Idempotency-Key": "k"}) for _ in range(2)]
    assert [a.status for a in answers] == [200, 200] and len(up.paid()) == 2
    assert "semel-outcome" not in answers[0].headers
    assert semel.metric("semel_unprotected_total") == 2


@pytest.mark.parametrize("status", [201, 204, 206, 301, 304, 400, 404, 409, 418, 429, 500, 503])
def test_every_status_passes(semel, up, status):
    def run(call, reply):
        if status in (204, 304):
            reply.head(status, [("ETag", '"1"')])
        else:
            reply.answer(status, b"body", "text/plain", [("Location", "https://elsewhere.example/x"), ("Retry-After", "120")])
    up.at("/v1/things", run)
    answer = semel.ask("GET", "/v1/things")
    assert answer.status == status and answer.whole
    if status not in (204, 304):
        assert (answer.body, answer.headers["location"], answer.headers["retry-after"]) == (b"body", "https://elsewhere.example/x", "120")
    assert semel.ask("GET", "/v1/models").status == 200


@pytest.mark.parametrize("path", ["/", "/v2/models", "/admin/records", "/metrics", "/healthz"])
def test_what_is_not_under_v1_is_not_passed(semel, up, path):
    assert semel.ask("GET", path).status in (400, 404)
    assert up.calls == []


@pytest.mark.parametrize("path", ["/v1/../admin/records", "/v1/./../x", "/v1/%2e%2e/x", "/v1/models/../../x"])
def test_a_path_that_climbs_out_of_v1_is_not_passed(semel, up, path):
    """With a base URL that has a path, or an upstream key, it would reach what the operator did not open."""
    assert semel.ask("GET", path).status in (400, 404)
    assert up.calls == []


def test_a_streamed_answer_passes_as_it_comes(semel, up):
    gate = upstream.Gate()

    def run(call, reply):
        reply.head(200, [("Content-Type", "text/event-stream"), ("Transfer-Encoding", "chunked")])
        reply.chunk(b"event: a\ndata: 1\n\n")
        gate.wait()
        reply.chunk(b"event: b\ndata: 2\n\n")
        reply.end()
    up.at("/v1/responses", run)
    e = semel.open("POST", "/v1/responses", {"model": "fast", "stream": True}, timeout=15)
    assert e.read_events(1) == b"event: a\ndata: 1\n\n"
    gate.open()
    assert e.rest().body == b"event: a\ndata: 1\n\nevent: b\ndata: 2\n\n"


def test_a_streamed_upload_arrives_while_it_is_sent(semel, up):
    arrived = threading.Event()
    read_body = up._read_body

    def watch(call, source):
        arrived.set()
        read_body(call, source)
    up._read_body = watch
    head = format_request(semel.port, "POST", "/v1/files", None, {"Transfer-Encoding": "chunked", "Content-Type": "application/octet-stream"})
    e = semel.raw(head + b"5\r\nhello\r\n", timeout=15)
    assert arrived.wait(10), "the upstream sees the request before its end"
    e.send(b"6\r\n world\r\n0\r\n\r\n")
    assert e.rest().status == 200 and up.paid()[0].body == b"hello world"


def test_an_answer_cut_by_the_upstream_is_visibly_cut(semel, up):
    def run(call, reply):
        reply.head(200, [("Content-Type", "application/octet-stream"), ("Content-Length", "1000")])
        reply.bytes(b"x" * 100)
        reply.close()
    up.at("/v1/files/f/content", run)
    try:
        answer = semel.ask("GET", "/v1/files/f/content")
        assert not answer.whole and (answer.body == b"x" * 100 or answer.body == b"")
    except Lost:
        pass


def test_a_download_that_its_client_leaves_ends_upstream_too(semel, up):
    def run(call, reply):
        reply.head(200, [("Content-Type", "application/octet-stream"), ("Transfer-Encoding", "chunked")])
        for _ in range(3000):
            reply.chunk(PIECE)
    up.at("/v1/files/f/content", run)
    e = semel.open("GET", "/v1/files/f/content")
    for _ in range(5):
        e.read_some()
    e.reset()
    eventually(lambda: up.calls[0].client_left, seconds=20, what="the upstream saw its client leave")


def test_an_upload_that_breaks_off_does_not_look_whole_upstream(semel, up):
    e = semel.raw(format_request(semel.port, "POST", "/v1/files", None, {"Content-Length": "1000000", "Content-Type": "application/octet-stream"})
                  + b"x" * 1000)
    eventually(lambda: up.connections >= 1)
    e.close()
    eventually(lambda: not up.calls or not up.calls[0].complete)
    time.sleep(0.3)
    assert all(not c.complete for c in up.calls)


def test_early_answers_to_an_upload_reach_the_client(semel, up):
    """The upstream refuses by the head alone and closes."""
    def refuse(call, source):
        call.complete = False
    up._read_body = refuse
    up.at("/v1/files", lambda call, reply: (reply.json(413, {"error": {"message": "too large"}}, [("Connection", "close")]), reply.close()))
    e = semel.raw(format_request(semel.port, "POST", "/v1/files", None, {"Content-Length": "50000000", "Content-Type": "a/b"}), timeout=20)
    try:
        for _ in range(50):
            e.send(PIECE[:1 << 20])
    except OSError:
        pass
    try:
        assert e.rest().status in (413, 502)
    except Lost:
        pass  # our unread upload made it a reset


@pytest.mark.slow
def test_a_500_mb_upload_passes_with_a_flat_resident_set(semel, up):
    assert semel.ask("GET", "/v1/models").status == 200
    before = semel.rss_kib
    size = 500 * len(PIECE)
    e = semel.raw(format_request(semel.port, "POST", "/v1/files", None, {"Content-Length": str(size), "Content-Type": "application/octet-stream"}),
                  timeout=120)
    digest = hashlib.sha256()
    peak = 0
    for i in range(500):
        e.send(PIECE)
        digest.update(PIECE)
        if i % 25 == 0:
            peak = max(peak, semel.rss_kib)
    assert e.rest().status == 200
    call = up.paid()[0]
    assert call.length == size and call.sha256 == digest.hexdigest()
    assert peak - before < 40_000, f"{peak - before} KiB more than before, of 512,000 KiB passed"


@pytest.mark.slow
def test_a_300_mb_download_to_a_slow_reader_passes_with_a_flat_resident_set(semel, up):
    pieces = 300

    def run(call, reply):
        reply.head(200, [("Content-Type", "application/octet-stream"), ("Content-Length", str(pieces * len(PIECE)))])
        for _ in range(pieces):
            reply.bytes(PIECE)
    up.at("/v1/files/f/content", run)
    assert semel.ask("GET", "/v1/models").status == 200
    before = semel.rss_kib
    e = semel.open("GET", "/v1/files/f/content", timeout=60)
    digest, peak, total = hashlib.sha256(), 0, 0
    time.sleep(1)  # reads nothing: the gateway must not take it all
    while piece := e.read_some():
        e.body = b""
        digest.update(piece)
        total += len(piece)
        if total % 7 == 0:
            peak = max(peak, semel.rss_kib)
    expected = hashlib.sha256()
    for _ in range(pieces):
        expected.update(PIECE)
    assert e.whole and total == pieces * len(PIECE) and digest.digest() == expected.digest()
    assert max(peak, semel.rss_peak_kib) - before < 40_000
