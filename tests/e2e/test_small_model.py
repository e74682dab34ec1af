"""A real model behind the gateway: what a person sees, and whether the tokens in the record are the server's own."""
import importlib.util
import pathlib
import subprocess
import sys

import openai
import pytest

from harness import Exchange, Lost, eventually, free_port

pytestmark = [pytest.mark.model, pytest.mark.slow]
MODEL = "smollm2"
QUESTION = [{"role": "user", "content": "Name three colours."}]
FIXED = {"temperature": 0, "seed": 7, "max_tokens": 24}


@pytest.fixture(scope="module")
def model_port(tmp_path_factory):
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.fail("the small model is not installed: run tests/e2e/setup-venv --model, or leave out -m model")
    port = free_port()
    log = tmp_path_factory.mktemp("model") / "log"
    with open(log, "wb") as out:
        process = subprocess.Popen([sys.executable, str(pathlib.Path(__file__).parent / "model_server.py"), str(port)],
                                   stdin=subprocess.DEVNULL, stdout=out, stderr=out)

    def healthy():
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            return Exchange(port, "GET", "/health", timeout=2).rest().status == 200
        except (OSError, Lost):
            return False
    eventually(healthy, seconds=90, what="the model's server is up")
    yield port
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()


@pytest.fixture
def gateway(make, model_port):
    return make(upstream=f"http://127.0.0.1:{model_port}").start()


def client(port):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k", timeout=120)


def ask(c, key=None, **more):
    headers = {"Idempotency-Key": key} if key else {}
    return c.chat.completions.with_raw_response.create(model=MODEL, messages=QUESTION, extra_headers=headers, **{**FIXED, **more})


def text_of(stream):
    return "".join(x.choices[0].delta.content or "" for x in stream if x.choices)


def test_ask_and_replay(gateway, model_port):
    own = ask(client(model_port)).parse()
    first, again = ask(client(gateway.port), "k"), ask(client(gateway.port), "k")
    assert first.parse().choices[0].message.content == own.choices[0].message.content
    assert again.content == first.content and again.headers["X-Idempotent-Replayed"] == "true"
    usage = gateway.record(first.headers["semel-intent"])["usage"]
    assert (usage["input_tokens"], usage["output_tokens"]) == (own.usage.prompt_tokens, own.usage.completion_tokens)


def test_ask_cut_ask_again_and_replay_a_stream(gateway, model_port):
    counted = list(ask(client(model_port), stream=True, stream_options={"include_usage": True}).parse())[-1].usage
    c = client(gateway.port)
    first = ask(c, "k", stream=True)
    stream = first.parse()
    begun = "".join(next(stream).choices[0].delta.content or "" for _ in range(3))
    stream.close()
    again = text_of(ask(c, "k", stream=True).parse())
    assert again.startswith(begun) and len(again) > len(begun)
    replay = ask(c, "k", stream=True)
    assert text_of(replay.parse()) == again and replay.headers["X-Idempotent-Replayed"] == "true"
    record = gateway.record(replay.headers["semel-intent"])
    assert (record["status"], record["attempt"]) == ("COMPLETED", 1)
    assert (record["usage"]["input_tokens"], record["usage"]["output_tokens"]) == (counted.prompt_tokens, counted.completion_tokens)


def test_a_kill_in_the_middle_and_a_retry(gateway):
    c = client(gateway.port)
    with pytest.raises(Exception):
        for i, _ in enumerate(ask(c, "k", stream=True, max_tokens=60).parse()):
            if i == 5:
                gateway.kill()
    gateway.start()
    whole = ask(c, "k", stream=True, max_tokens=60)
    assert text_of(whole.parse()) and whole.headers["semel-attempt"] == "2"
    assert text_of(ask(c, "k", stream=True, max_tokens=60).parse())


def test_a_conversation_remembers(gateway):
    first = gateway.say("r1", "My name is Ada. Say hello.", model=MODEL, timeout=120)
    assert first.status == 200 and first.json["usage"]["outputTokens"] > 0
    second = gateway.say("r2", "What is my name?", model=MODEL, timeout=120)
    assert second.status == 200
    assert second.json["usage"]["inputTokens"] > first.json["usage"]["inputTokens"] + 10, "the first turn went along"
    assert gateway.say("r2", "What is my name?", model=MODEL).json["content"] == second.json["content"]


def test_other_routes_of_the_server_pass(gateway):
    models = client(gateway.port).models.list()
    assert models.data
