"""`semel mock-upstream` as users meet it: by its help, behind a gateway, and with the real SDK."""
import base64
import json
import re
import subprocess

import openai
import pytest

from harness import BINARY, Exchange, Lost, chat_body, run_semel, together


class Mock:
    def __init__(self, *arguments):
        self.process = subprocess.Popen([str(BINARY), "mock-upstream", "--port", "0", *arguments], stdin=subprocess.DEVNULL,
                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.url = self.process.stdout.readline().strip()
        self.port = int(self.url.rsplit(":", 1)[1])

    def ask(self, method, path, body=None):
        return Exchange(self.port, method, path, body).rest()

    def paid(self, text):
        return sum(b["count"] for b in self.ask("GET", f"/calls?contains={text}").json["by_body"])


@pytest.fixture
def mock():
    server = Mock()
    yield server
    server.process.terminate()
    server.process.wait(10)
    server.process.stdout.close()
    server.process.stderr.close()


@pytest.fixture
def fronted(make, mock):
    return make(upstream=mock.url).start()


def test_it_prints_its_address_and_nothing_else_and_ends_by_a_signal(mock):
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", mock.url)
    mock.process.terminate()
    out, err = mock.process.communicate(timeout=10)
    assert mock.process.returncode == 0 and out == "" and err == ""


@pytest.mark.parametrize("arguments", [["--nonsense"], ["--port", "x"], ["--latency", "5"], ["--port", "70000"]], ids=" ".join)
def test_a_wrong_command_line_is_2(arguments):
    done = run_semel("mock-upstream", *arguments)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.strip()


def test_a_port_in_use_is_1(mock):
    done = run_semel("mock-upstream", "--port", mock.port)
    assert done.returncode == 1 and str(mock.port) in done.stderr


def test_paid_once_behind_a_gateway_plain_and_streaming(fronted, mock):
    plain = together(50, lambda i: fronted.chat("p", "plain-once", model="slow-500"))
    streams = together(50, lambda i: fronted.chat("s", "stream-once", model="stream-20-20", stream=True))
    assert mock.paid("plain-once") == mock.paid("stream-once") == 1
    assert len({(a.status, a.body) for a in plain}) == len({(a.whole, a.body) for a in streams}) == 1
    assert streams[0].whole and streams[0].body.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("model", ["cut-5", "noterm-5", "errevent-5"])
def test_broken_streams_run_again_behind_a_gateway(fronted, mock, model):
    for n in (1, 2):
        answer = fronted.chat("k", "broken-text", model=model, stream=True)
        assert not answer.whole or b"error" in answer.body
        assert mock.paid("broken-text") == n


@pytest.mark.parametrize("model, status", [("err-400", 400), ("err-429", 429), ("err-503", 503), ("err-529", 529), ("err-500", 500)])
def test_errors_as_their_name_says(fronted, mock, model, status):
    answer = fronted.chat("k", model=model)
    assert answer.status == status
    assert answer.headers.get("retry-after") == ("1" if status in (429, 503) else None)


def test_failures_and_then_success(fronted, mock):
    answers = [fronted.chat("k", "moody-text", model="fail-3-then-ok-429") for _ in range(5)]
    assert [a.status for a in answers] == [429, 429, 429, 200, 200]
    assert answers[4].replayed == "true" and mock.paid("moody-text") == 4


@pytest.mark.parametrize("model", ["short", "closeafterread"])
def test_answers_that_are_none(fronted, mock, model):
    try:
        answer = fronted.chat("k", "none-text", model=model)
        assert answer.status == 502 or not answer.whole
    except Lost:
        pass
    assert mock.paid("none-text") == 1


def test_a_script_gives_exact_bytes(fronted, mock):
    events = [b'data: {"choices":[{"delta":{"content":"\xe6\xbc"}', b'}]}\n\ndata: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n',
              b"data: [DONE]\n\n"]
    script = {"model": "exact", "chunks": [base64.b64encode(e).decode() for e in events], "gap_ms": 20}
    assert mock.ask("POST", "/script", script).status in (200, 201, 204)
    for outcome in ("executed", "replayed"):
        answer = fronted.chat("k", model="exact", stream=True)
        assert answer.whole and answer.body == b"".join(events) and answer.outcome == outcome


def test_calls_are_counted_per_body_and_can_be_reset(mock):
    for text in ("one", "two", "two"):
        mock.ask("POST", "/v1/chat/completions", chat_body(text))
    calls = mock.ask("GET", "/calls").json
    assert calls["total"] == 3 and sorted(b["count"] for b in calls["by_body"]) == [1, 2]
    assert mock.paid("two") == 2
    mock.ask("DELETE", "/calls")
    assert mock.ask("GET", "/calls").json["total"] == 0


def test_the_real_sdk_takes_its_answers(mock):
    client = openai.OpenAI(base_url=f"{mock.url}/v1", api_key="k", max_retries=0)
    messages = [{"role": "user", "content": "hi"}]
    answer = client.chat.completions.create(model="any", messages=messages)
    assert answer.choices[0].finish_reason == "stop" and answer.choices[0].message.content
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    chunks = list(client.chat.completions.create(model="stream-7-0", messages=messages, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].usage.completion_tokens > 0 and "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert all(c.choices for c in client.chat.completions.create(model="any", messages=messages, stream=True))
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="err-429", messages=messages)
    with pytest.raises(Exception):
        list(client.chat.completions.create(model="errevent-3", messages=messages, stream=True))
    assert [m.id for m in client.models.list()]


def test_latency_and_length_by_flags():
    server = Mock("--length", "12", "--latency", "1ms", "--gap", "1ms")
    try:
        answer = server.ask("POST", "/v1/chat/completions", chat_body(stream=True))
        assert answer.whole and answer.body.count(b'"content"') >= 12
    finally:
        server.process.terminate()
        server.process.communicate(timeout=10)


def test_uploads_and_downloads_pass_through_the_gateway(fronted):
    assert fronted.ask("POST", "/v1/files", b"x" * 3_000_000, {"Content-Type": "application/octet-stream"}).status == 200
    answer = fronted.ask("GET", "/v1/files/2500000/content")
    assert answer.whole and len(answer.body) == 2_500_000
    assert json.loads(fronted.ask("GET", "/v1/models").body)["data"]
