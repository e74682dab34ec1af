"""Peer libraries on the same servers: DBOS workflows, and Spring Integration's JDBC metadata store."""
import json
import subprocess

from measuring import ROOT, Failed, say

PEERS = ROOT / "bench" / "peers"
PYTHON = ROOT / "build" / "peers" / "bin" / "python"
JAVA = ROOT / "build" / "peers-java"
THREADS = 8  # callers of a peer
MANY = 256


def set_up(what, program):
    say(f"bench/run: {what}")
    done = subprocess.run([program], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise Failed(f"{program.relative_to(ROOT)} failed: {done.stdout[-1000:]}")


class SqlPeers:
    def __init__(self, bench):
        self.bench, self.rig, self.database, self.store = bench, bench.rig, bench.database, bench.store
        set_up("the environment of bench/peers", PEERS / "setup")
        set_up("the Java programs of bench/peers/java", PEERS / "java" / "setup")

    @property
    def seconds(self):
        return 0.5 if self.bench.smoke else max(2, self.bench.half)

    def jdbc(self):
        database = self.database
        if self.store == "postgres":
            return [f"jdbc:postgresql://127.0.0.1:{database.port}/postgres", "semel", ""]
        return [f"jdbc:mariadb://127.0.0.1:{database.port}/reference", "semel", "semel"]

    def spring(self, kind):
        return self.bench.counted(lambda: json.loads(self.rig.ask(self.database.client_core, [
            "java", "-Xmx512m", "-cp", f"{JAVA}/target/classes:{JAVA}/libraries/*", "SpringStore", *self.jdbc(), kind, THREADS,
            self.seconds])))

    def dbos(self, kind):
        def run():
            self.database.sql("drop database if exists dbos with (force);\ncreate database dbos")
            return json.loads(self.rig.ask(self.database.client_core, [
                PYTHON, PEERS / "dbos_workflows.py", f"postgresql://semel@127.0.0.1:{self.database.port}/dbos", kind, THREADS, self.seconds]))
        return self.bench.counted(run)

    def figures(self, name, kind, peer, mode, alone_at_least, batched_at_least, against):
        alone, batched, its = self.bench.rounds(
            lambda: self.bench.ours(THREADS, mode, alone=True), lambda: self.bench.ours(MANY, mode), lambda: peer(kind))
        for result in its:  # the start of a runtime and its warm-up are in the server's time
            del result["server_us"]
        unit = "calls/s" if kind == "new" else "duplicates/s"
        self.bench.add(f"{name}_alone_{THREADS}", alone, its, unit, against, at_least=alone_at_least)
        self.bench.add(f"{name}_batched_{MANY}", batched, its, unit, against, at_least=batched_at_least)

    def run(self):
        spring = f"Spring's JdbcMetadataStore, {THREADS} threads"
        self.figures("new_calls_vs_spring", "new", self.spring, "pairs", 1.5, 5, spring)
        self.figures("duplicates_vs_spring", "duplicate", self.spring, "duplicates", None, None, spring)
        if self.store != "postgres":
            return  # DBOS keeps its workflows in PostgreSQL
        dbos = f"DBOS workflows, {THREADS} threads"
        self.figures("new_calls_vs_dbos", "new", self.dbos, "pairs", 5, 5, dbos)
        self.figures("duplicates_vs_dbos", "duplicate", self.dbos, "duplicates", 5, 5, dbos)
