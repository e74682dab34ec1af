"""What handlers answer is sealed at rest, published as it was said, and gone with the consumer's data key."""
import secrets

import pytest

from consumers import Service, Topic, consumer, message, settles
from harness import eventually

TELLTALE = "telltale-" + secrets.token_hex(12)


class Saying(Service):
    """Answers with the telltale and the message's id."""

    def _handle(self, call, reply):
        id = call.header("Idempotency-Key")
        with self._state:
            self.happened.append(id)
        reply.json(200, {"said": f"{TELLTALE} to {id}"})


@pytest.fixture
def saying():
    service = Saying()
    yield service
    service.close()


def published(results, id):
    return [one.value.decode() for one in results.server.read(results.name) if one.header("message-id") == id]


def erase(semel, *arguments):
    return semel.command_line("record", "erase", "--config", semel.config_file, *arguments)


@pytest.mark.parametrize("own_store", [False, True])
def test_answers_are_in_no_file_and_after_an_erasure_duplicates_publish_nothing(own_store, topic, saying, run):
    results = Topic(topic.server)
    entry = consumer(topic, saying.handler, results={"topic": results.name, "on_duplicate": "republish"})
    semel = run(entry, started=False)
    if own_store:
        entry["store"] = {"rocksdb": {"path": str(semel.folder / "own-store")}}
        semel.write_config()
    semel.start()
    topic.send(message("m"))
    settles(topic)
    semel.stop()  # what memory held is in the files
    assert semel.files_holding(TELLTALE) == []
    semel.start()
    topic.send(message("m"))
    settles(topic)
    assert published(results, "m") == [f'{{"said": "{TELLTALE} to m"}}'] * 2

    assert erase(semel, "--consumer", "nobody", "--yes").returncode != 0
    if own_store:
        semel.stop()  # its store is embedded: nobody else may have it open
        eventually(lambda: not topic.server.members(topic.group), 30, "the group is empty")
    done = erase(semel, "--consumer", "under-test", "--yes")
    assert done.returncode == 0, done.stderr
    if own_store:
        semel.start()
    topic.send(message("m"), message("later"))
    settles(topic, 30)
    eventually(lambda: semel.metric("semel_results_gone_total") == 1, 30, "it is counted")
    assert len(published(results, "m")) == 2 and len(published(results, "later")) == 1
    assert saying.effects() == {"m": 1, "later": 1}
    semel.stop()
    assert semel.files_holding(TELLTALE) == []
