"""Upstreams that are down, slow, rude or far away."""
import socket
import subprocess
import time

import pytest

import harness
import upstream
from harness import Lost, background, eventually, free_port, together
from upstream import Gate, Upstream


def assert_error(answer, status):
    assert answer.status == status, answer
    assert set(answer.json["error"]) >= {"message", "type", "param", "code"} and answer.json["error"]["message"]
    return answer


def test_an_upstream_that_is_down_is_502_and_costs_no_attempt(make, up):
    port = free_port()
    semel = make(upstream=f"http://127.0.0.1:{port}", routes={"/v1/chat/completions": {"max_paid_attempts": 1}}).start()
    for _ in range(3):
        refused = assert_error(semel.chat("k"), 502)
        assert int(refused.headers["retry-after"]) >= 1
    assert semel.metric("semel_paid_maybe_twice_total") == 0
    passed = semel.ask("GET", "/v1/models")
    assert passed.status == 502


def test_an_upstream_that_comes_back_is_used_at_once(make, up):
    up.close()
    semel = make().start()
    assert_error(semel.chat("k"), 502)
    back = Upstream.__new__(Upstream)
    back.__dict__.update(up.__dict__)
    back._closing = False
    back._listener = socket.create_server(("127.0.0.1", up.port), backlog=100)
    background(back._accept)
    assert semel.chat("k").status == 200
    back.close()


def test_a_name_that_does_not_exist_is_502(make):
    semel = make(upstream="http://no-such-host.invalid:80").start()
    assert_error(semel.chat("k", timeout=40), 502)


def test_a_connection_that_is_never_accepted_is_given_up(make):
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        filler = []
        for _ in range(4):  # the kernel's queue is full, so what comes now is not answered at all
            s = socket.socket()
            s.setblocking(False)
            s.connect_ex(deaf.getsockname())
            filler.append(s)
        semel = make(upstream=f"http://127.0.0.1:{deaf.getsockname()[1]}", upstream_options={"connect_timeout": "500ms"}).start()
        answer = semel.chat("k", timeout=20)
        assert answer.status in (502, 504)
        assert semel.metric("semel_paid_maybe_twice_total") == 0
        for s in filler:
            s.close()


@pytest.mark.parametrize("policy", ["rerun", "hold"])
def test_no_first_byte_in_time_is_504_and_may_have_been_paid(make, up, policy):
    semel = make(upstream_options={"first_byte_timeout": "500ms"}, routes={"/v1/chat/completions": {"on_unknown": policy}}).start()
    gate = Gate()
    up.on("slow", upstream.in_turn(upstream.plain(gate=gate), upstream.plain()))
    assert_error(semel.chat("k", model="slow"), 504 if policy == "rerun" else 409)
    second = semel.chat("k", model="slow")
    if policy == "rerun":
        assert second.status == 200 and second.attempt == 2 and len(up.paid()) == 2
        assert semel.metric("semel_paid_maybe_twice_total") == 1
    else:
        assert second.status == 409 and second.code == "outcome-unknown" and len(up.paid()) == 1
    gate.open()


@pytest.mark.parametrize("policy", ["rerun", "hold"])
def test_a_stream_that_falls_silent_is_cut_and_may_have_been_paid(make, up, policy):
    semel = make(upstream_options={"idle_timeout": "500ms"}, routes={"/v1/chat/completions": {"on_unknown": policy}}).start()
    gate = Gate()
    up.on("silent", upstream.in_turn(upstream.stream(5, gate=gate, gate_after=3), upstream.stream(5)))
    first = semel.chat("k", model="silent", stream=True)
    assert not first.whole and first.body.count(b"data: ") == 3
    second = semel.chat("k", model="silent", stream=True)
    if policy == "rerun":
        assert second.whole and second.body == up.paid()[1].visible
    else:
        assert second.code == "outcome-unknown"
    gate.open()


@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("policy", ["rerun", "hold"])
def test_an_upstream_that_closes_after_it_took_the_request_is_never_asked_again_by_itself(make, up, how, policy):
    semel = make(routes={"/v1/chat/completions": {"on_unknown": policy}}).start()
    semel.chat("warm")  # so that the call leaves on a kept connection, which invites a silent repetition
    up.on("rude", lambda call, reply: getattr(reply, how)())
    assert_error(semel.chat("k", model="rude"), 502 if policy == "rerun" else 409)
    assert len(up.paid(model="rude")) == 1
    assert semel.metric("semel_paid_maybe_twice_total") == 0
    second = semel.chat("k", model="rude")
    if policy == "rerun":
        assert second.status == 502 and second.attempt == 2 and len(up.paid(model="rude")) == 2
        assert semel.metric("semel_paid_maybe_twice_total") == 1
    else:
        assert second.code == "outcome-unknown" and len(up.paid(model="rude")) == 1


NONSENSE = {
    "no HTTP": b"SSH-2.0-OpenSSH_9.2\r\n",
    "binary": bytes(range(256)),
    "half a head": b"HTTP/1.1 200 OK\r\nContent-Ty",
    "bad status": b"HTTP/1.1 abc OK\r\n\r\n",
    "status 99": b"HTTP/1.1 099 Low\r\nContent-Length: 0\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
    "length and chunked": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    "bad chunk size": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "endless head": b"HTTP/1.1 200 OK\r\n" + b"X-A: " + b"x" * (4 << 20),
}


@pytest.mark.parametrize("data", NONSENSE.values(), ids=NONSENSE.keys())
def test_an_upstream_that_answers_nonsense_is_502_or_visibly_cut_and_runs_again(semel, up, data):
    def run(call, reply):
        try:
            reply.bytes(data)
        except upstream.Gone:
            pass
        reply.close()
    up.on("mad", upstream.in_turn(run, upstream.plain()))
    answer = semel.try_chat("k", model="mad", timeout=20)
    assert answer is None or not answer.whole or answer.status == 502, answer
    second = semel.chat("k", model="mad")
    assert second.status == 200 and second.attempt == 2 and len(up.paid()) == 2
    assert semel.process.poll() is None


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b"{", b"<html>busy</html>", b"\xff\xfe", b'{"error": {"message": "overloaded"}}'],
                         ids=["empty", "array", "null", "cut", "html", "not utf-8", "error object"])
def test_a_200_whose_body_is_no_answer_is_never_replayed_as_one(semel, up, body):
    up.on("odd", upstream.in_turn(lambda call, reply: reply.answer(200, body), upstream.plain()))
    first = semel.try_chat("k", model="odd")
    assert first is None or first.status in (200, 502)
    second = semel.chat("k", model="odd")
    assert second.status == 200 and second.json["object"] == "chat.completion" and len(up.paid()) == 2


def test_interim_answers_are_skipped(semel, up):
    def run(call, reply):
        reply.bytes(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n")
        upstream.plain()(call, reply)
    up.on("hints", run)
    assert semel.chat("k", model="hints").status == 200 and semel.chat("k", model="hints").replayed == "true"


def test_connections_are_kept_and_used_again(semel, up):
    for i in range(30):
        assert semel.chat(f"k{i}").status == 200
    assert up.connections <= 4, "one core may need one connection each"


def test_an_upstream_that_closes_after_each_answer_costs_no_failure(make):
    up = Upstream(keep_alive=False)
    semel = make(upstream=up).start()
    for i in range(40):
        assert semel.chat(f"k{i}").status == 200
        time.sleep(0.005)
    up.close()
    assert len(up.paid()) == 40


def test_an_announced_close_costs_no_failure(semel, up):
    up.default = lambda call, reply: (upstream.plain(headers=[("Connection", "close")])(call, reply), reply.close())
    answers = together(10, lambda w: [semel.chat(f"k{w}-{i}").status for i in range(10)])
    assert {s for a in answers for s in a} == {200} and len(up.paid()) == 100


def test_bytes_after_an_answer_are_no_answer_to_the_next_request(semel, up):
    def run(call, reply):
        upstream.plain()(call, reply)
        reply.bytes(b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 13\r\n\r\n{"evil":true}')
        time.sleep(0.05)
        reply.close()
    up.on("smuggler", run)
    for i in range(5):
        semel.chat(f"s{i}", model="smuggler")
        assert b"evil" not in semel.chat(f"k{i}").body


def test_a_base_url_with_a_path(make, up):
    semel = make(upstream=up.url + "/proxy/openai").start()
    assert semel.chat("k").status == 200 and semel.ask("GET", "/v1/models?a=b").status == 200
    assert [c.target for c in up.calls] == ["/proxy/openai/v1/chat/completions", "/proxy/openai/v1/models?a=b"]


def test_the_model_chooses_the_upstream_and_none_is_404(make, up):
    other = Upstream()
    semel = make(upstream_options={"models": ["gpt-*", "o*"]})
    semel.config["upstreams"].append({"name": "other", "dialect": "openai", "base_url": other.url, "models": ["claude-*"]})
    semel.write_config()
    semel.start()
    assert semel.chat("a", model="gpt-4o-mini").status == semel.chat("b", model="o1").status == 200
    assert semel.chat("c", model="claude-x").status == 200
    assert (len(up.paid()), len(other.paid())) == (2, 1)
    nobody = assert_error(semel.chat("d", model="llama"), 404)
    assert nobody.json["error"]["code"] == "model_not_found"
    assert (len(up.paid()), len(other.paid())) == (2, 1)
    other.close()


def test_after_a_change_of_routing_the_retry_still_finds_its_record(make, up):
    other = Upstream()
    semel = make().start()
    first = semel.chat("k")
    semel.stop()
    semel.config["upstreams"] = [{"name": "other", "dialect": "openai", "base_url": other.url, "models": ["*"]}]
    semel.write_config()
    semel.start()
    assert semel.chat("k").body == first.body and other.calls == []
    other.close()


@pytest.fixture(scope="session")
def authority(tmp_path_factory):
    """A certificate authority and certificates of it: {"ca": file, "good": (cert, key), "other name": (cert, key)}."""
    folder = tmp_path_factory.mktemp("authority")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=folder)
    openssl("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=Test CA")
    made = {"ca": folder / "ca.pem"}
    for name, alternative in (("good", "IP:127.0.0.1,DNS:localhost"), ("other name", "DNS:elsewhere.example")):
        file = name.replace(" ", "-")
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{file}.key", "-out", f"{file}.csr", "-subj", "/CN=upstream")
        (folder / f"{file}.ext").write_text(f"subjectAltName={alternative}\n")
        openssl("x509", "-req", "-in", f"{file}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-out", f"{file}.pem",
                "-days", "2", "-extfile", f"{file}.ext")
        made[name] = (folder / f"{file}.pem", folder / f"{file}.key")
    return made


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_https_with_an_authority_of_ones_own(make, authority, host):
    up = Upstream(tls=authority["good"])
    semel = make(upstream=f"https://{host}:{up.port}", upstream_options={"ca_file": str(authority["ca"])}).start()
    assert semel.chat("k").status == 200
    stream = semel.chat("s", stream=True)
    assert stream.whole and stream.body == up.paid()[1].visible
    assert semel.chat("s", stream=True).replayed == "true"
    up.on("bad", upstream.broken_stream(5, "cut"))
    assert not semel.chat("b", model="bad", stream=True).whole
    assert semel.chat("after").status == 200
    up.close()


@pytest.mark.parametrize("trust, certificate", [(False, "good"), (True, "other name")], ids=["unknown authority", "another name"])
def test_https_that_proves_nothing_is_refused_before_a_byte_is_sent(make, authority, trust, certificate):
    up = Upstream(tls=authority[certificate])
    options = {"ca_file": str(authority["ca"])} if trust else {}
    semel = make(upstream=up.url, upstream_options=options).start()
    refused = assert_error(semel.chat("k"), 502)
    assert "certificate" in refused.json["error"]["message"].lower() or "tls" in refused.json["error"]["message"].lower()
    assert up.calls == [] and semel.metric("semel_paid_maybe_twice_total") == 0
    up.close()


def test_plain_http_where_https_is_expected_is_refused(make, up):
    semel = make(upstream=f"https://127.0.0.1:{up.port}", upstream_options={"connect_timeout": "2s"}).start()
    assert_error(semel.chat("k", timeout=20), 502)
    assert up.paid() == []


@pytest.mark.parametrize("content", [None, "", "no certificate\n"], ids=["missing", "empty", "nonsense"])
def test_a_ca_file_without_a_certificate_is_refused_at_the_start(make, tmp_path, content):
    file = tmp_path / "none.pem"
    if content is not None:
        file.write_text(content)
    semel = make(upstream="https://127.0.0.1:1", upstream_options={"ca_file": str(file)})
    with pytest.raises(harness.Died) as died:
        semel.start()
    assert str(file) in died.value.text and "ca_file" in died.value.text
    assert semel.process.returncode == 2


def test_an_answer_that_comes_before_the_request_is_read_is_passed_on(semel, up):
    def skip(call, source):
        call.complete = False
    up._read_body = skip
    up.default = lambda call, reply: (reply.json(429, {"error": {"message": "slow down"}}, [("Retry-After", "2"), ("Connection", "close")]),
                                      time.sleep(0.2), reply.close())
    try:
        answer = semel.chat("k", "x" * 1_000_000)
        assert answer.status in (429, 502)
    except Lost:
        pytest.fail("the client must get an answer")
    assert eventually(lambda: semel.ask_admin("/readyz").status == 200)
