"""A real Kafka broker for tests, and what is looked up in it with a client that is not ours."""
import functools
import itertools
import pathlib
import shutil
import subprocess
import time
from dataclasses import dataclass, field

from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from broker_process import ServerProcess, answers
from harness import ROOT, eventually, free_port

ASK_SECONDS = 15
_names = itertools.count(1)


@functools.cache
def jars():
    """The folder that scripts/fetch-kafka fills once."""
    return pathlib.Path(subprocess.run([str(ROOT / "scripts/fetch-kafka")], check=True, capture_output=True, text=True,
                                       timeout=600).stdout.strip())


@dataclass
class Message:
    """`id` is the AMQP property message-id; Kafka has none. A value None is a tombstone."""
    value: bytes | None
    key: bytes | None = None
    headers: list = field(default_factory=list)
    partition: int = -1
    id: str | None = None

    def header(self, name):
        """The last of that name, as text; None if there is none."""
        found = [v for n, v in self.headers if n == name]
        return None if not found or found[-1] is None else found[-1].decode("latin-1")


class KafkaServer:
    """One broker on free ports. It forgets nothing when it is killed: the page cache survives it."""

    kind = "kafka"

    def __init__(self, *settings):
        self.settings = settings
        self.process = ServerProcess("kafka")
        self.port, self.controller_port = free_port(), free_port()
        self._producer = None
        self._clients = {}
        try:
            shutil.copytree(jars() / "formatted", self.process.folder / "logs")
            self.start()
        except BaseException:
            self.clean_up()
            raise

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    def start(self):
        file = self.process.folder / "server.properties"
        file.write_text("\n".join([
            "process.roles=broker,controller", "node.id=1", f"controller.quorum.voters=1@127.0.0.1:{self.controller_port}",
            f"listeners=PLAINTEXT://{self.address},CONTROLLER://127.0.0.1:{self.controller_port}",
            f"advertised.listeners=PLAINTEXT://{self.address}", "controller.listener.names=CONTROLLER",
            "inter.broker.listener.name=PLAINTEXT", "listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            f"log.dirs={self.process.folder / 'logs'}", "num.partitions=1", "auto.create.topics.enable=false",
            "offsets.topic.replication.factor=1", "offsets.topic.num.partitions=4", "transaction.state.log.replication.factor=1",
            "transaction.state.log.min.isr=1", "transaction.state.log.num.partitions=4",
            "share.coordinator.state.topic.replication.factor=1", "share.coordinator.state.topic.min.isr=1",
            "group.initial.rebalance.delay.ms=0", "group.min.session.timeout.ms=1000", "broker.session.timeout.ms=2000",
            "broker.heartbeat.interval.ms=250", "num.io.threads=4", "num.network.threads=2",
            "log.cleaner.dedupe.buffer.size=4194304", *self.settings]) + "\n")
        self.process.start(["java", "-Xms128m", "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
                            f"-XX:SharedArchiveFile={jars() / 'classes.jsa'}", "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp",
                            (jars() / "classpath").read_text().strip(), "kafka.Kafka", file], lambda: answers(self.port), 60)
        return self

    def kill(self):
        self.process.kill()

    def restart(self):
        self.kill()
        return self.start()

    def clean_up(self):
        for client in self._clients.values():
            client.close()
        self.process.clean_up()

    # ---- topics

    @functools.cached_property
    def admin(self):
        return AdminClient({"bootstrap.servers": self.address, "log_level": 0})

    def topic(self, partitions=1, name=None, **settings):
        """A new topic; its name."""
        name = name or f"topic-{next(_names)}"
        new = NewTopic(name, partitions, 1, config={k.replace("_", "."): str(v) for k, v in settings.items()})
        self.admin.create_topics([new], request_timeout=ASK_SECONDS)[name].result(ASK_SECONDS)

        def led():
            found = self.admin.list_topics(name, timeout=ASK_SECONDS).topics[name]
            return found.error is None and len(found.partitions) == partitions and all(p.leader >= 0 for p in found.partitions.values())
        eventually(led, what=f"{name} has its partitions")
        return name

    def delete_topic(self, name):
        self.admin.delete_topics([name], request_timeout=ASK_SECONDS)[name].result(ASK_SECONDS)
        eventually(lambda: name not in self.admin.list_topics(timeout=ASK_SECONDS).topics, what=f"{name} is gone")

    def exists(self, name):
        return name in self.admin.list_topics(timeout=ASK_SECONDS).topics

    # ---- messages

    def send(self, topic, messages):
        """Publishes them in order and waits until all are confirmed. Without key and partition they go to any one."""
        if self._producer is None:
            self._producer = Producer({"bootstrap.servers": self.address, "partitioner": "murmur2_random", "linger.ms": 5, "log_level": 0,
                                       "enable.idempotence": True, "sticky.partitioning.linger.ms": 0})
        refused = []

        def told(error, _):
            if error:
                refused.append(error)
        for message in messages:
            while True:
                try:
                    self._producer.produce(topic, message.value, message.key, message.partition, on_delivery=told,
                                           headers=message.headers or None)
                    break
                except BufferError:
                    self._producer.poll(0.05)
            self._producer.poll(0)
        assert self._producer.flush(60) == 0 and not refused, refused

    def read(self, topic):
        """All messages of a topic that are there now, partition by partition."""
        if not self.exists(topic):
            return []
        consumer = Consumer({"bootstrap.servers": self.address, "group.id": "looks", "enable.auto.commit": False, "log_level": 0,
                             "auto.offset.reset": "earliest", "enable.partition.eof": True, "fetch.wait.max.ms": 20})
        try:
            partitions = [TopicPartition(topic, p, 0) for p in consumer.list_topics(topic, timeout=ASK_SECONDS).topics[topic].partitions]
            consumer.assign(partitions)
            found, open_ends, end = [], len(partitions), time.monotonic() + 60
            while open_ends:
                assert time.monotonic() < end, f"{topic} has no end"
                got = consumer.poll(0.2)
                if got is None:
                    continue
                if got.error():
                    if got.error().name() == "_PARTITION_EOF":
                        open_ends -= 1
                    elif got.error().fatal():
                        raise KafkaException(got.error())
                    continue
                found.append(Message(got.value(), got.key(), got.headers() or [], got.partition()))
            return found
        finally:
            consumer.close()

    # Committed offsets are asked for by a client of that group which never joins it: the admin client of librdkafka 2.16 dies of an
    # answer that says "coordinator load in progress".

    def _client(self, group):
        if group not in self._clients:
            self._clients[group] = Consumer({"bootstrap.servers": self.address, "group.id": group, "enable.auto.commit": False,
                                             "log_level": 0})
        return self._clients[group]

    def _partitions(self, topic):
        return [TopicPartition(topic, p) for p in self._client("looks").list_topics(topic, timeout=ASK_SECONDS).topics[topic].partitions]

    def committed(self, group, topic):
        """partition -> offset, of those for which there is one."""
        def ask():
            found = self._client(group).committed(self._partitions(topic), timeout=ASK_SECONDS)
            return {p.partition: p.offset for p in found if p.offset >= 0}
        return self._patiently(ask)

    def set_committed(self, group, topic, offsets):
        """Of a group without members, as an operator resets it."""
        wanted = [TopicPartition(topic, p, o) for p, o in offsets.items()]
        self._patiently(lambda: self._client(group).commit(offsets=wanted, asynchronous=False))

    def ends(self, topic):
        """partition -> the end of its log."""
        def ask():
            looks = self._client("looks")
            return {p.partition: looks.get_watermark_offsets(p, timeout=ASK_SECONDS, cached=False)[1] for p in self._partitions(topic)}
        return self._patiently(ask)

    def lag(self, group, topic):
        committed = self.committed(group, topic)
        return sum(end - committed.get(p, 0) for p, end in self.ends(topic).items())

    def members(self, group):
        def ask():
            return self.admin.describe_consumer_groups([group], request_timeout=ASK_SECONDS)[group].result(ASK_SECONDS).members
        return self._patiently(ask)

    def working_members(self, group):
        """How many have partitions."""
        return sum(1 for member in self.members(group) if member.assignment.topic_partitions)

    @staticmethod
    def _patiently(ask):
        """A broker that has just started, and a topic that has just been made, refuse for a moment."""
        end = time.monotonic() + 20
        while True:
            try:
                return ask()
            except KafkaException:
                if time.monotonic() > end:
                    raise
                time.sleep(0.05)
