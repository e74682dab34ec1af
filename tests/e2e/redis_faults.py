"""Redis servers with replicas and sentinels, for the tests of their faults."""
import pathlib
import subprocess

from harness import eventually, free_port
from redis_server import RedisServer

KEEPS = ("--appendonly", "yes", "--appendfsync", "always")


def record_keys(server):
    return server.keys("semel:*:r:*")


class Replicated:
    """A master, its replicas and three sentinels (`sentinels=0`: none). Replication runs under a user of its own, so that `part()` can
    end it while everybody lives."""

    NAME = "main"

    def __init__(self, folder, replicas=2, sentinels=3, env_of_replicas=None):
        folder = pathlib.Path(folder)
        user = ("--user", "copier", "on", ">copy", "+@all", "~*", "&*", "--masteruser", "copier", "--masterauth", "copy")
        self.master = RedisServer(folder / "master", *user, *KEEPS)
        self.replicas = [RedisServer(folder / f"replica{i}", *user, "--replicaof", "127.0.0.1", str(self.master.port),
                                     env=env_of_replicas) for i in range(replicas)]
        eventually(self.copied, 30, "the replicas have copied")
        self.ports = [free_port() for _ in range(sentinels)]
        self.processes = []
        for port in self.ports:
            self._start_sentinel(folder / f"sentinel{port}", port)
        for port in self.ports:
            eventually(lambda p=port: self._knows_all(p), 30, "the sentinels know each other and the replicas")

    def _start_sentinel(self, folder, port):
        folder.mkdir()
        file = folder / "sentinel.conf"
        file.write_text(f"port {port}\nbind 127.0.0.1\ndir {folder}\nsentinel monitor {self.NAME} 127.0.0.1 {self.master.port} 2\n"
                        f"sentinel down-after-milliseconds {self.NAME} 1000\nsentinel failover-timeout {self.NAME} 6000\n")
        with open(folder / "log", "ab") as log:
            self.processes.append(subprocess.Popen(["redis-sentinel", str(file)], stdout=log, stderr=log, stdin=subprocess.DEVNULL))

    def _knows_all(self, port):
        try:
            told = ask_sentinel(port, "SENTINEL", "master", self.NAME)
        except OSError:
            return False
        facts = dict(zip(told[::2], told[1::2]))
        return int(facts["num-slaves"]) == len(self.replicas) and int(facts["num-other-sentinels"]) == len(self.ports) - 1

    def copied(self):
        return all(r.info("master_link_status") == "up" for r in self.replicas) and \
            self.master.info("connected_slaves") == str(len(self.replicas))

    @property
    def url(self):
        return "redis-sentinel://" + ",".join(f"127.0.0.1:{p}" for p in self.ports) + f"#{self.NAME}"

    def part(self):
        """From now on no replica gets anything from the master."""
        self.master.command("ACL", "SETUSER", "copier", "off")
        self.master.command("CLIENT", "KILL", "TYPE", "replica")
        eventually(lambda: self.master.info("connected_slaves") == "0", what="no replica is connected")

    def promoted(self):
        """The server that the sentinels name now, if it is another one than the first master."""
        try:
            port = int(ask_sentinel(self.ports[0], "SENTINEL", "get-master-addr-by-name", self.NAME)[1])
        except OSError:
            return None
        server = next((r for r in self.replicas if r.port == port), None)
        return server if server and server.info("role") == "master" else None

    def fail_over(self):
        self.master.kill()
        return eventually(self.promoted, 40, "the sentinels promoted a replica")

    def clean_up(self):
        for process in self.processes:
            process.kill()
            process.wait(20)
        for server in [self.master, *self.replicas]:
            server.clean_up()


def ask_sentinel(port, *words):
    return RedisServer.command(type("Address", (), {"port": port}), *words)
