"""Kafka and RabbitMQ of a run: one broker each, on free ports, in the run's folder. Not pinned: a broker has many threads."""
import os
import pathlib
import pwd
import secrets
import shutil
import subprocess

from measuring import ROOT, Failed, answers, free_port


def rabbitmq_programs():
    """Debian's wrapper in /usr/sbin changes the user by itself and reads /etc."""
    found = sorted(pathlib.Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*/sbin"))
    return found[-1] if found else None


class Kafka:
    """The real broker, as scripts/fetch-kafka brings it; one of its own makes no topic by itself."""

    def __init__(self, rig):
        fetched = subprocess.run([ROOT / "scripts" / "fetch-kafka"], capture_output=True, text=True)
        if fetched.returncode != 0:
            raise Failed(f"scripts/fetch-kafka: {fetched.stderr.strip()[-500:]}")
        jars = pathlib.Path(fetched.stdout.strip())
        self.version = jars.name.removeprefix("kafka-")
        self.rig, self.port, self.topics = rig, free_port(), 0
        controller = free_port()
        folder = rig.folder / "kafka"
        folder.mkdir()
        shutil.copytree(jars / "formatted", folder / "logs")
        settings = folder / "server.properties"
        settings.write_text("\n".join([
            "process.roles=broker,controller", "node.id=1", f"controller.quorum.voters=1@127.0.0.1:{controller}",
            f"listeners=PLAINTEXT://{self.address},CONTROLLER://127.0.0.1:{controller}", f"advertised.listeners=PLAINTEXT://{self.address}",
            "controller.listener.names=CONTROLLER", "inter.broker.listener.name=PLAINTEXT",
            "listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT", f"log.dirs={folder / 'logs'}",
            "auto.create.topics.enable=false", "offsets.topic.replication.factor=1", "offsets.topic.num.partitions=4",
            "transaction.state.log.replication.factor=1", "transaction.state.log.min.isr=1",
            "share.coordinator.state.topic.replication.factor=1", "share.coordinator.state.topic.min.isr=1",
            "group.initial.rebalance.delay.ms=0", "group.min.session.timeout.ms=1000", "num.io.threads=4", "num.network.threads=2"]) + "\n")
        self.process = rig.start("kafka", None, [
            "java", "-Xms512m", "-Xmx512m", "-XX:+UseG1GC", f"-XX:SharedArchiveFile={jars / 'classes.jsa'}", "-Xshare:auto",
            "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", (jars / "classpath").read_text().strip(), "kafka.Kafka", settings])
        rig.until(self.process, f"port {self.port}", lambda: answers(self.port), 90)

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    def client(self, *words):
        return self.rig.ask(None, [self.rig.program("bench_kafka_client"), *words])

    def topic(self, messages, duplicates=0, keys=0, partitions=8):
        """A new topic with messages of 200 bytes; its name."""
        self.topics += 1
        name = f"topic-{self.topics}"
        self.client("create", self.address, name, partitions)
        self.client("fill", self.address, name, messages, duplicates, keys)
        return name


class RabbitMq:
    """One node. It runs as the package's user, whose the folder must be."""

    USER = "rabbitmq"

    def __init__(self, rig):
        self.rig, self.port, self.queues = rig, free_port(), 0
        rig.folder.chmod(0o711)  # another user goes through
        folder = rig.folder / "rabbitmq"
        for name in ("", "home", "mnesia", "logs"):
            (folder / name).mkdir()
        cookie = folder / "home" / ".erlang.cookie"
        cookie.write_text(secrets.token_hex(10))
        cookie.chmod(0o400)
        (folder / "enabled_plugins").write_text("[].\n")
        (folder / "rabbitmq.conf").write_text("\n".join([
            f"listeners.tcp.1 = 127.0.0.1:{self.port}", "vm_memory_high_watermark.absolute = 1GiB", "disk_free_limit.absolute = 50MB",
            "log.file.level = warning", "log.console = false"]) + "\n")
        as_user = ["setpriv", "--pdeathsig", "TERM"]
        if os.geteuid() == 0:
            owner = pwd.getpwnam(self.USER)
            for path in (folder, *folder.rglob("*")):
                os.chown(path, owner.pw_uid, owner.pw_gid)
            as_user += [f"--reuid={self.USER}", f"--regid={self.USER}", "--init-groups"]
        epmd_port = free_port()
        environment = {
            "HOME": f"{folder}/home", "ERL_EPMD_PORT": epmd_port, "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"semel{self.port}@localhost", "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1", "RABBITMQ_NODE_PORT": self.port,
            "RABBITMQ_DIST_PORT": free_port(), "RABBITMQ_CONFIG_FILE": f"{folder}/rabbitmq.conf",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/enabled_plugins", "RABBITMQ_MNESIA_BASE": f"{folder}/mnesia",
            "RABBITMQ_LOG_BASE": f"{folder}/logs", "RABBITMQ_PID_FILE": f"{folder}/rabbitmq.pid", "RABBITMQ_CONF_ENV_FILE": "/dev/null",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}"}
        given = ["env", *(f"{name}={value}" for name, value in environment.items())]
        # Or the node would start one that outlives it.
        self.epmd = rig.start("epmd", None, [*as_user, "epmd", "-port", epmd_port, "-address", "127.0.0.1"])
        rig.until(self.epmd, f"port {epmd_port}", lambda: answers(epmd_port))
        # The start script hands its signals on to the node.
        self.process = rig.start("rabbitmq", None, [*as_user, *given, rabbitmq_programs() / "rabbitmq-server"])
        rig.until(self.process, f"port {self.port}", lambda: answers(self.port), 120)
        self.version = rabbitmq_programs().parent.name.removeprefix("rabbitmq_server-")

    @property
    def url(self):
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    def client(self, *words):
        return self.rig.ask(None, [self.rig.program("bench_rabbitmq_client"), *words])

    def cpu_us(self):
        """Processor time of the node so far, the start script's children included."""
        children = {}
        for entry in pathlib.Path("/proc").iterdir():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split() if entry.name.isdigit() else None
            except OSError:  # it has ended
                continue
            if fields:
                children.setdefault(int(fields[1]), []).append((int(entry.name), int(fields[11]) + int(fields[12])))
        ticks, parents = 0, [self.process.pid]
        while parents:
            for pid, its in children.get(parents.pop(), []):
                ticks += its
                parents.append(pid)
        return ticks / os.sysconf("SC_CLK_TCK") * 1e6

    def queue(self, messages, kind="classic"):
        """A new queue with messages of 200 bytes; its name."""
        self.queues += 1
        name = f"queue-{self.queues}"
        self.client("fill", self.port, name, messages, kind)
        return name
