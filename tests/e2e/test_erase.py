"""Sealing at rest and `semel record erase`: contents are in no file, and after an erasure nobody can read them any more."""
import json
import re
import secrets

import pytest

import upstream
from harness import eventually

TELLTALE = "telltale-" + secrets.token_hex(12)
OTHER = "Bearer sk-another-tenant"
BIG_BYTES = 700 * 1024
WRAPPED_BYTES = 69  # version, nonce, id and key, tag: docs/internals/sealing.md


def letters(count):
    return secrets.token_hex(count // 2)


@pytest.fixture
def spooled(make):
    """A gateway whose spool is a folder of its own, inside of the folder that the test searches."""
    def build(**config):
        semel = make(**config)
        semel.config["spool"] = {"path": str(semel.folder / "spool")}
        semel.write_config()
        return semel
    return build


def script(up):
    up.on("fast", upstream.plain(f"{TELLTALE} plain"))
    up.on("streaming", upstream.stream(events=4, pad=f"{TELLTALE} stream"))
    up.on("big", upstream.plain(f"{TELLTALE} big " + letters(BIG_BYTES) + f" {TELLTALE}"))
    up.on("big-stream", upstream.stream(events=12, pad=f"{TELLTALE} piece " + letters(BIG_BYTES // 12)))


def ask_everything(semel):
    """Every kind of answer, once; what each was asked by, and its answer."""
    prompt = f"a prompt with {TELLTALE}"
    asks = {
        "plain": lambda: semel.chat("plain", prompt),
        "stream": lambda: semel.chat("stream", prompt, model="streaming", stream=True),
        "big": lambda: semel.chat("big", prompt, model="big"),
        "big stream": lambda: semel.chat("big-stream", prompt, model="big-stream", stream=True),
        "turn": lambda: semel.say(f"id-{TELLTALE}-1", prompt),
        "second turn": lambda: semel.say(f"id-{TELLTALE}-2", prompt + " again"),
    }
    return asks, {name: ask() for name, ask in asks.items()}


def assert_no_plaintext(semel):
    assert semel.files_holding(TELLTALE) == []


def erase(semel, *arguments, **kw):
    return semel.command_line("record", "erase", *arguments, "--config", semel.config_file, **kw)


def wrapped_keys(semel):
    """The wrapped data keys in the store's log, which holds names and values side by side."""
    found = set()
    for path in semel.data.rglob("*.log"):
        found |= {m[1] for m in re.finditer(rb"data-key:[0-9a-f]{32}E(\x01[\s\S]{%d})" % (WRAPPED_BYTES - 1), path.read_bytes())}
    return found


def still_there(semel, keys):
    files = [path.read_bytes() for path in semel.data.rglob("*") if path.is_file()]
    return {key for key in keys if any(key in content for content in files)}


@pytest.mark.parametrize("durability", ["sync", "async"])
def test_no_content_is_at_rest_and_an_erased_tenants_answers_are_gone_for_good(spooled, up, durability):
    script(up)
    semel = spooled(durability=durability).start()
    asks, first = ask_everything(semel)
    assert all(a.status == 200 and TELLTALE.encode() in a.body for a in first.values())
    other = semel.chat("plain", "another's", headers={"Authorization": OTHER})
    paid = len(up.paid())
    keys = wrapped_keys(semel)
    assert len(keys) == 2, "one a tenant"

    assert_no_plaintext(semel)
    semel.kill()  # what memory held is in the log now, and nowhere else
    assert_no_plaintext(semel)
    semel.start()
    for name, ask in asks.items():
        again = ask()
        assert again.replayed == "true" and again.status == 200, (name, again)
        if name not in ("turn", "second turn"):  # theirs say fromCache
            assert again.body == first[name].body, name
    assert_no_plaintext(semel)

    assert still_there(semel, keys) == keys
    done = erase(semel, "--tenant-of", first["plain"].headers["semel-intent"], "--yes")
    assert done.returncode == 0, done.stderr
    assert "not covered" in done.stdout
    left = still_there(semel, keys)
    assert len(left) == 1, "the erased tenant's key is in no file any more"

    def assert_gone():
        for name, ask in asks.items():
            answer = ask()
            assert (answer.status, answer.code) == (409, "answer-not-kept"), (name, answer)
            assert "erased" in answer.json.get("detail", answer.json.get("error", {}).get("message", "")), answer
        kept = semel.chat("plain", "another's", headers={"Authorization": OTHER})
        assert kept.replayed == "true" and kept.body == other.body
        assert len(up.paid()) == paid, "no second call"

    assert_gone()
    mismatch = semel.chat("plain", "another prompt")
    assert (mismatch.status, mismatch.code) == (422, "key-reused")
    assert "messages" not in mismatch.body.decode()
    messages = semel.ask("GET", "/api/chat/sessions/s1/messages", headers={"X-User-Id": "u1"}).json["messages"]
    assert [(m["role"], m["content"], m["requestId"], m["erased"]) for m in messages] == \
        [("user", None, None, True), ("assistant", None, None, True)] * 2
    semel.kill()
    assert_no_plaintext(semel)
    semel.start()
    assert_gone()
    assert still_there(semel, keys) == left

    fresh = semel.chat("after", f"{TELLTALE} after")
    assert fresh.status == 200 and semel.chat("after", f"{TELLTALE} after").replayed == "true"
    said = semel.say("id-3", f"{TELLTALE} goes on")
    assert said.status == 200 and len(up.paid()) == paid + 2
    assert [m["role"] for m in up.paid()[-1].json["messages"]] == ["user"], "erased turns are no history"
    assert_no_plaintext(semel)


def test_messages_are_opened_for_their_user(spooled, up):
    script(up)
    semel = spooled().start()
    semel.say(f"id-{TELLTALE}", f"question {TELLTALE}")
    messages = semel.ask("GET", "/api/chat/sessions/s1/messages", headers={"X-User-Id": "u1"}).json["messages"]
    assert [(m["requestId"], m["content"]) for m in messages] == \
        [(f"id-{TELLTALE}", f"question {TELLTALE}"), (f"id-{TELLTALE}", f"{TELLTALE} plain")]
    assert "erased" not in messages[0]


def test_a_mismatch_names_fields_after_a_restart(spooled, up):
    semel = spooled().start()
    semel.chat("k", "one")
    semel.kill()
    semel.start()
    mismatch = semel.chat("k", "two")
    assert mismatch.status == 422 and "messages" in mismatch.body.decode()


def test_an_answer_given_by_hand_is_sealed_too(spooled, up, tmp_path):
    semel = spooled(routes={"/api/chat": {"on_unknown": "hold"}, "/v1/chat/completions": {"on_unknown": "hold"}}).start()
    up.on("fast", upstream.in_turn(upstream.error(500), upstream.error(500)))
    turn = semel.say("r1", f"asked {TELLTALE}")
    plain = semel.chat("k", f"asked {TELLTALE}")
    by_hand = tmp_path / "answer.json"
    by_hand.write_text(json.dumps({"requestId": "r1", "status": "COMPLETED", "content": f"by hand {TELLTALE}", "fromCache": False}))
    for answer in (turn, plain):
        done = semel.command_line("record", "resolve", answer.headers["semel-intent"], "--as", "completed", "--file", by_hand,
                                  "--config", semel.config_file)
        assert done.returncode == 0, done.stderr
    assert semel.say("r1", f"asked {TELLTALE}").json["content"] == f"by hand {TELLTALE}"
    assert TELLTALE in semel.chat("k", f"asked {TELLTALE}").body.decode()
    messages = semel.ask("GET", "/api/chat/sessions/s1/messages", headers={"X-User-Id": "u1"}).json["messages"]
    assert [m["content"] for m in messages] == [f"asked {TELLTALE}", f"by hand {TELLTALE}"]
    assert_no_plaintext(semel)
    semel.kill()
    assert_no_plaintext(semel)
    semel.start()
    body = semel.command_line("record", "get", plain.headers["semel-intent"], "--config", semel.config_file, "--body")
    assert TELLTALE in body.stdout


@pytest.mark.parametrize("running", [True, False])
def test_erase_by_name_with_and_without_a_server(make, up, running):
    semel = make(clients=[{"name": "web", "token_env": "WEB"}, {"name": "batch", "token_env": "BATCH"}],
                 upstream_options={"api_key_env": "KEY"},
                 env={"KEY": "upstream's", "WEB": "token-of-web", "BATCH": "token-of-batch"}).start()
    web, batch = ({"Authorization": f"Bearer token-of-{name}"} for name in ("web", "batch"))
    semel.chat("k", headers=web)
    kept = semel.chat("k", headers=batch)
    if not running:
        assert semel.stop() == 0
    would = erase(semel, "--tenant", "web", "--dry-run", "--json")
    assert would.returncode == 0 and json.loads(would.stdout)["dry_run"]
    done = erase(semel, "--tenant", "web", "--yes", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["tenant"] == json.loads(would.stdout)["tenant"]
    if not running:
        semel.start()
    assert semel.chat("k", headers=web).code == "answer-not-kept"
    assert semel.chat("k", headers=batch).body == kept.body and len(up.paid()) == 2


def test_erase_asks_for_yes_and_refuses_what_names_nobody(make, up):
    semel = make().start()
    answer = semel.chat("k")
    intent = answer.headers["semel-intent"]
    unsure = erase(semel, "--tenant-of", intent)
    assert unsure.returncode == 2 and "--yes" in unsure.stderr
    assert erase(semel, "--yes").returncode == 2
    assert erase(semel, "--tenant", "anonymous", "--tenant-of", intent, "--yes").returncode == 2
    assert erase(semel, "--tenant", "misspelled", "--yes").returncode == 3
    assert erase(semel, "--tenant-of", "A" * 43, "--yes").returncode == 3
    assert erase(semel, "--tenant-of", intent, "--dry-run").returncode == 0
    assert semel.chat("k").body == answer.body, "nothing was erased"
    done = erase(semel, "--credential-env", "CALLER", "--yes", env={"CALLER": "sk-test-credential"})
    assert done.returncode == 0, done.stderr
    assert semel.chat("k").code == "answer-not-kept" and len(up.paid()) == 1
    assert semel.record(intent)["answer"]["body_kind"] == "not_kept"
    body = semel.command_line("record", "get", intent, "--config", semel.config_file, "--body")
    assert body.returncode == 3 and "erased" in body.stderr


def test_a_call_that_runs_while_its_tenant_is_erased_ends_well_for_its_client(make, up):
    gate = upstream.Gate()
    up.on("slow", upstream.stream(events=3, gate=gate, gate_after=1))
    semel = make().start()
    running = semel.open_chat("k", "hi", model="slow", stream=True)
    running.read_head()
    first = semel.chat("other")
    done = erase(semel, "--tenant-of", first.headers["semel-intent"], "--yes")
    assert done.returncode == 0, done.stderr
    gate.open()
    answer = running.rest()
    assert answer.whole and answer.body.endswith(b"data: [DONE]\n\n")
    again = semel.chat("k", "hi", model="slow", stream=True)
    assert again.code == "answer-not-kept" and len(up.paid()) == 2


def test_on_redis_the_other_gateway_notices_and_its_append_only_file_holds_no_content(make, redis_servers, up):
    script(up)
    redis = redis_servers("--appendonly", "yes", "--appendfsync", "always", "--aof-use-rdb-preamble", "no")
    one, two = (make(store={"redis": {"url": redis.url()}}).start() for _ in range(2))
    asks, first = ask_everything(one)
    on_two, answers = ask_everything(two)
    assert all(answers[name].replayed == "true" for name in answers)
    paid = len(up.paid())
    (name_of_key,) = redis.keys("*data-key:*")
    wrapped = redis.command("GET", name_of_key)
    done = erase(one, "--tenant-of", first["plain"].headers["semel-intent"], "--yes")
    assert done.returncode == 0, done.stderr
    for name, ask in asks.items():
        assert ask().code == "answer-not-kept", name
    eventually(lambda: on_two["plain"]().code == "answer-not-kept", 5 + 2, "within noticed_elsewhere_within_ms")
    for name, ask in on_two.items():
        assert ask().code == "answer-not-kept", name
    fresh = two.chat("after", "x")
    assert fresh.status == 200 and one.chat("after", "x").body == fresh.body
    assert len(up.paid()) == paid + 1
    assert redis.command("GET", name_of_key) != wrapped
    written = [p for p in redis.folder.rglob("*") if p.is_file()]
    assert any(p.stat().st_size > BIG_BYTES for p in written), "the append-only file was searched"
    assert [str(p) for p in written if TELLTALE.encode() in p.read_bytes()] == []
