"""The real openai package, unmodified: its own retries, its own way to close connections."""
import asyncio
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

import upstream
from harness import CREDENTIAL

MESSAGES = [{"role": "user", "content": "hi"}]


def client(semel, **options):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{semel.port}/v1", api_key=CREDENTIAL.split()[1], **options)


def ask(c, key, model="fast", **more):
    headers = {"Idempotency-Key": key} if key else {}
    return c.chat.completions.create(model=model, messages=MESSAGES, extra_headers=headers, **more)


def text_of(stream):
    return "".join(x.choices[0].delta.content or "" for x in stream if x.choices)


def test_a_timeout_shorter_than_the_answer_ends_in_success_with_one_paid_call(semel, up):
    up.on("slow", upstream.plain(delay=4.5))
    answer = ask(client(semel, timeout=2), "k", "slow")
    assert answer.choices[0].message.content.startswith("answer of call 1") and answer.usage.total_tokens == 18
    assert len(up.paid()) == 1


def test_a_streaming_timeout_shorter_than_the_first_event_ends_in_success_with_one_paid_call(semel, up):
    def late(call, reply):
        time.sleep(4.5)
        upstream.stream(10)(call, reply)
    up.on("slow", late)
    text = text_of(ask(client(semel, timeout=2), "k", "slow", stream=True))
    assert text.count("call1 ") == 10 and len(up.paid()) == 1


def test_the_same_key_again_gives_the_same_answer(semel, up):
    c = client(semel)
    assert ask(c, "k").id == ask(c, "k").id
    assert text_of(ask(c, "s", stream=True)) == text_of(ask(c, "s", stream=True)) != ""
    raw = c.chat.completions.with_raw_response.create(model="fast", messages=MESSAGES, extra_headers={"Idempotency-Key": "k"})
    assert raw.headers["X-Idempotent-Replayed"] == "true" and len(up.paid()) == 2


def test_another_request_under_the_key_raises_at_once(semel, up):
    c = client(semel)
    ask(c, "k")
    with pytest.raises(openai.UnprocessableEntityError) as raised:
        ask(c, "k", temperature=1)
    assert raised.value.code == "key_reused" and len(up.paid()) == 1


def test_a_held_unknown_outcome_is_not_retried_by_the_sdk(make, up):
    semel = make(routes={"/v1/chat/completions": {"on_unknown": "hold"}}).start()
    up.on("lost", upstream.broken_stream(5, "cut"))
    c = client(semel)
    with pytest.raises(Exception):
        text_of(ask(c, "k", "lost", stream=True))
    with pytest.raises(openai.ConflictError) as raised:
        ask(c, "k", "lost", stream=True)
    assert raised.value.code == "outcome_unknown" and len(up.paid()) == 1
    assert semel.metric("semel_requests_total") == 2, "the SDK did not ask again"


@pytest.mark.parametrize("how", ["cut", "reset", "no_terminator", "half_event", "error_data"])
def test_a_stream_that_breaks_raises_in_the_sdk_and_the_retry_succeeds(semel, up, how):
    up.on("bad", upstream.in_turn(upstream.broken_stream(8, how), upstream.stream(8)))
    c = client(semel)
    with pytest.raises(Exception):
        text_of(ask(c, "k", "bad", stream=True))
    assert text_of(ask(c, "k", "bad", stream=True)).count("call2 ") == 8
    assert len(up.paid()) == 2


def test_the_sdks_own_retry_after_a_failure_runs_again_and_succeeds(semel, up):
    up.on("moody", upstream.in_turn(upstream.error(500), upstream.error(429, headers=[("Retry-After", "1")]), upstream.plain()))
    assert ask(client(semel), "k", "moody").choices[0].message.content.startswith("answer of call 3")


def test_usage_in_a_stream_comes_only_to_one_who_asked(semel):
    c = client(semel)
    assert all(x.choices for x in ask(c, "a", stream=True))
    last = list(ask(c, "b", stream=True, stream_options={"include_usage": True}))[-1]
    assert last.choices == [] and last.usage.total_tokens == 16


def test_a_client_that_closes_in_mid_stream_and_asks_again(semel, up):
    up.on("long", upstream.stream(events=100, gap=0.01))
    c = client(semel)
    stream = ask(c, "k", "long", stream=True)
    for _ in range(5):
        next(stream)
    stream.close()
    assert text_of(ask(c, "k", "long", stream=True)).count("call1 ") == 100 and len(up.paid()) == 1


def test_errors_keep_their_types(semel, up):
    for status, kind in ((400, openai.BadRequestError), (401, openai.AuthenticationError), (404, openai.NotFoundError)):
        up.on("bad", upstream.error(status))
        with pytest.raises(kind):
            ask(client(semel), f"k{status}", "bad")
    assert len(up.paid()) == 3


def test_models_and_files_work_through_the_gateway(semel, up):
    up.at("/v1/files", lambda call, reply: reply.json(200, {"id": "file-1", "object": "file", "bytes": 3, "created_at": 1,
                                                            "filename": "a.txt", "purpose": "batch", "status": "processed"}))
    c = client(semel)
    assert [m.id for m in c.models.list()] == ["gpt-4o-mini"]
    assert c.files.create(file=("a.txt", b"abc"), purpose="batch").id == "file-1"
    upload = up.paid()[-1]
    assert upload.header("content-type").startswith("multipart/form-data; boundary=") and b"abc" in upload.body


def disconnects(semel):
    """What the metrics say about clients that left too early, by whatever name."""
    return {f"{name}{labels}": value for name, labels, value in semel.metrics()
            if value and re.search(r"disconnect|orphan|gone|abandon|cancel", name + " " + " ".join(labels.values()))}


@pytest.mark.slow
@pytest.mark.parametrize("keyed", [True, False], ids=["keyed", "keyless"])
def test_a_thousand_streams_of_unmodified_clients_are_no_disconnects(semel, up, keyed):
    """The sync client closes its socket at [DONE] without reading on: that is a normal end."""
    local = threading.local()

    def one(i):
        if not hasattr(local, "client"):
            local.client = client(semel)
        return text_of(ask(local.client, f"sync-{i}" if keyed else None, stream=True))

    async def many():
        limit = asyncio.Semaphore(16)
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{semel.port}/v1", api_key="a") as c:
            async def one_async(i):
                async with limit:
                    stream = await ask(c, f"async-{i}" if keyed else None, stream=True)
                    return "".join([x.choices[0].delta.content or "" async for x in stream if x.choices])
            return await asyncio.gather(*[one_async(i) for i in range(500)])

    with ThreadPoolExecutor(8) as pool:
        texts = list(pool.map(one, range(500)))
    texts += asyncio.run(many())
    assert len(texts) == 1000 and all(t.count(" w") == 5 for t in texts)
    assert len(up.paid()) == 1000
    assert disconnects(semel) == {}
    assert not any(c.client_left for c in up.calls)
    if keyed:
        assert semel.metric("semel_requests_total", outcome="executed") == 1000
        assert semel.metric("semel_paid_maybe_twice_total") == 0
        assert text_of(ask(client(semel), "sync-7", stream=True)) == texts[7] and len(up.paid()) == 1000
