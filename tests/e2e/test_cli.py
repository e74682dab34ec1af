"""The command line: data on stdout, the rest on stderr, exit codes, and words that help."""
import json
import re

import pytest

import upstream
from harness import ROOT, Died, run_semel

VALID = "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\nstore:\n  rocksdb: { path: ./data }\nupstreams:\n" \
        "  - { name: mock, dialect: openai, base_url: 'http://127.0.0.1:9' }\n"


@pytest.fixture
def check(tmp_path):
    def run(text, *arguments, **kw):
        file = tmp_path / "semel.yaml"
        file.write_text(text)
        return run_semel("serve", "--config", file, "--check", *arguments, cwd=tmp_path, **kw)
    return run


def test_version_and_help(tmp_path):
    version = run_semel("--version")
    assert version.returncode == 0 and version.stderr == ""
    assert version.stdout.strip() == "semel " + (ROOT / "VERSION").read_text().strip()
    helped = run_semel("--help")
    assert helped.returncode == 0 and helped.stderr == ""
    for word in ("serve", "record", "doctor", "mock-upstream", "curl"):
        assert word in helped.stdout, word


@pytest.mark.parametrize("command", [["serve"], ["record"], ["record", "get"], ["record", "list"], ["record", "resolve"], ["doctor"],
                                     ["mock-upstream"]], ids=" ".join)
def test_every_subcommand_has_a_help_on_stdout(command):
    done = run_semel(*command, "--help")
    assert done.returncode == 0 and len(done.stdout) > 100 and done.stderr == ""


@pytest.mark.parametrize("arguments", [[], ["serve"], ["nonsense"], ["serve", "--nonsense"], ["record", "resolve", "x"],
                                       ["record", "list", "--limit", "0"]], ids=lambda a: " ".join(a) or "nothing")
def test_a_wrong_command_line_is_2_and_says_so_on_stderr(arguments):
    done = run_semel(*arguments)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.strip()


def test_check_of_a_valid_file_touches_nothing(check, tmp_path):
    done = check(VALID)
    assert done.returncode == 0, done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["semel.yaml"]
    as_json = check(VALID, "--json")
    assert json.loads(as_json.stdout)["ok"] is True


WRONG = {
    "unknown key": ("listn: 127.0.0.1:1\n" + VALID.split("\n", 1)[1], 1, ["listn", "listen"]),
    "unknown nested key": (VALID + "engine:\n  lease: 2s\n  retentoin: { completed: 1h }\n", 9, ["retentoin", "retention"]),
    "unknown route dial": (VALID + "routes:\n  /v1/chat/completions: { on_runing: join }\n", 8, ["on_runing", "on_running"]),
    "unknown choice": (VALID + "routes:\n  /v1/chat/completions: { on_running: wait }\n", 8, ["wait", "join"]),
    "duplicate key": (VALID + "listen: 127.0.0.1:2\n", 7, ["listen"]),
    "duration without a unit": (VALID + "engine: { lease: 10 }\n", 7, ["lease", "10"]),
    "size without sense": (VALID + "record: { max_bytes: many }\n", 7, ["max_bytes", "many"]),
    "not yaml": (VALID + "engine: { lease: 1s\n", None, []),
    "two stores": (VALID.replace("  rocksdb: { path: ./data }\n", "  rocksdb: { path: ./data }\n  memory: {}\n"), None, ["store"]),
    "bad url": (VALID.replace("http://127.0.0.1:9", "ftp://x"), 6, ["base_url"]),
    "url with credentials": (VALID.replace("http://127.0.0.1:9", "http://u:secretpw@x"), 6, ["base_url"]),
    "bad port": (VALID.replace("listen: 127.0.0.1:0", "listen: 127.0.0.1:99999"), 1, ["listen"]),
    "retention within the lease": (VALID + "engine: { lease: 10s, retention: { completed: 5s } }\n", None, ["retention", "lease"]),
    "unset variable": (VALID + "engine: { secret_env: NOT_SET_ANYWHERE }\n", None, ["NOT_SET_ANYWHERE"]),
    "unset substitution": (VALID.replace("./data", '"${NOT_SET_ANYWHERE}"'), 4, ["NOT_SET_ANYWHERE"]),
    "two upstreams of one name": (VALID + "  - { name: mock, dialect: openai, base_url: 'http://127.0.0.1:8' }\n", 7, ["mock"]),
    "unknown dialect": (VALID.replace("dialect: openai", "dialect: openia"), 6, ["openia"]),
    "a list for a map": (VALID + "engine: [1, 2]\n", 7, ["engine"]),
    "binary": ("\x00\x01\x02", None, []),
}


@pytest.mark.parametrize("text, line, words", WRONG.values(), ids=WRONG.keys())
def test_a_wrong_config_is_2_and_names_file_line_and_key(check, text, line, words):
    done = check(text)
    assert done.returncode == 2 and done.stdout == "", done
    assert "semel.yaml" in done.stderr
    if line:
        assert f"semel.yaml:{line}" in done.stderr, done.stderr
    for word in words:
        assert word in done.stderr, done.stderr
    assert "secretpw" not in done.stderr and "terminate" not in done.stderr


@pytest.mark.parametrize("lease", ["2s", "1s", "100ms", "0s", "10000h"])
def test_any_lease_is_either_served_or_refused_with_a_sentence(make, up, lease):
    semel = make(engine={"lease": lease})
    try:
        semel.start()
    except Died as died:
        assert died.code in (1, 2) and "lease" in died.text and "invariant" not in died.text
        assert lease not in ("2s",), "short, but sensible"
    else:
        assert semel.chat("k").status == 200 and semel.chat("k").replayed == "true"


def test_a_config_file_that_is_not_there_is_named(tmp_path):
    done = run_semel("serve", "--config", tmp_path / "none.yaml", "--check")
    assert done.returncode == 2 and "none.yaml" in done.stderr


def test_a_port_in_use_is_named(make, semel):
    other = make()
    other.config["listen"] = f"127.0.0.1:{semel.port}"
    other.write_config()
    other.launch()
    assert other.wait_dead() not in (0, -6, -11)
    assert str(semel.port) in other.said()


def test_serve_keeps_stdout_clean(semel):
    semel.chat("k")
    assert semel.stop() == 0
    assert semel.out.read_text() == "" and semel.said().strip()


# ---- record

@pytest.fixture
def held(make, up):
    """A gateway with one completed, one failed and one unknown intent -> (semel, {status: answer})."""
    semel = make(routes={"/v1/chat/completions": {"on_unknown": "hold"}}).start()
    up.on("no", upstream.error(400))
    up.on("lost", upstream.error(500))
    answers = {"COMPLETED": semel.chat("done"), "FAILED": semel.chat("failed", model="no"), "UNKNOWN": semel.chat("lost", model="lost")}
    return semel, {status: a.headers["semel-intent"] for status, a in answers.items()}


@pytest.fixture(params=["server", "directory"])
def anywhere(request, held):
    """The same with the server running (admin address) and without (the directory is opened)."""
    semel, intents = held
    if request.param == "directory":
        assert semel.stop() == 0
    return semel, intents


def record_command(semel, *arguments, **kw):
    return semel.command_line("record", *arguments, "--config", semel.config_file, **kw)


def test_record_get_tells_every_status(anywhere):
    semel, intents = anywhere
    for status, intent in intents.items():
        record = semel.record(intent)
        assert (record["intent"], record["status"], record["attempt"]) == (intent, status, 1)
        assert record["operation"] and record["token"] > 0 and record["created"]
        done = record_command(semel, "get", intent)
        assert done.returncode == 0 and status in done.stdout and intent in done.stdout
    done = semel.record(intents["COMPLETED"])
    assert (done["usage"]["input_tokens"], done["usage"]["output_tokens"], done["usage"]["model"]) == (11, 7, "fast")
    assert done["answer"]["http_status"] == 200
    assert semel.record(intents["FAILED"])["failure"]["http_status"] == 400


def test_record_get_finds_a_record_by_its_clients_name_for_it(anywhere):
    semel, intents = anywhere
    done = record_command(semel, "get", "--id", "done", "--credential-env", "CALLER", "--json", env={"CALLER": "sk-test-credential"})
    if done.returncode == 3:  # the credential is the header's whole value
        done = record_command(semel, "get", "--id", "done", "--credential-env", "CALLER", "--json", env={"CALLER": "Bearer sk-test-credential"})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["intent"] == intents["COMPLETED"]


def test_record_get_body_gives_the_recorded_bytes(semel, up):
    answer = semel.chat("k")
    done = semel.command_line("record", "get", answer.headers["semel-intent"], "--config", semel.config_file, "--body")
    assert done.returncode == 0 and done.stdout.encode() == answer.body


def test_record_get_of_what_is_not_there_is_3(anywhere):
    semel, _ = anywhere
    done = record_command(semel, "get", "A" * 43)
    assert done.returncode == 3 and done.stdout == "" and done.stderr.strip()
    assert record_command(semel, "get", "not an intent").returncode in (1, 2, 3)


def test_record_list_lists_filters_and_pages(anywhere):
    semel, intents = anywhere
    listed = json.loads(record_command(semel, "list", "--json").stdout)["records"]
    assert {r["intent"]: r["status"] for r in listed} == {i: s for s, i in intents.items()}
    unknown = json.loads(record_command(semel, "list", "--status", "unknown", "--json").stdout)["records"]
    assert [r["intent"] for r in unknown] == [intents["UNKNOWN"]]
    text = record_command(semel, "list")
    assert text.returncode == 0 and all(i in text.stdout for i in intents.values())
    seen, cursor = [], []
    for _ in range(4):
        page = json.loads(record_command(semel, "list", "--limit", "1", "--json", *cursor).stdout)
        seen += [r["intent"] for r in page["records"]]
        if not page["next"]:
            break
        cursor = ["--cursor", page["next"]]
    assert sorted(seen) == sorted(intents.values())


def back(semel):
    if semel.process.poll() is not None:
        semel.start()
    return semel


def test_resolve_completed_replays_the_file(anywhere, up, tmp_path):
    semel, intents = anywhere
    answer = tmp_path / "answer.json"
    answer.write_text(json.dumps({"id": "found-in-the-providers-console", "object": "chat.completion", "created": 1, "model": "lost",
                                  "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "hello"}}],
                                  "usage": {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}}))
    dry = record_command(semel, "resolve", intents["UNKNOWN"], "--as", "completed", "--file", answer, "--dry-run")
    assert dry.returncode == 0 and semel.record(intents["UNKNOWN"])["status"] == "UNKNOWN"
    done = record_command(semel, "resolve", intents["UNKNOWN"], "--as", "completed", "--file", answer, "--reason", "console", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["status"] == "COMPLETED"
    replay = back(semel).chat("lost", model="lost")
    assert replay.status == 200 and replay.body == answer.read_bytes() and replay.replayed == "true"
    assert len(up.paid(model="lost")) == 1


@pytest.mark.parametrize("decision", ["failed", "rerun"])
def test_resolve_failed_or_rerun_lets_the_next_request_pay(anywhere, up, decision):
    semel, intents = anywhere
    done = record_command(semel, "resolve", intents["UNKNOWN"], "--as", decision)
    assert done.returncode == 0, done.stderr
    up.on("lost", upstream.plain())
    answer = back(semel).chat("lost", model="lost")
    assert answer.status == 200 and answer.attempt == 2 and len(up.paid(model="lost")) == 2


def test_resolve_refuses_what_is_decided_old_or_no_answer(anywhere, tmp_path):
    semel, intents = anywhere
    done = record_command(semel, "resolve", intents["COMPLETED"], "--as", "failed")
    assert done.returncode == 1 and "COMPLETED" in done.stderr
    done = record_command(semel, "resolve", intents["UNKNOWN"], "--as", "failed", "--token", "1")
    assert done.returncode == 1 and semel.record(intents["UNKNOWN"])["status"] == "UNKNOWN"
    broken = tmp_path / "broken.json"
    broken.write_text('{"choices": [')
    done = record_command(semel, "resolve", intents["UNKNOWN"], "--as", "completed", "--file", broken)
    assert done.returncode == 1 and semel.record(intents["UNKNOWN"])["status"] == "UNKNOWN"
    assert record_command(semel, "resolve", intents["UNKNOWN"], "--as", "completed").returncode == 2
    assert record_command(semel, "resolve", "A" * 43, "--as", "failed").returncode == 3


def test_a_turn_resolved_as_completed_is_appended_to_its_conversation(make, up, tmp_path):
    semel = make(routes={"/api/chat": {"on_unknown": "hold"}}).start()
    up.on("fast", upstream.in_turn(upstream.error(500), upstream.plain()))
    lost = semel.say("r1", "one")
    answer = tmp_path / "answer.json"
    answer.write_text(json.dumps({"requestId": "r1", "status": "COMPLETED", "content": "by hand", "fromCache": False, "model": "fast",
                                  "usage": {"inputTokens": 1, "outputTokens": 2}, "attempt": 1}))
    done = record_command(semel, "resolve", lost.headers["semel-intent"], "--as", "completed", "--file", answer)
    assert done.returncode == 0, done.stderr
    assert semel.say("r1", "one").json["content"] == "by hand" and len(up.paid()) == 1


def test_an_unknown_turn_resolved_while_others_went_on_is_appended_last_and_marked(make, up, tmp_path):
    semel = make(routes={"/api/chat": {"on_unknown": "hold"}}).start()
    up.on("fast", upstream.in_turn(upstream.error(500), upstream.plain()))
    lost = semel.say("r1", "one", stream=True)
    semel.say("r2", "two")
    semel.kill()
    semel.start()
    answer = tmp_path / "answer.txt"
    answer.write_text('event: delta\ndata: {"content": "by hand"}\n\nevent: done\ndata: {"fromCache":false,"requestId":"r1",'
                      '"status":"COMPLETED","content":"by hand"}\n\n')
    done = record_command(semel, "resolve", lost.headers["semel-intent"], "--as", "completed", "--file", answer)
    assert done.returncode == 0, done.stderr
    listed = semel.ask("GET", "/api/chat/sessions/s1/messages", headers={"X-User-Id": "u1"}).json["messages"]
    said = [(m["requestId"], m["role"], m.get("late", False)) for m in listed]
    assert said == [("r2", "user", False), ("r2", "assistant", False), ("r1", "user", True), ("r1", "assistant", True)]
    assert [m["content"] for m in listed][2:] == ["one", "by hand"]


def test_record_without_a_server_and_without_a_config_says_what_to_do():
    done = run_semel("record", "list", "--admin", "127.0.0.1:1")
    assert done.returncode == 1 and done.stdout == "" and "--config" in done.stderr


def test_no_record_command_shows_a_prompt_an_id_or_a_credential(make, up):
    semel = make().start()
    answer = semel.chat("key-that-is-private", "prompt-that-is-private")
    intent = answer.headers["semel-intent"]
    for arguments in (["get", intent], ["get", intent, "--json"], ["list"], ["list", "--json"]):
        out = record_command(semel, *arguments).stdout
        assert "that-is-private" not in out and "sk-test-credential" not in out and "answer of call" not in out


# ---- doctor

@pytest.mark.parametrize("running", [True, False], ids=["running", "stopped"])
def test_doctor_says_what_is_guaranteed(semel, running):
    if not running:
        assert semel.stop() == 0
    done = semel.command_line("doctor", "--config", semel.config_file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "paid once" in done.stdout.lower()
    findings = json.loads(semel.command_line("doctor", "--config", semel.config_file, "--json").stdout)
    assert findings["ok"] is True and findings["findings"]


def test_doctor_makes_no_paid_call(semel, up):
    semel.command_line("doctor", "--config", semel.config_file)
    assert up.paid() == []


def test_doctor_finds_a_dead_upstream_and_a_wrong_config(make, up, tmp_path):
    semel = make()
    up.close()
    done = semel.command_line("doctor", "--config", semel.config_file, "--json")
    assert done.returncode == 1 and json.loads(done.stdout)["ok"] is False
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("listn: x\n")
    assert run_semel("doctor", "--config", wrong).returncode == 2


# ---- admin address

def test_health_and_metrics_are_on_the_admin_address_only(semel):
    for path in ("/healthz", "/readyz", "/metrics"):
        assert semel.ask_admin(path).status == 200
        assert semel.ask("GET", path).status == 404
    assert semel.ask_admin("/v1/models").status == 404


def test_metrics_are_in_the_prometheus_format_and_counted(semel, up):
    semel.chat("k")
    semel.chat("k")
    semel.chat("k", "other")
    text = semel.ask_admin("/metrics").body.decode()
    for line in text.splitlines():
        assert line.startswith("#") or re.match(r'^[a-zA-Z_:][\w:]*(\{(\w+="(\\.|[^"\\])*",?)*\})? [-+0-9.eInfNa]+$', line), line
    names = {n for n, _, _ in semel.metrics()}
    for name in ("semel_requests_total", "semel_unprotected_total", "semel_paid_maybe_twice_total", "semel_claim_lost_total",
                 "semel_joiners"):
        assert name in names, name
    assert semel.metric("semel_requests_total", outcome="executed") == 1
    assert semel.metric("semel_requests_total", outcome="replayed") == 1
    assert all(f"# HELP {n}" in text for n in names if not re.search("_(bucket|sum|count)$", n))
