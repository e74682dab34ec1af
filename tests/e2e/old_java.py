"""A consumer in Java as teams have it before they come to us: it keeps a table message_dedup by hand. What it does: old_consumer/."""
import atexit
import functools
import pathlib
import shutil
import subprocess
import tempfile

import kafka_server
from broker_process import ServerProcess
from consumers import in_database
from harness import ROOT, eventually
from sql_server import DATABASE, PASSWORD, USER

SOURCE = ROOT / "tests/e2e/old_consumer/OldConsumer.java"
DRIVERS = {"postgres": "/usr/share/java/postgresql.jar", "mysql": "/usr/share/java/mariadb-java-client.jar"}
SCHEMES = {"postgres": "postgresql", "mysql": "mariadb"}
START_SECONDS = 60  # of a virtual machine, on a machine that has much else to do


@functools.cache
def compiled():
    """The folder of its classes. The compiler is Debian's ecj, which needs no JDK."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="semel-old-consumer-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    done = subprocess.run(["ecj", "-17", "-proc:none", "-cp", class_path(), "-d", str(folder), str(SOURCE)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def class_path(*more):
    return ":".join([*map(str, more), (kafka_server.jars() / "classpath").read_text().strip()])


def make_table(server):
    """The table that articles show."""
    postgres = server.kind == "postgres"
    number, small = ("bigserial PRIMARY KEY", "smallint") if postgres else ("bigint AUTO_INCREMENT PRIMARY KEY", "tinyint")
    time = "timestamp" if postgres else "datetime"
    in_database(server, f"CREATE TABLE message_dedup (id {number}, message_id varchar(64) NOT NULL UNIQUE, business_key varchar(128), "
                        f"status {small} NOT NULL, retry_count int NOT NULL DEFAULT 0, error_message text, created_at {time} NULL, "
                        f"updated_at {time} NULL, expire_at {time} NULL)")


class OldConsumer:
    """One process of it, started."""

    def __init__(self, topic, server):
        self.process = ServerProcess("old-consumer")
        url = f"jdbc:{SCHEMES[server.kind]}://127.0.0.1:{server.port}/{DATABASE}?user={USER}&password={PASSWORD}"
        try:
            self.process.start(["java", "-Xmx128m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1",
                                "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-cp", class_path(compiled(), DRIVERS[server.kind]),
                                "OldConsumer", topic.server.address, topic.group, topic.name, url],
                               lambda: "consumes\n" in self.process.said(), START_SECONDS)
        except BaseException:
            self.process.clean_up()
            raise

    def says(self, words):
        def found():
            assert self.process.process.poll() is None, self.process.said()[-2000:]
            return words in self.process.said()
        eventually(found, START_SECONDS, f"the old consumer says: {words}")

    def kill(self):
        """SIGKILL."""
        self.process.kill()

    def clean_up(self):
        self.process.clean_up()
