"""What fails: tried again, given up with exact bytes, or nobody's fault."""
import base64
import json
import time

import pytest

import consumers
from consumers import Orders, Rows, consumer, dies, happens, message, raw, settles
from harness import Died, eventually

BYTES = b'\x00\xff{"not": "utf-8"}'


def test_a_handler_that_fails_once_is_asked_again(place, service, run):
    service.rule = lambda asked: 500 if asked.number == 1 else None
    run(consumer(place, service.handler))
    place.send(message("m"))
    settles(place)
    assert service.effects() == {"m": 1} and service.asked["m"] == 2 and not place.letters()


@pytest.mark.parametrize("status, word, asked", [(500, "attempts", 3), (400, "fatal", 1), (413, "fatal", 1), (415, "fatal", 1), (422, "fatal", 1)])
def test_what_is_given_up_leaves_with_its_exact_bytes_key_and_headers(status, word, asked, place, service, run):
    service.rule = lambda a: status
    run(consumer(place, service.handler, payload="bytes", id={"header": "message-id"}))
    key = b"\x01key" if place.kind == "kafka" else None
    place.send(raw(BYTES, key, [("message-id", b"bad"), ("trace", b"a b")]))
    [letter] = dies(place)
    settles(place)
    assert (letter.value, letter.key) == (BYTES, key)
    assert letter.header("message-id") == "bad" and letter.header("trace") == "a b"
    assert letter.header("semel-error-class") == word and letter.header("semel-message-id") == "bad"
    assert letter.header("semel-failed-runs") == str(asked) and service.asked["bad"] == asked
    if place.kind == "kafka":
        headers = dict(letter.headers)
        assert headers["kafka_dlt-original-topic"] == place.name.encode()
        assert int.from_bytes(headers["kafka_dlt-original-partition"], "big") < 4 and len(headers["kafka_dlt-original-offset"]) == 8
        assert headers["kafka_dlt-original-consumer-group"] == place.group.encode()


def test_an_envelope_holds_the_message_and_what_is_known_of_it(place, service, run):
    service.rule = lambda asked: 422
    run(consumer(place, service.handler, payload="bytes", id={"header": "message-id"}, dead_letter={"create": True, "body": "envelope"}))
    text = '{"text": "ü"}'
    place.send(raw(text.encode(), headers=[("message-id", b"text")]), raw(BYTES, headers=[("message-id", b"bytes")]))
    letters = {envelope["messageId"]: envelope for envelope in (json.loads(letter.value) for letter in dies(place, 2))}
    assert letters["text"]["originalMessage"] == text and "originalMessageEncoding" not in letters["text"]
    assert base64.b64decode(letters["bytes"]["originalMessage"]) == BYTES and letters["bytes"]["originalMessageEncoding"] == "base64"
    one = letters["text"]
    assert one["originalTopic"] == place.name and one["errorClass"] == "fatal" and one["retryCount"] == 1
    places = {"originalPartition", "originalOffset", "originalKey"} if place.kind == "kafka" else set()
    assert {"errorMessage", "errorTime", "stackTrace", "originalHeaders", "consumer", "group", "errorFingerprint", "firstFailureTime",
            *places} <= set(one)


def test_poison_among_good_messages_goes_alone(topic, service, run):
    service.rule = lambda asked: 422 if asked.id.startswith("bad") else None
    run(consumer(topic, service.handler, ordering="partition"))
    ids = [f"m{i}" for i in range(200)]
    topic.send(message("bad1", partition=0), *[message(id, partition=0) for id in ids], message("bad2", partition=0))
    happens(service, ids)
    settles(topic)
    assert sorted(letter.header("semel-message-id") for letter in topic.letters()) == ["bad1", "bad2"]
    assert set(service.effects().values()) == {1}


@pytest.mark.parametrize("how", [401, 403, 404, 405, 410, "down"])
def test_a_handler_that_is_ill_for_a_while_makes_no_dead_letter(how, topic, service, run):
    """Nobody's fault: the consumer pauses, says so, tries with one message, and goes on."""
    service.keep_alive = how != "down"  # else kept connections would outlive the listener
    sick = {"now": False}
    service.rule = lambda asked: how if sick["now"] else None
    entry = consumer(topic, service.handler, concurrency=8)
    url = entry["handler"]["http"]["url"]
    semel = run(entry)
    topic.send(*[message(f"a{i}") for i in range(100)])
    happens(service, [f"a{i}" for i in range(100)])
    sick["now"] = True
    if how == "down":
        service.close()
    topic.send(*[message(f"b{i}") for i in range(500)])
    eventually(lambda: consumers.state_of(semel)["condition"] == "ill", 20, "it says that it is ill")
    state = consumers.state_of(semel)
    assert state["reason"] and (how == "down" or str(how) in state["reason"]) and url.split("/")[2] in state["reason"]
    assert semel.metric("semel_consumer_paused") == 2
    time.sleep(0.7)  # time to do harm
    tried = sum(service.asked.values())
    assert tried < 100 + 8 + 30
    sick["now"] = False
    if how == "down":
        service.open()
    happens(service, [f"b{i}" for i in range(500)], 60)
    settles(topic)
    assert not topic.letters() and semel.metric("semel_consumer_paused") == 0
    assert consumers.state_of(semel)["condition"] == "running"


def test_of_two_groups_on_one_topic_only_the_one_that_fails_retries_and_has_letters(topic, service, run):
    other = topic.source()
    other["kafka"]["group"] = f"{topic.group}-other"
    good = consumers.Service()
    try:
        service.rule = lambda asked: 500
        semel = run(consumer(topic, service.handler, breaker={"dead_share": "0%"}),
                    consumer(topic, good.handler, name="other", source=other))
        topic.send(*[message(f"m{i}") for i in range(10)])
        assert happens(good, [f"m{i}" for i in range(10)]) == {f"m{i}": 1 for i in range(10)}
        assert {letter.header("semel-message-id") for letter in dies(topic, 10)} == {f"m{i}" for i in range(10)}
        settles(topic)
        eventually(lambda: topic.server.lag(f"{topic.group}-other", topic.name) == 0, 20, "the other one's are settled")
        assert not topic.server.read(f"{topic.name}.{topic.group}-other.dlq") and not service.effects()
        assert semel.metric("semel_message_retries_total", consumer="other") == 0 < semel.metric("semel_message_retries_total", consumer="under-test")
    finally:
        good.close()


def test_when_most_messages_would_be_given_up_the_consumer_stops_instead(topic, service, run):
    service.rule = lambda asked: time.sleep(0.02) or 422  # few are claimed ahead of slow handlers
    semel = run(consumer(topic, service.handler, breaker={"dead_share": "50%"}, concurrency=2))
    topic.send(*[message(f"m{i}") for i in range(300)])
    eventually(lambda: consumers.state_of(semel)["condition"] == "ill", 20, "it stops")
    assert len(topic.letters()) <= 100 and topic.unsettled() >= 200
    service.rule = None
    settles(topic, 60)
    assert len(topic.letters()) + len(service.effects()) == 300


def test_answers_that_mean_later_charge_no_less_and_no_more_than_they_should(place, service, run):
    """503 with Retry-After waits that long; 409 and 425 are "not yet"."""
    times = []

    def rule(asked):
        times.append((asked.id, time.monotonic()))
        if asked.number > 1:
            return None
        return (503, [("Retry-After", "1")]) if asked.id == "later" else 409
    service.rule = rule
    run(consumer(place, service.handler, retry={"attempts": 3, "backoff": {"initial": "10ms", "max": "10s", "jitter": 0}}))
    place.send(message("later"), message("not-yet"))
    happens(service, ["later", "not-yet"])
    settles(place)
    first, second = [t for id, t in times if id == "later"]
    assert second - first >= 0.9 and not place.letters()


@pytest.mark.parametrize("policy", ["rerun", "hold"])
def test_a_handler_that_does_not_answer_in_time_leaves_an_unknown_outcome(policy, place, service, run):
    service.rule = lambda asked: time.sleep(2) if asked.number == 1 else None
    entry = consumer(place, service.handler, on_unknown=policy)
    entry["handler"]["http"]["timeout"] = "300ms"
    semel = run(entry)
    place.send(message("m"), message("other"))
    if policy == "rerun":
        happens(service, ["m", "other"])
        settles(place)
        assert service.asked["m"] == 2 and {c.header("Idempotency-Key") for c in service.paid()} == {"m", "other"}
    else:
        letters = dies(place, 2)
        settles(place)
        assert {letter.header("semel-error-class") for letter in letters} == {"unknown"} and service.asked["m"] == 1
    assert semel.metric("semel_message_unknown_outcomes_total") == 2


def test_a_missing_dead_letter_target_refuses_the_start_by_name(place, service, run):
    with pytest.raises(Died) as died:
        run(consumer(place, service.handler, dead_letter={}))
    assert place.letters_name in died.value.text and "create" in died.value.text


def test_a_dead_letter_topic_that_vanishes_loses_nothing(topic, service, run):
    """The lane waits with an alarm, and the letter is written as soon as there is a topic again."""
    service.rule = lambda asked: 422 if asked.id == "bad" else None
    semel = run(consumer(topic, service.handler, source=topic.source(consumers.QUICK_NEWS)))
    topic.server.delete_topic(topic.letters_name)
    topic.send(message("bad", partition=0), *[message(f"m{i}", partition=1) for i in range(20)])
    happens(service, [f"m{i}" for i in range(20)])
    eventually(lambda: any(topic.letters_name in alarm for alarm in consumers.state_of(semel)["alarms"]), 40, "an alarm")
    assert topic.unsettled() == 1
    topic.server.topic(name=topic.letters_name)
    assert [letter.header("semel-message-id") for letter in dies(topic, seconds=60)] == ["bad"]
    settles(topic, 40)


def test_dead_letter_stop_writes_none_and_keeps_the_message(topic, service, run):
    service.rule = lambda asked: 422 if asked.id == "bad" else None
    semel = run(consumer(topic, service.handler, dead_letter="stop", ordering="key"))
    topic.send(message("bad", key="a", partition=0), message("m1", key="b", partition=1))
    happens(service, ["m1"])
    eventually(lambda: consumers.state_of(semel)["alarms"], 20, "an alarm")
    eventually(lambda: topic.unsettled() == 1)
    assert not topic.server.exists(topic.letters_name)


# ---- what cannot be read -------------------------------------------------------------------------------------------------------

def test_what_has_no_id_or_cannot_be_read_goes_to_the_dead_letters_and_stops_nobody(topic, service, run):
    run(consumer(topic, service.handler, breaker={"dead_share": "0%"}))
    odd = {"decode": [raw(b"{broken", b"a"), raw(b"", b"b")], "missing_id": [raw(b"{}", b"c"), raw(b'{"id": ""}', b"d")]}
    topic.send(*[m for kind in odd.values() for m in kind], message("good"))
    happens(service, ["good"])
    letters = dies(topic, 4)
    settles(topic)
    found = {(letter.key, letter.header("semel-error-class")) for letter in letters}
    assert found == {(m.key, kind) for kind, messages in odd.items() for m in messages}
    assert {letter.key: letter.value for letter in letters}[b"a"] == b"{broken"
    assert list(service.asked) == ["good"]


@pytest.mark.parametrize("rule", ["deliver", "skip", "dead_letter"])
def test_a_tombstone_follows_its_rule_and_is_not_an_empty_message(rule, topic, service, run):
    semel = run(consumer(topic, service.handler, payload="bytes", id={"header": "id"}, on_tombstone=rule, breaker={"dead_share": "0%"}))
    topic.send(raw(None, b"k", [("id", b"null")]), raw(b"", b"k", [("id", b"empty")]))
    happens(service, ["empty", "null"] if rule == "deliver" else ["empty"])
    settles(topic)
    assert service.asked["null"] == (1 if rule == "deliver" else 0)
    assert [letter.value for letter in topic.letters()] == ([None] if rule == "dead_letter" else [])
    assert semel.metric("semel_messages_skipped_total") == (1 if rule == "skip" else 0)


@pytest.mark.parametrize("rule", ["offset", "skip"])
def test_without_an_id_the_offset_stands_for_it_or_it_is_skipped(rule, topic, service, run):
    run(consumer(topic, service.handler, on_missing_id=rule))
    topic.send(raw(b"{}", partition=2), message("good"))
    happens(service, ["good", f"{topic.name}-2-0"] if rule == "offset" else ["good"])
    settles(topic)
    assert len(service.asked) == (2 if rule == "offset" else 1) and not topic.letters()


def test_an_id_header_that_is_there_twice_and_ids_of_any_size_do_not_stop_the_partition(topic, service, run):
    run(consumer(topic, service.handler, id={"header": "id"}, payload="bytes", breaker={"dead_share": "0%"}))
    topic.send(raw(b"1", headers=[("id", b"a"), ("id", b"b")], partition=0), raw(b"2", headers=[("id", b"x" * 500_000)], partition=0),
               raw(b"3", headers=[("id", b"")], partition=0), raw(b"4", headers=[("id", b"good")], partition=0))
    happens(service, ["good"])
    settles(topic)
    letters = {letter.value: letter for letter in topic.letters()}
    assert set(letters) == {b"1", b"2", b"3"} and {letter.header("semel-error-class") for letter in letters.values()} == {"missing_id"}
    assert list(service.asked) == ["good"]


@pytest.mark.parametrize("rule", ["dead_letter", "duplicate"])
def test_one_id_with_two_payloads_is_told(rule, place, service, run):
    semel = run(consumer(place, service.handler, on_mismatch=rule))
    place.send(message("m", amount=1))
    happens(service, ["m"])
    place.send(message("m", amount=2))
    settles(place)
    assert service.effects() == {"m": 1}
    assert [letter.header("semel-error-class") for letter in place.letters()] == (["mismatch"] if rule == "dead_letter" else [])
    assert semel.metric("semel_payload_mismatch_total") == 1


# ---- strategies of the database ------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("kind", ["postgres", "mysql"])
def test_one_row_that_breaks_a_constraint_is_charged_alone(kind, topic, databases, run):
    rows = Rows(databases(kind))
    topic.send(*[message(f"m{i}", k="k", amount=-1 if i == 40 else 1, partition=0) for i in range(64)])
    run(consumer(topic, rows.handler, retry={"attempts": 2, "backoff": {"initial": "10ms"}}), store=rows.server)
    happens(rows, [f"m{i}" for i in range(64) if i != 40])
    [letter] = dies(topic)
    settles(topic)
    assert letter.header("semel-message-id") == "m40" and letter.header("semel-failed-runs") == "2"
    assert rows.count() == 63


def test_a_second_payment_and_a_payment_for_a_closed_order_are_conflicts(place, databases, run):
    orders = Orders(databases("mysql"))
    orders.open("A", "B")
    orders.open("C", status="CLOSED")
    run(consumer(place, orders.handler, breaker={"dead_share": "0%"}))
    place.send(message("A", transaction="t1", amount=10), message("B", transaction="t2", amount=20))
    happens(orders, ["A", "B"])
    place.send(message("A", transaction="t1", amount=10))  # the same again
    settles(place)
    assert not place.letters()
    place.send(message("A", transaction="t9", amount=10), message("C", transaction="t3", amount=30), message("missing", transaction="t4", amount=1))
    letters = dies(place, 3)
    settles(place)
    assert sorted(letter.header("semel-error-class") for letter in letters) == ["attempts", "conflict", "conflict"]
    assert orders.of("A") == ["PAID", "2", "t1", "10"] and orders.of("C")[0] == "CLOSED"
