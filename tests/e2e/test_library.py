"""The library as others use it: installed, found by CMake, linked, run and killed."""
import collections
import os
import random
import re
import subprocess

import pytest

import consumers
import harness
from consumers import raw
from harness import BINARY, ROOT, eventually, run_semel

EXAMPLE = ROOT / "examples/order-consumer"
BUILD = BINARY.parent


def run(*command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{' '.join(map(str, command))}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """The prefix that a build of everything was installed to."""
    prefix = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", BUILD, "--prefix", prefix)
    return prefix


def built(installed, source, folder):
    """The program of a folder like the example's, built outside of this tree's build against what was installed."""
    run("cmake", "-S", source, "-B", folder, "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={installed}", "-DCMAKE_C_COMPILER=clang-19",
        "-DCMAKE_CXX_COMPILER=clang++-19", "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Wpedantic -Werror")
    run("cmake", "--build", folder)
    return folder / "order_consumer"


@pytest.fixture(scope="module")
def program(installed, tmp_path_factory):
    return built(installed, EXAMPLE, tmp_path_factory.mktemp("order-consumer"))


class Program(harness.Semel):
    """A program that links the library, in place of `semel serve`."""

    def __init__(self, folder, program, text, env):
        super().__init__(folder, None, env=env)
        self.program = program
        self.config_file.write_text(text.replace("8788", str(self.admin)))

    def launch(self, *arguments, fault=None, env=None):
        environment = {**os.environ, **self.env, **(env or {})}
        if fault:
            environment["SEMEL_FAULT_POINTS"] = fault
        with open(self.log, "ab") as log, open(self.out, "ab") as out:
            self.process = subprocess.Popen([str(self.program), str(self.config_file)], stdin=subprocess.DEVNULL, stdout=out, stderr=log,
                                            env=environment, cwd=self.folder)
        return self


# Answers of every kind; and a statement that fails, whose exception does not get out.
ANSWERS = r"""
#include <semel/semel.hpp>
#include <cstdio>
#include <stdexcept>

int main(int, char** words) {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    semel::Runtime runtime(words[1]);
    runtime.on("recorded", [&](const semel::Message& m) -> semel::Outcome {
        std::printf("%s attempt %u token %s\n", std::string(m.id).c_str(), m.attempt, m.fencing_token > 0 ? "yes" : "no");
        if (m.id == "again" && m.attempt == 1) return semel::Failed{"not this time"};
        if (m.id == "throws") throw std::runtime_error("thrown by the handler");
        if (m.id == "fatal") return semel::Fatal{"never"};
        if (m.id == "unknown") return semel::Unknown{"who knows"};
        if (m.id == "answers") return semel::Done{semel::Answer{"42", "text/plain", {{"lang", "en"}}}};
        if (m.id == "stop") runtime.stop();
        return semel::Done{};
    });
    runtime.on_transaction("swallows", [](const semel::Message& m, semel::Transaction& tx) -> semel::Outcome {
        tx.execute("INSERT INTO orders (order_no, body) VALUES ($1, 'kept?')", {m.id});
        if (m.id == "bad") {
            try {
                tx.execute("INSERT INTO stock VALUES ($1, $2)", {"apples", 7});
            } catch (const std::exception&) {
            }
        }
        return semel::Done{};
    });
    const int code = runtime.run();
    std::printf("ended with %d\n", code);
    return code;
}
"""


def order(number, sku="apples"):
    return raw(f'{{"orderNo": "{number}"}}'.encode(), key=sku.encode(), id=number)


@pytest.fixture
def shop(databases, kafka):
    server = databases("postgres")
    for statement in re.findall(r"^#   (CREATE TABLE .*);$", (EXAMPLE / "semel.yaml").read_text(), re.M):
        consumers.in_database(server, statement)
    consumers.in_database(server, "INSERT INTO stock VALUES ('apples', 1000), ('pears', 0)")
    return server


def orders_in(server):
    return collections.Counter({number: int(n) for number, n in
                                consumers.in_database(server, "SELECT order_no, count(*) FROM orders GROUP BY order_no")})


def test_only_the_light_header_is_installed_beside_archive_and_program(installed):
    headers = [path for path in (installed / "include").rglob("*") if path.is_file()]
    assert [path.relative_to(installed).as_posix() for path in headers] == ["include/semel/semel.hpp"]
    included = re.findall(r"^#include (\S+)", headers[0].read_text(), re.M)
    assert included and all(re.fullmatch(r"<[a-z_]+>", one) for one in included)
    assert run(installed / "bin/semel", "--version").split()[-1] == (ROOT / "VERSION").read_text().strip()


def test_each_order_is_taken_once_although_the_program_is_killed(program, shop, kafka, tmp_path):
    topic = kafka.topic(4, name="orders")
    text = (EXAMPLE / "semel.yaml").read_text().replace(
        "group: order-consumer", 'group: order-consumer, properties: { session.timeout.ms: "1500", heartbeat.interval.ms: "300" }')
    semel = Program(tmp_path / "program", program, text, {"KAFKA": kafka.address, "ORDERS_URL": shop.url()})
    numbers = [f"o{i}" for i in range(300)]
    chosen = random.Random(11)
    sequence = numbers + chosen.sample(numbers, 60)
    chosen.shuffle(sequence)
    try:
        kafka.send(topic, [order(number) for number in sequence])
        # Its statements are done, and COMMIT is not yet sent.
        semel.launch(fault="consumer.effect.after=kill")
        assert semel.wait_dead(30) == -9 and not orders_in(shop)
        semel.start()
        eventually(lambda: len(orders_in(shop)) >= 50, 60, "it is in the middle")
        semel.kill()
        semel.start()
        kafka.send(topic, [order("none-left", "pears")])
        eventually(lambda: len(orders_in(shop)) >= len(numbers), 60, "all are taken")
        # Given up after its runs, and nothing of them stays.
        eventually(lambda: kafka.lag("order-consumer", topic) == 0, 60, "all is settled")
        assert orders_in(shop) == collections.Counter(numbers)
        assert consumers.in_database(shop, "SELECT sku, left_over FROM stock ORDER BY sku") == [["apples", "700"], ["pears", "0"]]
        [letter] = kafka.read("orders.order-consumer.dlq")
        assert letter.header("semel-message-id") == "none-left"
        state = consumers.state_of(semel, "orders")
        assert state["condition"] == "running" and "exactly once" in state["promise"]
        assert 'semel_effects_applied_total{consumer="orders"}' in semel.ask_admin("/metrics").body.decode()
        assert semel.stop() == 0, semel.said()[-2000:]
        assert "runtime.stopped" in semel.said()
    finally:
        semel.clean_up()


def test_answers_of_callbacks_and_an_end_from_within(installed, shop, kafka, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "main.cpp").write_text(ANSWERS)
    (source / "CMakeLists.txt").write_text((EXAMPLE / "CMakeLists.txt").read_text())
    program = built(installed, source, tmp_path / "built")
    recorded, swallowed, results = consumers.Topic(kafka, 1), consumers.Topic(kafka, 1), consumers.Topic(kafka, 1)
    semel = Program(tmp_path / "program", program, "", {})
    semel.config.setdefault("engine", {})["lease"] = "2s"  # no longer than a store may take to grant
    semel.config["consumers"] = [
        consumers.consumer(recorded, {"handler": "callback", "on_unknown": "hold", "results": {"topic": results.name}}, name="recorded",
                           breaker={"dead_share": "0%"}),
        consumers.consumer(swallowed, {"handler": "callback", "strategy": "transaction", "database": {"postgres": {"url": shop.url()}}},
                           name="swallows", breaker={"dead_share": "0%"})]
    semel.write_config()
    try:
        semel.start()
        recorded.send(*[consumers.message(id) for id in ("plain", "again", "throws", "fatal", "unknown", "answers", "plain")])
        swallowed.send(consumers.message("good"), consumers.message("bad"))
        consumers.settles(recorded)
        consumers.settles(swallowed)
        assert {letter.header("semel-message-id") for letter in recorded.letters()} == {"throws", "fatal", "unknown"}
        assert [letter.header("semel-message-id") for letter in swallowed.letters()] == ["bad"]
        assert orders_in(shop) == {"good": 1}
        [answer] = kafka.read(results.name)
        assert (answer.key, answer.value, answer.header("message-id")) == (b"answers", b"42", "answers")
        assert (answer.header("content-type"), answer.header("lang")) == ("text/plain", "en")
        recorded.send(consumers.message("stop"))
        assert semel.wait_dead(30) == 0, semel.said()[-2000:]
        assert recorded.unsettled() == 0, "what ran at the end is settled"
    finally:
        semel.clean_up()
    said = collections.Counter(semel.out.read_text().splitlines())
    assert said == collections.Counter(
        ["plain attempt 1 token yes", "again attempt 1 token yes", "again attempt 2 token yes", "fatal attempt 1 token yes",
         "unknown attempt 1 token yes", "answers attempt 1 token yes", "stop attempt 1 token yes", "ended with 0",
         *[f"throws attempt {n} token yes" for n in (1, 2, 3)]])


def test_a_callback_that_is_missing_is_said_by_program_and_by_serve(program, tmp_path):
    env = {"KAFKA": "127.0.0.1:1", "ORDERS_URL": "postgresql://semel@127.0.0.1:1/shop"}
    semel = Program(tmp_path / "program", program, (EXAMPLE / "semel.yaml").read_text().replace("name: orders ", "name: other "), env)
    assert semel.launch().wait_dead() == 2
    assert "consumer other: handler: callback needs a program that brings its function" in semel.said()
    served = run_semel("serve", "--config", EXAMPLE / "semel.yaml", env=env)
    assert served.returncode == 2 and "see docs/guides/cpp-consumer.md" in served.stderr
    assert run_semel("serve", "--check", "--config", EXAMPLE / "semel.yaml", env=env).returncode == 0
