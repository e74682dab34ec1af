"""The examples of consumers, run as they stand."""
import json
import subprocess
import sys
import urllib.request

import pytest

import consumers
import harness
from consumers import raw
from harness import ROOT, eventually

EXAMPLES = ROOT / "examples"


def example(name, tmp_path, env, **replaced):
    """A process with the example's file, on ports of its own."""
    semel = harness.Semel(tmp_path / name, None, env=env)
    text = (EXAMPLES / name / "semel.yaml").read_text().replace("8788", str(semel.admin)).replace("8787", str(semel.port))
    for old, new in replaced.items():
        text = text.replace(old, new)
    semel.config_file.write_text(text)
    return semel


def as_json(id, **body):
    return raw(json.dumps(body).encode(), id=id)


def test_payments_without_code(rabbitmq, databases, tmp_path):
    """Paid once, whatever comes twice; a payment for a closed order and a second payment are dead letters."""
    server = databases("mysql")
    schema = (EXAMPLES / "payments/semel.yaml").read_text().split("#   ", 1)[1].split(";")[0].replace("\n#", "\n")
    consumers.in_database(server, schema)
    consumers.in_database(server, "INSERT INTO orders (order_no, status, version) VALUES ('A', 'PENDING', 1), ('B', 'PROCESSING', 1), ('C', 'CLOSED', 7)")
    queue = rabbitmq.queue("payment-result")
    semel = example("payments", tmp_path, {"RABBITMQ_URL": rabbitmq.url, "SHOP_URL": server.url()})

    def payment(id, order, transaction, amount):
        return as_json(id, messageId=id, orderNo=order, transactionId=transaction, paidAmount=amount)
    try:
        semel.start()
        rabbitmq.send(queue, [payment("m1", "A", "t1", 1999), payment("m2", "B", "t2", 5), payment("m1", "A", "t1", 1999),
                              payment("m3", "C", "t3", 7)])
        eventually(lambda: rabbitmq.unsettled(queue) == 0, 60, "all is settled")
        # A queue has no order: sent together with the first, this could be the one that pays.
        rabbitmq.send(queue, [payment("m4", "A", "t9", 1999)])
        eventually(lambda: rabbitmq.unsettled(queue) == 0, 60, "the second payment is settled")
        assert {message.id for message in rabbitmq.read("payment-result.dlq")} == {"m3", "m4"}
        rows = consumers.in_database(server, "SELECT order_no, status, version, transaction_id, paid_amount FROM orders ORDER BY order_no")
        assert rows == [["A", "PAID", "2", "t1", "1999"], ["B", "PAID", "2", "t2", "5"], ["C", "CLOSED", "7", "NULL", "NULL"]]
    finally:
        semel.clean_up()


def test_an_ai_worker_without_code(kafka, up, tmp_path):
    """A task that comes twice is paid once, and its answer is there."""
    tasks, results = kafka.topic(name="ai-tasks"), kafka.topic(name="ai-results")
    semel = example("ai-worker", tmp_path, {"KAFKA": kafka.address, "OPENAI_API_KEY": "sk-example", "SEMEL_SHOP_TOKEN": "token-of-the-example"},
                    **{"https://api.openai.com": up.url})
    try:
        semel.start()
        task = as_json("t1", businessRequestId="t1", userId="u", sessionId="s", prompt="hello")
        kafka.send(tasks, [task, task])
        eventually(lambda: kafka.lag("ai-worker", tasks) == 0, 20, "both are settled")
        # A task that joined the running call publishes the same answer under the same id once more.
        found = kafka.read(results)
        assert {result.key for result in found} == {b"t1"} and len({result.value for result in found}) == 1
        assert json.loads(found[0].value)["content"].startswith("answer of call 1") and len(up.paid()) == 1
    finally:
        semel.clean_up()


@pytest.mark.parametrize("command", [[sys.executable, "python/orders.py"], ["node", "node/orders.mjs"]], ids=["python", "node"])
def test_the_services_in_python_and_node_take_each_order_once(command, topic, run):
    """An order before the one it follows waits; one that is wrong is a dead letter; a second copy changes nothing."""
    service = subprocess.Popen([*command, "--port", "0"], cwd=EXAMPLES / "handlers", stdout=subprocess.PIPE, text=True)
    try:
        url = service.stdout.readline().split()[-1]
        run(consumers.consumer(topic, handler={"http": {"url": url}}, id={"header": "id"}, breaker={"dead_share": "0%"}))

        def order(id, **body):
            return raw(json.dumps(body).encode(), b"k", [("id", id.encode())])
        topic.send(order("m2", orderNo="A-2", amount=1, after="A-1"), order("m1", orderNo="A-1", amount=12.5),
                   order("m1", orderNo="A-1", amount=12.5), order("m3", amount="wrong"))
        consumers.settles(topic)
        assert [letter.header("semel-message-id") for letter in topic.letters()] == ["m3"]
        found = json.loads(urllib.request.urlopen(url, timeout=10).read())
        text = json.dumps(found)
        assert text.count("A-2") == 1 and text.count('"amount": 12.5') == 1
    finally:
        service.kill()
        service.wait(20)
        service.stdout.close()
