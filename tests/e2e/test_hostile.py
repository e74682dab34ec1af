"""Bytes that no good client sends, on raw sockets: refused, reflected nowhere, and never a second request for the upstream."""
import random
import re
import threading
import time

import pytest

import upstream
from harness import Exchange, Lost, chat_body, eventually, format_request, together

BODY = b'{"model":"fast","messages":[]}'


def request_with(lines, body=BODY, line=b"POST /v1/chat/completions HTTP/1.1", length=True, host=b"Host: 127.0.0.1\r\n"):
    head = line + b"\r\n" + host + b"Authorization: Bearer x\r\nContent-Type: application/json\r\n"
    if length:
        head += b"Content-Length: %d\r\n" % len(body)
    return head + lines + b"\r\n" + body


def answer_to(semel, data, timeout=15):
    e = semel.raw(data, timeout=timeout)
    return e.rest()


HOSTILE_KEYS = {
    "empty": b"", "spaces": b"   ", "256 characters": b"k" * 256, "8 KiB": b"k" * 8192,
    "a tab inside": b"a\tb", "a space inside": b"a b", "DEL": b"a\x7fb", "0xff": b"a\xffb", "utf-8": "schlüssel".encode(),
    "open quote": b'"abc', "quotes alone": b'""', "text after the quotes": b'"abc"def', "bad escape": b'"a\\nb"',
    "two quoted strings": b'"a", "b"', "comma list": b"a,b", "script": b"<script>alert(1)</script> x",
}


@pytest.mark.parametrize("key", HOSTILE_KEYS.values(), ids=HOSTILE_KEYS.keys())
def test_a_malformed_key_is_400_and_nothing_is_echoed_or_claimed(semel, up, key):
    refused = answer_to(semel, request_with(b"Idempotency-Key: " + key + b"\r\n"))
    assert refused.status == 400, refused
    assert refused.code in ("key-malformed", "malformed-request")
    if len(key.strip()) > 3:
        assert key.strip() not in refused.head + refused.body
    assert up.calls == []
    log = semel.said().encode()
    assert b"\x7f" not in log and b"\xff" not in log and b"<script>" not in log and b"k" * 200 not in log


@pytest.mark.parametrize("key", [b"a\x00b", b"a\rb", b"a\nEvil: 1", b"a\r\n Evil: 1"], ids=["NUL", "CR", "LF", "obs-fold"])
def test_a_key_that_breaks_the_framing_is_refused(semel, up, key):
    try:
        assert answer_to(semel, request_with(b"Idempotency-Key: " + key + b"\r\n")).status == 400
    except Lost:
        pass
    assert up.calls == []


def test_a_key_of_one_mebibyte_is_refused(semel, up):
    try:
        assert answer_to(semel, request_with(b"Idempotency-Key: " + b"k" * (1 << 20) + b"\r\n")).status in (400, 431)
    except Lost:
        pass
    assert up.calls == [] and semel.chat("after").status == 200


def test_two_keys_that_differ_are_400_and_never_the_last_one(semel, up):
    refused = answer_to(semel, request_with(b"Idempotency-Key: one\r\nIdempotency-Key: two\r\n"))
    assert refused.status == 400 and refused.code == "key-malformed" and up.calls == []


@pytest.mark.parametrize("key", ["k" * 255, "%0d%0aX-Evil:%20y", "../../etc/passwd", "'; DROP TABLE records; --".replace(" ", "_"),
                                 "{b0417}", "\\x00", "!~"], ids=range(7))
def test_odd_but_visible_keys_are_just_keys(semel, up, key):
    first, second = semel.chat(key), semel.chat(key)
    assert first.status == second.status == 200 and second.replayed == "true" and len(up.paid()) == 1
    assert first.headers["idempotency-key"] == key and "x-evil" not in first.headers
    assert key not in semel.ask_admin("/metrics").body.decode()


CHUNKED = b"1e\r\n" + BODY + b"\r\n0\r\n\r\n"
assert len(BODY) == 0x1e
SMUGGLED = b"GET /v1/smuggled HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"
FRAMINGS = {
    "CL then TE": request_with(b"Transfer-Encoding: chunked\r\n", CHUNKED + SMUGGLED),
    "TE then CL": request_with(b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n", CHUNKED + SMUGGLED, length=False),
    "two CL that differ": request_with(b"Content-Length: 3\r\n"),
    "two CL that agree": request_with(b"Content-Length: 30\r\n"),
    "CL with a plus": request_with(b"Content-Length: +30\r\n", length=False),
    "CL list": request_with(b"Content-Length: 30,30\r\n", length=False),
    "CL in hex": request_with(b"Content-Length: 0x1e\r\n", length=False),
    "CL negative": request_with(b"Content-Length: -1\r\n", length=False),
    "CL empty": request_with(b"Content-Length:\r\n", length=False),
    "CL beyond 64 bits": request_with(b"Content-Length: 18446744073709551647\r\n", length=False),
    "space before the colon of TE": request_with(b"Transfer-Encoding : chunked\r\n", CHUNKED, length=False),
    "TE xchunked": request_with(b"Transfer-Encoding: xchunked\r\n", CHUNKED, length=False),
    "TE gzip, chunked": request_with(b"Transfer-Encoding: gzip, chunked\r\n", CHUNKED, length=False),
    "TE chunked twice": request_with(b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n", CHUNKED, length=False),
    "TE identity then chunked": request_with(b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n", CHUNKED, length=False),
    "TE empty": request_with(b"Transfer-Encoding:\r\n", SMUGGLED, length=False),
    "TE folded": request_with(b"Transfer-Encoding:\r\n chunked\r\n", CHUNKED, length=False),
    "TE on HTTP/1.0": request_with(b"Transfer-Encoding: chunked\r\n", CHUNKED, length=False,
                                   line=b"POST /v1/chat/completions HTTP/1.0"),
    "obs-fold": request_with(b"X-Folded: a\r\n b\r\n"),
    "bare LF between lines": request_with(b"X-A: b\nX-C: d\r\n"),
    "bare LF ends the head": request_with(b"")[:-len(BODY) - 2] + b"\n" + BODY,
    "bare CR": request_with(b"X-A: b\rX-C: d\r\n"),
    "NUL in a header": request_with(b"X-A: b\x00c\r\n"),
    "empty header name": request_with(b": value\r\n"),
    "space in a header name": request_with(b"X A: b\r\n"),
    "no host": request_with(b"", host=b""),
    "two hosts": request_with(b"Host: localhost\r\n"),
    "chunk size with a sign": request_with(b"Transfer-Encoding: chunked\r\n", b"+1e\r\n" + BODY + b"\r\n0\r\n\r\n", length=False),
    "chunk size in 17 digits": request_with(b"Transfer-Encoding: chunked\r\n", b"1000000000000001e\r\n" + BODY + b"\r\n0\r\n\r\n",
                                            length=False),
    "chunk size too large": request_with(b"Transfer-Encoding: chunked\r\n", b"ffffffffffffffff\r\n" + BODY, length=False),
    "garbage after a chunk": request_with(b"Transfer-Encoding: chunked\r\n", b"1e\r\n" + BODY + b"XX0\r\n\r\n", length=False),
    "unknown version": request_with(b"", line=b"POST /v1/chat/completions HTTP/3.7"),
    "no version": b"GET /v1/models\r\n\r\n",
    "space in the target": request_with(b"", line=b"POST /v1/chat/completions x HTTP/1.1"),
    "8-bit target": request_with(b"", line=b"GET /v1/\xff HTTP/1.1"),
    "CONNECT": request_with(b"", line=b"CONNECT 127.0.0.1:22 HTTP/1.1"),
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 64,
    "HTTP/2 preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
}


@pytest.mark.parametrize("data", FRAMINGS.values(), ids=FRAMINGS.keys())
def test_ambiguous_framing_is_refused_closed_and_nothing_after_it_is_read(semel, up, data):
    e = semel.raw(data + SMUGGLED, timeout=15)
    received = e.read_to_close(15)  # fails if the gateway keeps the connection
    assert received == b"" or received.startswith((b"HTTP/1.1 4", b"HTTP/1.1 5", b"HTTP/1.0 4")), received[:200]
    assert len(re.findall(rb"HTTP/1\.\d \d\d\d ", received)) <= 1, "one answer at most: what follows is no request"
    assert up.calls == []
    assert semel.chat("after").status == 200


@pytest.mark.parametrize("line", [b"Transfer-Encoding: chunked\r\n", b"transfer-encoding:\tChunked \r\n"], ids=["plain", "odd case and tab"])
def test_a_proper_chunked_request_is_read_and_forwarded_with_one_framing(semel, up, line):
    data = request_with(line + b"Idempotency-Key: k\r\n", b"f;ext=1\r\n" + BODY[:15] + b"\r\nf\r\n" + BODY[15:] + b"\r\n0\r\nX-Trailer: y\r\n\r\n",
                        length=False)
    assert answer_to(semel, data).status == 200
    call, = up.paid()
    assert call.body == BODY
    assert len(call.all("content-length")) + len(call.all("transfer-encoding")) == 1


def test_expect_100_continue_is_answered_and_then_the_request(semel, up):
    data = format_request(semel.port, "POST", "/v1/chat/completions", BODY, {"Idempotency-Key": "k", "Expect": "100-continue"})
    head, body = data[:-len(BODY)], data[-len(BODY):]
    e = semel.raw(head, timeout=10)
    while b"\r\n\r\n" not in e._in:
        assert e._fill()
    assert e._in.startswith(b"HTTP/1.1 100 ")
    assert up.calls == []
    e.send(body)
    assert e.rest().status == 200 and len(up.paid()) == 1


def test_expect_that_does_not_wait_works_too(semel, up):
    assert semel.chat("k", headers={"Expect": "100-continue"}).status == 200 and len(up.paid()) == 1


def test_another_expectation_is_417(semel, up):
    assert semel.chat("k", headers={"Expect": "something-else"}).status == 417 and up.calls == []


def test_a_body_over_the_limit_is_refused_before_100_and_claims_nothing(semel, up):
    e = semel.raw(request_with(b"Idempotency-Key: k\r\nExpect: 100-continue\r\nContent-Length: 104857600\r\n", b"", length=False), timeout=10)
    refused = e.rest()
    assert refused.status == 413 and b"100 Continue" not in refused.head
    assert up.calls == [] and semel.chat("k").outcome == "executed"


def test_a_body_over_the_limit_without_expect_is_413(semel, up):
    e = semel.raw(request_with(b"Idempotency-Key: k\r\nContent-Length: 104857600\r\n", b'{"model":"' + b"x" * 500_000, length=False), timeout=15)
    assert e.rest().status == 413 and up.calls == []


def test_an_endless_chunked_body_is_413(semel, up):
    e = semel.raw(request_with(b"Idempotency-Key: k\r\nTransfer-Encoding: chunked\r\n", b"", length=False), timeout=30)
    piece = b"100000\r\n" + b"x" * (1 << 20) + b"\r\n"
    try:
        for _ in range(80):
            e.send(piece)
    except OSError:
        pass
    try:
        assert e.rest().status == 413
    except Lost:
        pass  # reset by our own unread bytes
    assert up.calls == []


def test_pipelined_posts_are_answered_in_order(semel, up):
    up.default = lambda call, reply: (time.sleep(0.4 if b"first" in call.body else 0), upstream.plain()(call, reply))
    one, two = (format_request(semel.port, "POST", "/v1/chat/completions", chat_body(text), {"Idempotency-Key": text})
                for text in ("first", "second"))
    e = semel.raw(one + two, timeout=15)
    e.read_head()
    while not e.whole and e.read_some():
        pass
    first = e.body
    assert e.headers["idempotency-key"] == "first"
    left = e._in
    e.status, e.body, e.whole, e._mode, e._left, e.headers, e._in = None, b"", False, None, None, {}, left
    e.read_head()
    while not e.whole and e.read_some():
        pass
    assert e.headers["idempotency-key"] == "second" and e.body != first and len(up.paid()) == 2


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/api/chat", "/api/chat/status/r1?sessionId=s1", "/v1/models", "/nothing"])
def test_head_has_no_body_and_makes_no_claim(semel, up, path):
    e = semel.open("HEAD", path, headers={"Idempotency-Key": "k"}, timeout=10)
    e.read_head()
    assert e._in == b""
    e.close()
    assert up.paid() == [] and semel.chat("k").outcome == "executed"


def test_a_head_over_the_limit_is_431(semel, up):
    for lines in (b"X-Large: " + b"x" * (1 << 20) + b"\r\n", b"X-Many: 1\r\n" * 10_000):
        try:
            assert answer_to(semel, request_with(lines)).status == 431
        except Lost:
            pass  # our unread bytes made it a reset
    assert up.calls == [] and semel.chat("after").status == 200


def test_a_target_over_the_limit_is_414(semel, up):
    assert answer_to(semel, request_with(b"", line=b"GET /v1/" + b"x" * 20_000 + b" HTTP/1.1", body=b"")).status in (414, 431)
    assert up.calls == []


def test_a_body_that_breaks_off_claims_nothing(semel, up):
    e = semel.raw(request_with(b"Idempotency-Key: k\r\nContent-Length: 500\r\n", BODY, length=False))
    e.close()
    answer = semel.chat("k", "another text")
    assert answer.status == 200 and answer.attempt == 1 and len(up.paid()) == 1


def test_requests_one_byte_at_a_time_are_read(semel, up):
    data = format_request(semel.port, "POST", "/v1/chat/completions", BODY, {"Idempotency-Key": "k"})
    e = semel.raw(data[:1])
    for i in range(1, len(data)):
        e.send(data[i:i + 1])
    assert e.rest().status == 200 and up.paid()[0].body == BODY


def test_slow_and_idle_connections_stop_nobody(semel, up):
    idle = [Exchange(semel.port, raw=b"", timeout=30) for _ in range(300)]
    half = [Exchange(semel.port, raw=b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ", timeout=30) for _ in range(150)]
    slow_body = [semel.raw(request_with(b"Idempotency-Key: slow-%d\r\nContent-Length: 5000\r\n" % i, b"{", length=False), timeout=30)
                 for i in range(50)]
    up.on("bulky", upstream.raw_stream([b"data: " + b"x" * 100_000 + b"\n\n"] * 100 + [upstream.DONE]))
    deaf = [semel.open_chat(f"deaf-{i}", model="bulky", stream=True, receive_buffer=4096) for i in range(5)]
    answers = together(20, lambda i: semel.chat(f"k{i}", timeout=15))
    assert {a.status for a in answers} == {200}
    assert semel.ask_admin("/healthz", timeout=5).status == 200 and semel.ask_admin("/readyz", timeout=5).status == 200
    assert semel.rss_kib < 600_000
    for e in idle + half + slow_body + deaf:
        e.socket.close()
    assert semel.chat("after").status == 200


@pytest.mark.slow
def test_a_head_that_never_ends_is_given_up(semel):
    e = Exchange(semel.port, raw=b"GET /v1/models HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ", timeout=60)
    stop = threading.Event()

    def drip():
        while not stop.wait(1):
            try:
                e.send(b"x")
            except OSError:
                return
    threading.Thread(target=drip, daemon=True).start()
    received = e.read_to_close(40)
    stop.set()
    assert received == b"" or received.startswith(b"HTTP/1.1 408")


def test_running_out_of_descriptors_is_survived(make, up):
    semel = make(command=["prlimit", "--nofile=256:256"]).start()
    held = []
    for _ in range(400):
        try:
            held.append(Exchange(semel.port, raw=b"", timeout=2))
        except OSError:
            break
    time.sleep(0.5)
    for e in held:
        e.socket.close()
    assert eventually(lambda: (a := semel.try_chat("after", timeout=5)) and a.status == 200, seconds=30, what="accepting again")


def test_random_bytes_do_no_harm(semel, up):
    rng = random.Random(20260101)
    good = format_request(semel.port, "POST", "/v1/chat/completions", BODY, {"Idempotency-Key": "k"})
    for i in range(200):
        data = bytearray(good)
        for _ in range(rng.randint(1, 6)):
            at = rng.randrange(len(data))
            data[at:at + rng.randint(0, 3)] = rng.randbytes(rng.randint(0, 3))
        e = semel.raw(bytes(data), timeout=0.2)
        try:
            e.read_head()
        except (Lost, TimeoutError, ValueError):
            pass
        e.socket.close()
    assert semel.process.poll() is None
    assert semel.chat("after").status == 200
    assert all(c.header("host") == f"127.0.0.1:{up.port}" for c in up.calls)


def test_an_upstreams_hostile_header_does_not_reach_the_client_as_two(semel, up):
    def run(call, reply):
        body = b"{}"
        reply.bytes(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nX-Evil: a\rSet-Cookie: b\r\nContent-Length: 2\r\n\r\n" + body)
    up.on("evil", run)
    answer = semel.try_chat("k", model="evil")
    assert answer is None or "set-cookie" not in answer.headers
