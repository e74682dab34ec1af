"""The consumers' figures: Semel on Kafka and RabbitMQ beside bare clients, and on Kafka beside a Spring consumer."""
import json
import os
import re
import shutil
import statistics
import subprocess
import time

from broker_servers import Kafka, RabbitMq
from measuring import ROOT, Failed, Figure, say, short, tail
from sql_servers import Postgres

SPRING = ROOT / "bench" / "peers" / "spring-consumer"
SPRING_BUILT = ROOT / "build" / "peers-spring-consumer"
KEYS = 1000  # of the messages that take time
BARE_BATCH = 256  # most messages of one transaction; the strategy's own limit
PREFETCH = 2000  # of RabbitMQ: what is under way during two syncs
TRANSACTION = 1000  # messages in one of Kafka's own
MIB = 1024


def sync_us(folder, times=200):
    """What one fdatasync of a little takes there."""
    name = folder / "sync"
    descriptor = os.open(name, os.O_WRONLY | os.O_CREAT)
    spent = []
    for _ in range(times):
        os.write(descriptor, b"x" * 4096)
        begun = time.monotonic()
        os.fdatasync(descriptor)
        spent.append(time.monotonic() - begun)
    os.close(descriptor)
    name.unlink()
    return statistics.median(spent) * 1e6


class ConsumerBench:
    def __init__(self, rig):
        self.rig, self.options, self.smoke, self.figures, self.folders = rig, rig.options, rig.options.smoke, [], 0
        self.kafka = Kafka(rig)
        self.versions = {"kafka": self.kafka.version}

    # ---- one measurement each

    def count(self, usual):
        """Messages of a run that takes some seconds."""
        return 3000 if self.smoke else max(1, round(usual / 1000 * min(1, self.options.seconds / 3))) * 1000

    def store_folder(self):
        self.folders += 1
        return self.rig.folder / f"consumer-{self.folders}"

    def semel(self, kind, where, source, messages, *options, store=None, database=None, copy_of=None):
        """A new group (or subscriber) on an empty embedded store, or on a copy of a closed one."""
        folder = None if store or database else self.store_folder()
        if copy_of:
            shutil.copytree(copy_of, folder)
        place = ["--database", database] if database else ["--store", store or folder]
        result = json.loads(self.rig.ask(None, [self.rig.program("bench_consume"), kind, where, source, "--messages", messages, *place,
                                                *options]))
        if folder:
            shutil.rmtree(folder)
        return result

    def on_kafka(self, topic, messages, *options, **place):
        return self.semel("kafka", self.kafka.address, topic, messages, *options, **place)

    def bare_kafka(self, topic, messages):
        return json.loads(self.kafka.client("consume", self.kafka.address, topic, messages))

    def rounds(self, *measured):
        """Each of `measured` once a round; which one begins rotates. The results of each, by round."""
        results = [[] for _ in measured]
        for round_ in range(self.options.pairs):
            for i in range(len(measured)):
                which = (round_ + i) % len(measured)
                results[which].append(measured[which]())
        return results

    def add(self, *args, **more):
        figure = Figure(*args, bench="consumer", **more)
        self.figures.append(figure)
        say(f"  {figure.name}: {short(figure.median)} {figure.unit} ({short(figure.least)}-{short(figure.most)})")

    def ratio(self, name, mine, its, against, **more):
        self.add(name, [m["per_second"] / r["per_second"] for m, r in zip(mine, its)], "x messages/s", [m["per_second"] for m in mine],
                 [r["per_second"] for r in its], against, **more)

    def second_halves(self, results):
        """Of ours, as of Spring's, whose first half is its compiler's."""
        return [{**r, "per_second": r["second_half_per_second"]} for r in results]

    # ---- figures

    def embedded(self):
        """Unique messages and duplicates, on the embedded store, each synced before its position is committed."""
        topic, messages = self.unique, self.messages
        copies = self.kafka.topic(messages, duplicates=50)
        unique, bare, twice = self.rounds(lambda: self.on_kafka(topic, messages), lambda: self.bare_kafka(topic, messages),
                                          lambda: self.on_kafka(copies, messages))
        for results, applied in ((unique, messages), (twice, messages // 2)):
            if any(r["applied"] != applied for r in results):
                raise Failed(f"not {applied} effects: {results}")
        bare_cpu = statistics.median(r["cpu_us"] for r in bare)
        self.add("kafka_store_cpu", [r["cpu_us"] for r in unique], "us CPU/message", at_most=15, aim=10,
                 note=f"all of Semel, start included; bare librdkafka {bare_cpu:.2f}")
        self.ratio("kafka_store_vs_bare", unique, bare, "bare librdkafka, commits once")
        self.add("kafka_store_50_percent_copies_cpu", [r["cpu_us"] for r in twice], "us CPU/message")
        self.add("kafka_store_50_percent_copies_vs_unique", [t["per_second"] / u["per_second"] for t, u in zip(twice, unique)],
                 "x messages/s", [t["per_second"] for t in twice], [u["per_second"] for u in unique], "Semel, unique", at_least=1)
        self.add("kafka_first_message", [r["first_message_seconds"] for r in unique], "s after the start", at_most=0.5,
                 note=f"bare librdkafka {statistics.median(r['first_message_seconds'] for r in bare):.2f} s; group of one checked")

    def work(self):
        messages = self.count(200_000)
        topic = self.kafka.topic(messages, keys=KEYS)
        syncs, ratios, ideals, seconds = [], [], [], []
        for _ in range(self.options.pairs):
            syncs.append(sync_us(self.rig.folder))
            result = self.on_kafka(topic, messages, "--handler", "work", "--concurrency", 100)
            ideals.append(max(result["work_us"] / 100, result["longest_key_us"]) / 1e6)
            seconds.append(result["seconds"])
            ratios.append(result["seconds"] / (ideals[-1] + result["syncs"] * syncs[-1] / 1e6))
        self.add("kafka_work_100_at_once", ratios, "x (ideal + syncs)", seconds, ideals, "s ideal", at_most=1.3,
                 note=f"{messages} messages of 0 to 5 ms, {KEYS} keys; over the ideal alone "
                      f"{statistics.median(s / i for s, i in zip(seconds, ideals)):.2f}; a sync took {statistics.median(syncs):.0f} us")

    def stuck(self):
        """One partition, so that all are behind the first."""
        messages = self.count(200_000)
        topic = self.kafka.topic(messages, partitions=1)
        stuck, free = self.rounds(lambda: self.on_kafka(topic, messages, "--handler", "stuck"), lambda: self.on_kafka(topic, messages))
        growth = [(s["peak_kib"] - f["peak_kib"]) / MIB for s, f in zip(stuck, free)]
        self.add("kafka_stuck_peak_growth", growth, "MiB more at the peak", [s["peak_kib"] / MIB for s in stuck],
                 [f["peak_kib"] / MIB for f in free], "MiB, none stuck",
                 note=f"{stuck[0]['messages']} of {messages} messages were finished behind the first, which did not end")

    def cleaned(self, name, measure):
        """Messages beside the removal of expired records over the same on the same records, which stay."""
        swept, alone = self.rounds(lambda: measure("--clean-up", 1), measure)
        if not all(r["removed"] for r in swept):
            raise Failed(f"{name}: nothing was removed")
        cpu = [statistics.median(r["cpu_us"] for r in results) for results in (swept, alone)]
        self.ratio(name, swept, alone, "the same without clean-up",
                   note="{:.0f} of {} expired records removed meanwhile, {:.0f} a second; CPU a message {:.1f} us with their removal, {:.1f} "
                        "without".format(statistics.median(r["removed"] for r in swept), self.expired,
                                         statistics.median(r["removed"] / r["removing_seconds"] for r in swept), *cpu))

    def clean_up(self):
        """Records of an earlier topic have expired, and are removed while messages come."""
        self.expired = messages = self.count(200_000)
        earlier, topic = self.kafka.topic(self.expired), self.kafka.topic(messages)
        full = self.store_folder()
        self.on_kafka(earlier, self.expired, "--retention", 1, store=full)
        self.cleaned("kafka_store_beside_cleanup", lambda *options: self.on_kafka(topic, messages, *options, copy_of=full))
        shutil.rmtree(full)

        database = Postgres(self.rig)
        self.versions["postgres"] = database.version
        at = f"host={database.folder} port={database.port} user=semel dbname=postgres"

        def empty():
            database.empty()
            self.rig.ask(None, [self.rig.program("bench_inbox"), "postgres", at, "make"])
            database.sql("drop table if exists effects; create table effects (message_id text not null, order_no text not null)")

        def measure(*options):
            empty()
            database.sql("insert into message_dedup select * from expired;"
                         "select setval(pg_get_serial_sequence('message_dedup', 'id'), (select max(id) from message_dedup));"
                         "vacuum analyze message_dedup; checkpoint")
            return self.on_kafka(few, self.count(60_000), *options, database=database.url)
        empty()
        self.on_kafka(earlier, self.expired, "--retention", 1, database=database.url)
        database.sql("create table expired as select * from message_dedup")
        few = self.kafka.topic(self.count(60_000))
        self.cleaned("kafka_transaction_beside_cleanup", measure)
        self.rig.stop(database.process)

    def answers(self):
        """A handler that answers each message to a topic, over Kafka's own transactions."""
        topic, messages, few = self.unique, self.messages, self.count(60_000)
        small = self.kafka.topic(few)
        target = lambda: self.kafka.topic(0)

        def its():
            return json.loads(self.kafka.client("transact", self.kafka.address, small, few, target(), TRANSACTION))
        mine, theirs = self.rounds(lambda: self.on_kafka(topic, messages, "--handler", "answer", "--results", target()), its)
        cpu = [statistics.median(r["cpu_us"] for r in results) for results in (mine, theirs)]
        self.ratio("kafka_answers_vs_transactions", mine, theirs, f"bare librdkafka, transactions of {TRANSACTION}", at_least=5,
                   note="CPU a message {:.1f} us, there {:.1f}. Those promise more: a reader with isolation.level read_committed sees each "
                        "answer once; ours may see one again after a death, under the same id".format(*cpu))

    def redis(self):
        from redis_figures import Server  # with what it needs
        topic, messages = self.unique, self.messages
        server = Server(self.rig, self.options.tcp)
        self.versions["redis"] = server.version
        pairs = 2048 if self.smoke else 50_000

        def ours():
            server.empty()
            return self.on_kafka(topic, messages, store=server.url)

        def bare():
            server.empty()
            return json.loads(self.rig.ask(None, [self.rig.program("bench_redis"), server.url, "pairs", "--batch", 64, "--ahead", 1,
                                                  "--threads", 2, "--operations", pairs]))
        mine, its = self.rounds(ours, bare)
        self.ratio("kafka_store_redis_vs_pairs", mine, its, "pairs of the Redis store, 2 x 64 on the way", at_least=0.80)
        self.rig.stop(server.process)

    def transaction(self):
        """One INSERT beside the message's row, in one transaction; the reference gets batches of the same size."""
        database = Postgres(self.rig)
        self.versions["postgres"] = database.version
        at = f"host={database.folder} port={database.port} user=semel dbname=postgres"
        program, seconds = self.rig.program("bench_inbox"), 0.3 if self.smoke else self.options.seconds
        messages = self.count(60_000)
        topic, sizes = self.kafka.topic(messages), []

        def empty():
            database.empty()
            self.rig.ask(None, [program, "postgres", at, "make"])
            database.sql("drop table if exists effects; create table effects (message_id text not null, order_no text not null)")

        def ours():
            empty()
            mark = "select xact_commit from pg_stat_database where datname = 'postgres'"
            before = int(database.sql(mark))
            result = self.on_kafka(topic, messages, database=database.url)
            done = int(database.sql("select count(*) from effects"))
            if done < messages:
                raise Failed(f"{messages} messages were settled, but {done} effects are there")
            time.sleep(0.6)  # PostgreSQL's backends report at most every half second
            sizes.append(result["messages"] / max(1, int(database.sql(mark)) - before))
            return result

        def bare():
            empty()
            size = min(BARE_BATCH, max(1, round(statistics.median(sizes))))
            return json.loads(self.rig.ask(None, [program, "postgres", at, "bare-insert", 4, size, seconds]))
        mine, its = [], []
        for _ in range(self.options.pairs):  # ours first: it says how large the batches are
            mine.append(ours())
            its.append(bare())
        self.ratio("kafka_transaction_vs_bare", mine, its, "bare client, the same statements", at_least=0.80,
                   note=f"batches of about {statistics.median(sizes):.0f}; the bare client consumes no topic")
        self.rig.stop(database.process)

    def rabbitmq(self):
        broker = RabbitMq(self.rig)
        self.versions["rabbitmq"] = broker.version
        messages = self.count(60_000)

        def counted(measure):
            queue = broker.queue(messages)
            before = broker.cpu_us()
            result = measure(queue)
            return {**result, "broker_us": (broker.cpu_us() - before) / messages}

        def ours(queue):
            return self.semel("rabbitmq", broker.url, queue, messages, "--ordering", "none", "--prefetch", PREFETCH)

        def bare(queue):
            return json.loads(broker.client("consume", broker.port, queue, messages, 500, 250))
        mine, its = self.rounds(lambda: counted(ours), lambda: counted(bare))
        cpu = [statistics.median(r[key] for r in results) for key in ("cpu_us", "broker_us") for results in (mine, its)]
        self.ratio("rabbitmq_store_vs_bare", mine, its, "bare librabbitmq, acknowledges 250 at once", at_least=0.90,
                   note="classic queue, prefetch {}, the bare client's 500; CPU a message {:.1f} us, the bare client's {:.1f}; the broker's "
                        "own {:.1f} and {:.1f} on the same cores".format(PREFETCH, *cpu))
        self.rig.stop(broker.process)

    def java(self, program, topic, messages, *options):
        """One run of a Spring consumer of ours."""
        process = self.rig.start("spring", None, [
            "java", "-Xms512m", "-Xmx512m", "-cp", f"{SPRING_BUILT}/target/classes:{SPRING_BUILT}/libraries/*", program,
            f"--bench.topic={topic}", f"--bench.group=spring-{time.monotonic_ns()}", f"--bench.expect={messages}",
            f"--spring.kafka.bootstrap-servers={self.kafka.address}", *options])
        process.wait(180)
        text = process.log.read_text(errors="replace")
        self.rig.stop(process)
        found = re.search(r"^RESULT (\{.*\})$", text, re.M)
        if not found:
            raise Failed(f"the Spring consumer said nothing: {tail(process.log)}")
        return json.loads(found[1])

    def spring_inbox(self):
        """Effect and id in one transaction, by statements and by callbacks of ours, and as teams with Spring write it."""
        database = Postgres(self.rig)
        at = f"host={database.folder} port={database.port} user=semel dbname=postgres"
        few, many = 3000 if self.smoke else 15_000, self.count(120_000)
        small, large = self.kafka.topic(few), self.kafka.topic(many)

        def empty():
            database.empty()
            self.rig.ask(None, [self.rig.program("bench_inbox"), "postgres", at, "make"])
            database.sql("drop table if exists effects, processed; create table processed (message_id text primary key);"
                         "create table effects (message_id text not null, order_no text not null)")

        def ours(topic, messages, *options):
            empty()
            return self.on_kafka(topic, messages, *options, database=database.url)

        def its():
            empty()
            result = self.java("inbox.Inbox", small, few, f"--spring.datasource.url=jdbc:postgresql://127.0.0.1:{database.port}/postgres",
                               "--spring.datasource.username=semel")
            if (found := int(database.sql("select count(*) from effects"))) != few:
                raise Failed(f"{found} effects of {few} messages")
            return result
        statements, batches, singly, theirs = self.rounds(
            lambda: ours(large, many), lambda: ours(large, many, "--handler", "batchable"),
            lambda: ours(small, few, "--handler", "callback"), its)
        statements, batches, singly = map(self.second_halves, (statements, batches, singly))
        name = "Spring, inbox row and effect in one transaction; second halves"
        self.ratio("kafka_transaction_vs_spring_inbox", statements, theirs, name, at_least=10,
                   note=f"its CPU {statistics.median(t['cpu_us'] for t in theirs):.0f} us a message, start of the JVM included")
        self.ratio("kafka_transaction_batchable_vs_spring_inbox", batches, theirs, name, at_least=5, note="callbacks that share transactions")
        self.ratio("kafka_transaction_callback_vs_spring_inbox", singly, theirs, name, at_least=1.5, aim=2,
                   note="a callback and a transaction for each message, as there")
        self.rig.stop(database.process)

    def spring(self):
        """The usual consumer with Redis: its second half, when it is compiled, over ours."""
        from redis_figures import Server
        server = Server(self.rig, True)
        few, many = 3000 if self.smoke else 20_000, self.count(200_000)  # the JVM needs some thousands to be warm
        small, large = self.kafka.topic(few), self.kafka.topic(many)

        def its():
            server.empty()
            return self.java("bench.App", small, few, f"--spring.data.redis.port={server.port}")
        mine, theirs = self.rounds(lambda: self.on_kafka(large, many), its)
        self.ratio("kafka_store_vs_spring", self.second_halves(mine), theirs, "Spring consumer with Redis; second halves", at_least=20, aim=40,
                   note=f"its CPU {statistics.median(t['cpu_us'] for t in theirs):.0f} us a message, start of the JVM included")
        self.rig.stop(server.process)

    def run(self):
        only = self.options.only
        parts = {"store": self.embedded, "answers": self.answers, "transaction": self.transaction, "redis": self.redis, "rabbitmq": self.rabbitmq,
                 "work": self.work, "stuck": self.stuck, "cleanup": self.clean_up}
        if self.options.java:
            parts.update({"spring": self.spring, "spring-inbox": self.spring_inbox})
        if only and (unknown := set(only) - set(parts)):
            raise Failed(f"--only: there is no {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
        if self.options.java:
            say("bench/run: the Spring consumers of bench/peers/spring-consumer")
            done = subprocess.run([SPRING / "setup"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode != 0:
                raise Failed(f"bench/peers/spring-consumer/setup failed: {done.stdout[-1000:]}")
        self.messages = self.count(200_000)
        self.unique = self.kafka.topic(self.messages)
        self.bare_kafka(self.unique, self.messages)  # the first group of a broker waits until its topic of positions is made
        for name, part in parts.items():
            if not only or name in only:
                part()
        self.rig.stop(self.kafka.process)
        return self.figures
