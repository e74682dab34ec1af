"""Who asks: tenants, clients, users; and that no key or credential appears anywhere."""
import pytest

import upstream
from harness import Died

WEB = {"SEMEL_WEB": "web-token-5d41402abc4b2a76", "SEMEL_WEB_2": "web-token-second-7d793037a0", "SEMEL_APP": "app-token-9bf31c7ff062",
       "UPSTREAM_KEY": "sk-upstream-secret-c4ca4238a0b9"}
CLIENTS = [{"name": "web", "token_env": ["SEMEL_WEB", "SEMEL_WEB_2"]},
           {"name": "app", "token_env": "SEMEL_APP", "may_name_users": True}]


def bearer(name):
    return {"Authorization": f"Bearer {WEB[name]}"}


@pytest.fixture
def guarded(make):
    """A gateway with clients of its own and an upstream key."""
    return make(clients=CLIENTS, env=WEB, upstream_options={"api_key_env": "UPSTREAM_KEY"}).start()


def test_two_tenants_with_the_same_id_have_two_records(semel, up):
    a = semel.chat("1", headers={"Authorization": "Bearer A"})
    b = semel.chat("1", headers={"Authorization": "Bearer B"})
    assert len(up.paid()) == 2 and a.body != b.body
    assert semel.chat("1", headers={"Authorization": "Bearer A"}).body == a.body
    assert semel.chat("1", headers={"Authorization": "Bearer B"}).body == b.body
    assert a.headers["semel-intent"] != b.headers["semel-intent"]


def test_a_tenant_cannot_block_another_by_registering_its_ids_first(semel, up):
    assert semel.chat("order-7", "squatted", headers={"Authorization": "Bearer squatter"}).status == 200
    assert semel.chat("order-7", "the real text").status == 200


def test_callers_without_a_credential_are_one_tenant_of_their_own(semel, up):
    none = {"Authorization": None}
    first = semel.chat("1", headers=none)
    assert semel.chat("1", headers=none).body == first.body
    assert semel.chat("1").body != first.body
    assert [c.header("authorization") for c in up.paid()] == [None, "Bearer sk-test-credential"]


def test_without_clients_the_credential_goes_upstream_byte_for_byte(semel, up):
    odd = "bEaReR  sk-odd/+=_~.-  x"
    semel.chat("1", headers={"Authorization": odd})
    assert up.paid()[0].header("authorization") == odd


def test_two_credentials_of_one_client_share_their_records(guarded, up):
    first = guarded.chat("1", headers=bearer("SEMEL_WEB"))
    rotated = guarded.chat("1", headers=bearer("SEMEL_WEB_2"))
    assert rotated.replayed == "true" and rotated.body == first.body and len(up.paid()) == 1


def test_two_clients_with_the_same_id_do_not_share(guarded, up):
    assert guarded.chat("1", headers=bearer("SEMEL_WEB")).body != guarded.chat("1", headers=bearer("SEMEL_APP")).body
    assert len(up.paid()) == 2


def test_a_clients_token_is_never_forwarded(guarded, up):
    guarded.chat("1", headers=bearer("SEMEL_WEB"))
    guarded.ask("GET", "/v1/models", headers=bearer("SEMEL_WEB"))
    assert [c.header("authorization") for c in up.calls] == ["Bearer " + WEB["UPSTREAM_KEY"]] * 2
    for call in up.calls:
        assert "web-token" not in repr(call.headers)


@pytest.mark.parametrize("headers", [{"Authorization": "Bearer wrong"}, {"Authorization": None}, {"Authorization": "Bearer "},
                                     {"Authorization": "Basic d2ViOnRva2Vu"},
                                     {"Authorization": "Bearer web-token-5d41402abc4b2a7"},
                                     {"Authorization": "Bearer web-token-5d41402abc4b2a766"}],
                         ids=["wrong", "none", "empty", "basic", "one short", "one long"])
def test_a_wrong_token_gets_401_and_leaves_no_record(guarded, up, headers):
    refused = guarded.chat("1", "a text of the intruder", headers=headers)
    assert refused.status == 401 and set(refused.json["error"]) >= {"message", "type", "code"}
    for method, path in (("GET", "/v1/models"), ("GET", "/api/chat/status/1?sessionId=s"), ("GET", "/api/chat/sessions/s")):
        assert guarded.ask(method, path, headers=headers).status == 401, path
    assert guarded.say("1", headers=headers).status == 401
    assert up.calls == []
    # Another text under the same id is no mismatch: nothing was claimed.
    assert guarded.chat("1", "hi", headers=bearer("SEMEL_WEB")).outcome == "executed"


def test_a_client_that_may_not_name_users_is_one_user_whatever_it_says(guarded, up):
    web = bearer("SEMEL_WEB")
    first = guarded.say("r1", user="alice", headers=web)
    again = guarded.say("r1", user="bob", headers=web)
    assert first.status == again.status == 200
    assert again.replayed == "true" and again.json["content"] == first.json["content"] and len(up.paid()) == 1
    assert guarded.metric("semel_user_header_ignored_total") == 2


def test_a_client_that_may_name_users_separates_them(guarded, up):
    app = bearer("SEMEL_APP")
    alice, bob = guarded.say("r1", user="alice", headers=app), guarded.say("r1", user="bob", headers=app)
    assert alice.json["content"] != bob.json["content"] and len(up.paid()) == 2
    assert guarded.say("r1", user="alice", headers=app).replayed == "true"


def test_a_user_header_changes_nothing_on_v1(semel, up):
    first = semel.chat("1", headers={"X-User-Id": "alice"})
    assert semel.chat("1", headers={"X-User-Id": "bob"}).body == first.body and len(up.paid()) == 1


def test_other_peoples_intents_and_sessions_are_not_there(guarded, up):
    app = bearer("SEMEL_APP")
    assert guarded.say("r1", user="alice", headers=app).status == 200
    for user, headers in (("bob", app), ("alice", bearer("SEMEL_WEB"))):
        assert guarded.status_of("r1", user=user, headers=headers).status == 404
        for path in ("/api/chat/sessions/s1", "/api/chat/sessions/s1/messages"):
            assert guarded.ask("GET", path, headers={"X-User-Id": user, **headers}).status == 404
        assert guarded.ask("DELETE", "/api/chat/sessions/s1", headers={"X-User-Id": user, **headers}).status == 404
    assert guarded.status_of("r1", user="alice", headers=app).status == 200


def test_an_upstream_key_on_an_open_address_without_clients_is_refused_at_start(make):
    semel = make(env=WEB, upstream_options={"api_key_env": "UPSTREAM_KEY"})
    semel.config["listen"] = f"0.0.0.0:{semel.port}"
    semel.write_config()
    with pytest.raises(Died) as died:
        semel.start()
    assert died.value.code != 0 and "clients" in died.value.text
    assert WEB["UPSTREAM_KEY"] not in died.value.text


def test_an_upstream_key_on_an_open_address_with_clients_is_served(make, up):
    semel = make(clients=CLIENTS, env=WEB, upstream_options={"api_key_env": "UPSTREAM_KEY"})
    semel.config["listen"] = f"0.0.0.0:{semel.port}"
    semel.write_config()
    semel.start()
    assert semel.chat("1", headers={**bearer("SEMEL_WEB"), "Host": "semel.example"}).status == 200


def test_an_upstream_key_from_an_unset_variable_is_refused_by_name(make):
    semel = make(upstream_options={"api_key_env": "NO_SUCH_VARIABLE_SET"})
    with pytest.raises(Died) as died:
        semel.start()
    assert "NO_SUCH_VARIABLE_SET" in died.value.text


FOREIGN_PAGES = {
    "foreign host": {"Host": "evil.example:8787"},
    "foreign origin": {"Origin": "https://evil.example"},
    "text body": {"Content-Type": "text/plain"},
    "form body": {"Content-Type": "application/x-www-form-urlencoded"},
    "no type": {"Content-Type": None},
}


@pytest.mark.parametrize("headers", FOREIGN_PAGES.values(), ids=FOREIGN_PAGES.keys())
def test_a_foreign_web_page_cannot_use_a_gateway_on_loopback(make, up, headers):
    semel = make(env=WEB, upstream_options={"api_key_env": "UPSTREAM_KEY"}).start()
    refused = semel.chat("1", headers=headers)
    assert 400 <= refused.status < 500 and up.calls == []
    assert semel.chat("1").outcome == "executed", "nothing was claimed"


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "LOCALHOST:99"])
def test_loopback_names_of_the_host_are_accepted(semel, host):
    assert semel.chat("1", headers={"Host": host, "Origin": "http://localhost:3000"}).status == 200


def test_keys_and_credentials_are_in_no_response_log_or_file(make, up):
    """Everything goes wrong once, and afterwards the secrets are searched for."""
    semel = make(clients=CLIENTS, env={**WEB, "SEMEL_SECRET_TEXT": "configured-secret-e4da3b7fbbce2345"},
                 upstream_options={"api_key_env": "UPSTREAM_KEY"}, engine={"secret_env": "SEMEL_SECRET_TEXT"}).start()
    key, user, prompt, answer = "key-1679091c5a880faf", "user-8f14e45fceea167a", "prompt-c9f0f895fb98ab91", "answer-45c48cce2e2d7fbd"
    up.on("fast", upstream.plain(answer))
    up.on("bad", upstream.error(401, message="Incorrect API key provided"))
    seen = []
    for headers in (bearer("SEMEL_WEB"), bearer("SEMEL_APP")):
        for _ in range(2):
            seen.append(semel.chat(key, prompt, headers=headers))
            seen.append(semel.say("r1", prompt, user=user, headers=headers))  # sessions list their ids
        seen.append(semel.chat(key, "other", headers=headers))
        seen.append(semel.chat("bad-" + key, prompt, model="bad", headers=headers))
        seen.append(semel.ask("GET", "/v1/models", headers=headers))
        seen.append(semel.chat(None, prompt, headers=headers))
    seen.append(semel.chat(key, prompt, headers={"Authorization": "Bearer wrong-token-d3d9446802a44259"}))
    metrics = semel.ask_admin("/metrics")
    assert semel.stop() == 0
    secrets = [*WEB.values(), "configured-secret-e4da3b7fbbce2345", "wrong-token-d3d9446802a44259"]
    for secret in secrets:
        assert all(secret.encode() not in a.head + a.body for a in [*seen, metrics]), secret
        assert semel.files_holding(secret) == [], secret
    for private in (key, user):
        assert private.encode() not in metrics.body
        assert semel.files_holding(private) == [], private
    for content in (prompt, answer):
        assert content not in semel.said() + semel.out.read_text(), "no content in logs"


def test_request_bodies_are_not_stored(semel, up):
    semel.chat("1", "a-prompt-that-must-not-be-kept-on-disk")
    semel.kill()
    assert semel.files_holding("a-prompt-that-must-not-be-kept-on-disk") == []


def test_the_tenant_of_a_credential_is_the_same_after_a_restart(semel, up):
    first = semel.chat("1")
    semel.kill()
    semel.start()
    assert semel.chat("1").body == first.body and len(up.paid()) == 1


def test_another_secret_does_not_open_the_records_of_the_first(make, up):
    semel = make(engine={"secret_env": "S"}, env={"S": "first-secret-0123456789abcdef"}).start()
    first = semel.chat("1")
    semel.stop()
    semel.env["S"] = "second-secret-0123456789abcdef"
    try:
        semel.start()
    except Died as died:
        assert died.code != 0 and "secret" in died.text
    else:
        assert semel.chat("1").body != first.body
