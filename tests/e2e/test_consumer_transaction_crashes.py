"""A program with callbacks inside transactions that is killed, or kills itself: who is blamed. The library as others use it."""
import time

import pytest

import consumers
from consumers import Rows, consumer, happens, message, settles
from harness import eventually
from test_library import EXAMPLE, Program, built, installed  # noqa: F401: a fixture

# Says whom it has begun; one message takes the process along.
CALLBACK = r"""
#include <semel/semel.hpp>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>

int main(int, char** words) {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    semel::Runtime runtime(words[1]);
    const std::string statement = std::getenv("STATEMENT");
    runtime.on_transaction("under-test", [&](const semel::Message& m, semel::Transaction& tx) -> semel::Outcome {
        std::printf("%s\n", std::string(m.id).c_str());
        tx.execute(statement, {m.id});
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        if (m.id == "poison") std::raise(SIGSEGV);
        return semel::Done{};
    }, std::getenv("BATCHABLE") != nullptr);
    return runtime.run();
}
"""


@pytest.fixture(scope="module")
def program(installed, tmp_path_factory):  # noqa: F811
    source = tmp_path_factory.mktemp("source")
    (source / "main.cpp").write_text(CALLBACK)
    (source / "CMakeLists.txt").write_text((EXAMPLE / "CMakeLists.txt").read_text())
    return built(installed, source, tmp_path_factory.mktemp("built"))


@pytest.fixture
def callbacks(program, tmp_path, request):
    """callbacks(place, rows, ...): the program, not started."""
    made = []

    def make(place, rows, crashes=5, batchable=False):
        mark = "$1" if rows.server.kind == "postgres" else "?"
        env = {"STATEMENT": f"INSERT INTO effects (message_id, k, amount) VALUES ({mark}, 'k', 1)", **({"BATCHABLE": "1"} if batchable else {})}
        semel = Program(tmp_path / f"program-{len(made)}", program, "", env)
        # A static member takes its partitions over without waiting for the end of its own session.
        source = place.source(instance_id="one") if place.kind == "kafka" else place.source()
        semel.config["consumers"] = [consumer(place, rows.database, {"handler": "callback", "strategy": "transaction"}, source=source,
                                              retry={"attempts": 3, "crashes": crashes})]
        semel.write_config()
        made.append(semel)
        return semel
    yield make
    for semel in made:
        semel.clean_up()


def said(semel):
    return semel.out.read_text().splitlines() if semel.out.exists() else []


@pytest.mark.parametrize("batchable", [False, True], ids=["singly", "batchable"])
@pytest.mark.parametrize("database", ["postgres", "mysql"])
def test_ten_kills_with_a_hundred_good_messages_in_flight_make_no_dead_letter(database, batchable, kafka, databases, callbacks):
    topic, rows = consumers.Topic(kafka), Rows(databases(database))
    ids = [f"m{i}" for i in range(100)]
    semel = callbacks(topic, rows, batchable=batchable)
    topic.send(*[message(id) for id in ids])
    semel.start()
    for kill in range(10):
        before = len(said(semel)) if kill else 0
        eventually(lambda: len(said(semel)) > before, 30, f"one runs before kill {kill + 1}")
        semel.kill()
        semel.start()
    assert happens(rows, ids, 60) == dict.fromkeys(ids, 1)
    settles(topic)
    assert not topic.letters()
    assert semel.stop() == 0
    for table in ("semel_flights", "semel_crashes"):
        assert consumers.in_database(rows.server, f"SELECT count(*) FROM {table}") == [["0"]], "nothing is left named or counted"


def test_a_callback_that_kills_the_process_is_given_up_and_its_99_neighbours_are_not(place, databases, callbacks):
    rows = Rows(databases("postgres"))
    ids = [f"m{i}" for i in range(99)]
    semel = callbacks(place, rows, crashes=2)
    place.send(*[message(id) for id in ids[:50]], message("poison"), *[message(id) for id in ids[50:]])
    deaths = 0
    for _ in range(20):
        semel.launch()
        eventually(lambda: semel.process.poll() is not None or place.letters(), 60, "it dies, or gives up")
        if semel.process.poll() is None:
            break
        assert semel.process.poll() == -11
        deaths += 1
    assert deaths == 4, "two beside others, two alone"
    assert happens(rows, ids, 60) == dict.fromkeys(ids, 1)
    settles(place)
    [letter] = place.letters()
    assert letter.header("semel-message-id") == "poison" and letter.header("semel-error-class") == "crashes"
    time.sleep(0.2)
    assert semel.process.poll() is None, "and it lives"
