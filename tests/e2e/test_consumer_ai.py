"""The handler `ai`: a task on a topic and a request over HTTP under one id are one intent."""
import json

import pytest

import consumers
import harness
from consumers import consumer, settles
from harness import background
from upstream import Gate, error, in_turn, plain

CLIENT = {"name": "shop", "token_env": "SHOP_TOKEN", "may_name_users": True}


@pytest.fixture
def serve(tmp_path, up):
    """serve(place, results) -> a gateway and a consumer of AI tasks in one process."""
    made = []

    def start(place, results, on_duplicate="republish", started=True, **more):
        handler = {"ai": {"tenant": "shop", "user": {"json": "/userId"}, "session": {"json": "/sessionId"}, "prompt": {"json": "/prompt"},
                          "on_duplicate": on_duplicate, "result": {"topic" if place.kind == "kafka" else "queue": results}}}
        entry = consumer(place, {"handler": handler, "id": {"json": "/businessRequestId"}}, **more)
        made.append(harness.Semel(tmp_path / "semel", up, consumers=[entry], clients=[CLIENT], env={"SHOP_TOKEN": "token-of-the-shop"},
                                  engine={"lease": consumers.LEASE}, upstream_options={"api_key_env": "UP_KEY"}))
        made[-1].env["UP_KEY"] = "sk-up"
        return made[-1].start() if started else made[-1]
    yield start
    for semel in made:
        semel.clean_up()


def task(id, prompt="hi", key=None):
    return consumers.raw(json.dumps({"businessRequestId": id, "userId": "u1", "sessionId": "s1", "prompt": prompt}).encode(), key, id=id)


def say(semel, id, prompt="hi"):
    return semel.say(id, prompt, headers={"Authorization": "Bearer token-of-the-shop"})


@pytest.fixture
def results(place):
    return place.server.topic(name=f"{place.name}-results") if place.kind == "kafka" else place.server.queue(f"{place.name}-results")


def test_one_intent_over_http_then_by_message_then_both_at_once_is_paid_once_each_time(serve, place, results, up):
    semel = serve(place, results)
    answer = say(semel, "first")
    place.send(task("first"))
    settles(place)
    assert len(up.paid()) == 1

    place.send(task("second", "another"))
    settles(place)
    again = say(semel, "second", "another")
    assert len(up.paid()) == 2 and again.status == 200

    gate = Gate()
    up.on("fast", plain(gate=gate))
    by_http = background(say, semel, "third", "both")
    place.send(task("third", "both"))
    gate.wait_until_entered()
    gate.open()
    third = by_http.result(30)
    settles(place)
    assert len(up.paid()) == 3 and third.status == 200

    published = {m.header("semel-message-id") or (m.key or b"").decode() or m.id: json.loads(m.value) for m in place.server.read(results)}
    assert set(published) == {"first", "second", "third"}
    for id, http in (("first", answer), ("second", again), ("third", third)):
        assert published[id]["content"] == http.json["content"]


def test_a_task_that_is_delivered_again_after_a_kill_is_paid_once_and_its_result_is_there(serve, topic, up):
    results = topic.server.topic(name=f"{topic.name}-results")
    semel = serve(topic, results, source=topic.source(instance_id="one"))
    semel.kill()
    topic.send(task("m"))
    semel.launch(fault="consumer.settle.after=kill")
    semel.wait_dead(30)
    semel.start()
    settles(topic)
    assert len(up.paid()) == 1
    assert {m.key for m in topic.server.read(results)} == {b"m"}


def test_a_kill_at_any_step_leaves_each_turn_its_result_and_marked_ones_are_published_no_more(serve, place, results, up):
    source = place.source(instance_id="one") if place.kind == "kafka" else place.source()
    semel = serve(place, results, on_duplicate="silent", started=False, source=source)
    points = ["effect.after", "publish.before", "publish.after", "record.after", "settle.after"]
    for point in points:
        place.send(task(point), task(point))
        semel.launch(fault=f"consumer.{point}=kill")
        assert semel.wait_dead(30) == -9, f"{point} was not passed"
        semel.start()
        settles(place)
        semel.kill()
    # Before the mark: the copy on the way and the one after the restart, and no third of the duplicate. From the mark on: one.
    most = {"effect.after": 1, "publish.before": 1, "publish.after": 2, "record.after": 1, "settle.after": 1}
    read = [(m.id or m.key.decode(), m.value) for m in place.server.read(results)]
    for point in points:
        copies = [value for id, value in read if id == point]
        assert 1 <= len(copies) <= most[point] and len(set(copies)) == 1, (point, copies)
    assert len(up.paid()) == len(points)

    semel.start()
    place.send(*[task(point) for point in points])
    settles(place)
    assert len(place.server.read(results)) == len(read) and len(up.paid()) == len(points)


def test_an_upstream_that_fails_once_is_asked_again_under_the_same_id(serve, topic, up):
    up.on("fast", in_turn(error(429), plain()))
    results = topic.server.topic(name=f"{topic.name}-results")
    serve(topic, results)
    topic.send(task("m"))
    settles(topic)
    assert len(up.paid()) == 2 and len(topic.server.read(results)) == 1 and not topic.letters()
