"""What handlers answer is published: recorded first, the same bytes under the same id however often the process dies."""
import collections
import json

import pytest

import consumers
from consumers import Queue, Service, Topic, consumer, happens, message, settles

# In the order in which a message passes them.
POINTS = ["effect.after", "publish.before", "publish.after", "record.after", "settle.after"]


class Answering(Service):
    """Never answers the same twice: what is published shows which run it is of."""

    def _handle(self, call, reply):
        id = call.header("Idempotency-Key")
        with self._state:
            self.happened.append(id)
            run = len(self.happened)
        reply.json(200, {"re": id, "run": run})


@pytest.fixture
def answering():
    service = Answering()
    yield service
    service.close()


@pytest.fixture
def results(place):
    """Where answers go: a topic or queue that can be read by a consumer, too."""
    return Topic(place.server) if place.kind == "kafka" else Queue(place.server)


def answers(place, service, target, on_duplicate="silent", **more):
    """A consumer whose handler's answers are published."""
    return consumer(place, service.handler, name="asks", results={"topic" if target.kind == "kafka" else "queue": target.name,
                                                                  "on_duplicate": on_duplicate}, **more)


def published(results):
    """id -> the bodies of all copies."""
    found = collections.defaultdict(list)
    for one in results.server.read(results.name):
        id = one.header("message-id") if results.kind == "kafka" else one.id
        assert results.kind == "rabbitmq" or one.key.decode() == id
        found[id].append(one.value)
    return found


def kill_at_each_step(semel, place, ids_of, ends):
    for step, point in enumerate(POINTS):
        ids = ids_of(step)
        place.send(*[message(id, k="k") for id in [*ids, *ids[:2]]])
        semel.launch(fault=f"consumer.{point}=kill")
        assert semel.wait_dead(30) == -9, f"{point} was not passed"
        semel.start()
        ends(ids)
        semel.kill()


@pytest.mark.parametrize("strategy", ["store", "table"])
def test_a_kill_at_any_step_leaves_each_message_its_answer_and_all_copies_are_equal(strategy, place, answering, results, run, service, request):
    parts = {}
    if strategy == "table":
        server = request.getfixturevalue("databases")("postgres")
        parts = {"strategy": "table", "database": {"postgres": {"url": server.url()}}}
    source = place.source(instance_id="one") if place.kind == "kafka" else place.source()
    # What a killed process had claimed waits for the end of its lease.
    semel = run(answers(place, answering, results, source=source, concurrency=4, **parts), started=False, engine={"lease": "1s"})
    kill_at_each_step(semel, place, lambda step: [f"m{step}-{i}" for i in range(6)], lambda ids: settles(place, 30))
    wanted = {f"m{step}-{i}" for step in range(len(POINTS)) for i in range(6)}
    found = published(results)
    assert set(found) == wanted and not place.letters()
    for id, bodies in found.items():
        assert len(set(bodies)) == 1 and json.loads(bodies[0])["re"] == id, bodies
    again = [id for id, bodies in found.items() if len(bodies) > 1]
    assert len(again) <= 4 * len(POINTS), again  # what was on its way when it died, at most

    # Who reads them as any at-least-once source sees each once.
    reads = run(consumer(results, service.handler, name="reads", business_key=None,
                         id={"header": "message-id"} if results.kind == "kafka" else {"property": "message-id"}))
    assert set(happens(service, wanted).values()) == {1}
    settles(results)
    assert reads.metric("semel_duplicates_suppressed_total") == sum(len(bodies) - 1 for bodies in found.values())


def test_a_duplicate_of_a_published_answer_publishes_nothing_also_after_a_restart(place, answering, results, run):
    semel = run(answers(place, answering, results))
    place.send(message("m"))
    settles(place)
    for _ in range(2):
        place.send(message("m"), message("m"))
        settles(place)
        semel.stop()
        semel.start()
    place.send(message("last"))
    settles(place)
    assert {id: len(bodies) for id, bodies in published(results).items()} == {"m": 1, "last": 1}


def test_republish_answers_each_duplicate_with_the_recorded_bytes(place, answering, results, run):
    semel = run(answers(place, answering, results, on_duplicate="republish"))
    place.send(message("m"))
    settles(place)
    semel.stop()
    semel.start()
    place.send(message("m"), message("m"))
    settles(place)
    bodies = published(results)["m"]
    assert len(bodies) == 3 and len(set(bodies)) == 1
    assert answering.effects() == {"m": 1}
    assert semel.metric("semel_results_total", consumer="asks") == semel.metric("semel_results_again_total", consumer="asks") == 2
    assert semel.metric("semel_results_failed_total", consumer="asks") == 0


def test_answers_go_to_an_exchange_with_the_queues_name_as_routing_key(rabbitmq, answering, run):
    place, results = Queue(rabbitmq), Queue(rabbitmq)
    connection = rabbitmq.connect()
    channel = connection.channel()
    channel.exchange_declare("answers", "direct", durable=True)
    channel.queue_bind(results.name, "answers", place.name)
    connection.close()
    run(consumer(place, answering.handler, results={"exchange": "answers"}))
    place.send(message("m"))
    settles(place)
    assert {one.id: json.loads(one.value)["re"] for one in rabbitmq.read(results.name)} == {"m": "m"}


def test_an_answer_that_is_too_large_is_a_dead_letter_and_an_empty_one_is_none(topic, service, run):
    results = Topic(topic.server)
    service.default = lambda call, reply: reply.answer(
        200, b"x" * (256 * 1024 + (call.json["id"] == "large")) if call.json["id"] != "empty" else b"", content_type="text/plain")
    run(answers(topic, service, results))
    topic.send(message("large"), message("largest"), message("empty"))
    settles(topic)
    letters = topic.letters()
    assert [letter.header("semel-message-id") for letter in letters] == ["large"]
    assert {id: len(bodies[0]) for id, bodies in published(results).items()} == {"largest": 256 * 1024}


def test_a_missing_target_is_refused_by_name(topic, service, run):
    semel = run(consumer(topic, service.handler, results={"topic": "nobody-made-it"}), started=False)
    semel.launch()
    assert semel.wait_dead(30) != 0
    assert "nobody-made-it does not exist" in semel.said()
