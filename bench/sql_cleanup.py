"""Claims with and without clean-up beside them: whether removing expired records slows down those who claim."""
import json
import statistics
import subprocess

from measuring import Failed, Figure, say

CALLERS = 64
UNDECIDED = 10_000  # with leases that ended long ago: never removed
CHUNK = 500_000  # rows of one statement that fills
PASS_SECONDS = 3.3  # between two passes of a gateway's sweeper
COLUMNS = "k, version, status, token, nonce, created, lease_end, completed, expires, keep_ms, head, done, body"


class CleanupBench:
    """The records are copies of one that the store itself made and completed, without its body, under keys of their own; all of
    them expired within the last day. Claims are measured for two passes of the sweeper."""

    def __init__(self, sql):
        self.sql, self.rig, self.database, self.options, self.smoke = sql, sql.rig, sql.database, sql.options, sql.smoke
        self.rows = 100_000 if self.smoke else self.options.rows
        self.undecided = UNDECIDED // 100 if self.smoke else UNDECIDED
        self.seconds = 0.5 if self.smoke else 2 * PASS_SECONDS

    def program(self, mode, *options):
        return [self.rig.program("bench_sql"), self.sql.store, self.database.url, mode, *options]

    # ---- the records

    def fill(self):
        self.database.empty()
        self.sql.ask(self.program("pairs", "--callers", 8, "--milliseconds", 100))
        say(f"bench/run: filling {self.rows} expired records")
        {"postgres": self.fill_postgres, "mysql": self.fill_mysql}[self.sql.store]()

    def chunks(self):
        for first in range(0, self.rows, CHUNK):
            yield first, min(first + CHUNK, self.rows) - 1

    def fill_postgres(self):
        ask = self.database.sql
        template = "select * from semel.semel_records where expires > 0 limit 1"
        ask(f"create table template as {template}; truncate semel.semel_records")
        indexes = ask("select indexdef from pg_indexes where schemaname = 'semel' and tablename = 'semel_records'").splitlines()
        ask("alter table semel.semel_records drop constraint semel_records_pkey;"
            + "".join(f"drop index semel.{line.split()[2]};" for line in indexes if line.startswith("CREATE INDEX")))
        # In the order of time, as records are made; keys are random, as keys are.
        for first, last in self.chunks():
            ask(f"""insert into semel.semel_records ({COLUMNS})
                select sha256(int8send(g)), version, status, token, nonce, created, lease_end, completed,
                       completed - (86400000000 - g * 86400000000 / {self.rows}), keep_ms, head, done, null
                from template, generate_series({first}::bigint, {last}::bigint) g""")
        ask(f"""insert into semel.semel_records ({COLUMNS})
            select sha256(int8send(-g)), version, 1, token, nonce, created, created - 86400000000, 0, 0, keep_ms, head, null, null
            from template, generate_series(1::bigint, {self.undecided}::bigint) g""")
        for line in indexes:
            ask("set maintenance_work_mem = '512MB';" + line)
        ask("alter table semel.semel_records add constraint semel_records_pkey primary key using index semel_records_pkey;"
            "drop table template; vacuum analyze semel.semel_records; checkpoint")

    def fill_mysql(self):
        ask = self.database.sql
        ask("use semel; create table reference.template as select * from semel_records where expires > 0 limit 1;"
            "truncate semel_records")
        indexes = ask("select distinct index_name from information_schema.statistics where table_schema = 'semel' and "
                      "table_name = 'semel_records' and index_name <> 'PRIMARY'").splitlines()
        made = dict(line.split("\t") for line in ask(
            "select index_name, group_concat(column_name order by seq_in_index) from information_schema.statistics "
            "where table_schema = 'semel' and table_name = 'semel_records' and index_name <> 'PRIMARY' group by index_name").splitlines())
        for name in indexes:
            ask(f"use semel; alter table semel_records drop index {name}")
        # The table is kept in the order of its keys: filled in that order. When they expired has nothing to do with it.
        key = "unhex(concat(lpad(hex(seq * {step} + 1), 16, '0'), left(sha2(seq, 256), 48)))".format(step=(2**63 - 1) // self.rows)
        for first, last in self.chunks():
            ask(f"""use semel; insert into semel_records ({COLUMNS})
                select {key}, version, status, token, nonce, created, lease_end, completed,
                       completed - (seq * 7919 % {self.rows}) * 86400000000 div {self.rows} - 1, keep_ms, head, done, null
                from reference.template, seq_{first}_to_{last}""")
        ask(f"""use semel; insert into semel_records ({COLUMNS})
            select unhex(sha2(-seq, 256)), version, 1, token, nonce, created, created - 86400000000, 0, 0, keep_ms, head, null, null
            from reference.template, seq_1_to_{self.undecided}""")
        for name in indexes:
            ask(f"use semel; alter table semel_records add index {name} ({made[name]})")
        ask("drop table reference.template; use semel; analyze table semel_records")

    def count(self, where):
        place = "semel.semel_records"
        return int(self.database.sql(f"select count(*) from {place} where {where}"))

    # ---- measured

    def claims(self):
        return self.sql.ask(self.program("pairs", "--callers", CALLERS, "--milliseconds", int(self.seconds * 1000), "--warm-up", 100))

    def beside(self, removed, **purge):
        """Claims while a sweeper works. `removed` takes in how many records it removed in a second."""
        options = [word for name, value in purge.items() for word in (f"--{name}", value)]
        sweeper = self.rig.start("sweeper", self.database.client_core, self.program("purge", *options), stdin=subprocess.PIPE,
                                 stdout=subprocess.PIPE, text=True)
        if sweeper.stdout.readline() != "ready\n":
            raise Failed(f"bench_sql purge did not begin: {sweeper.log.read_text()[-500:]}")
        result = self.claims()
        said, _ = sweeper.communicate(timeout=60)
        self.rig.running.remove(sweeper)
        if sweeper.returncode != 0:
            raise Failed(f"bench_sql purge failed: {sweeper.log.read_text()[-500:]}")
        told = json.loads(said.splitlines()[-1])
        removed.append((told["removed"] / told["seconds"], told["removed"], told["longest_step_ms"]))
        return result

    def add(self, name, mine, its, removed, noise, goal):
        note = (f"{statistics.median(r[0] for r in removed):.0f} records removed a second, longest step "
                f"{max(r[2] for r in removed):.0f} ms; p99 of a pair {statistics.median(m['p99_us'] for m in mine) / 1000:.1f} ms, "
                f"without {statistics.median(m['p99_us'] for m in its) / 1000:.1f} ms")
        if goal:
            note += f"; the claims without it differ by {noise:.0%} of their median"
        self.sql.add(name, mine, its, "pairs/s", "the same without clean-up", note=note,
                     at_least=max(0.0, 1 - noise) if goal else None)

    def run(self):
        self.sql.figures = []
        self.fill()
        before = self.count("expires > 0")
        self.claims()  # caches
        usual, fast = [], []
        alone, swept, hurried = self.sql.rounds(
            self.claims, lambda: self.beside(usual, every=int(PASS_SECONDS * 1000), step=512, steps=64),
            lambda: self.beside(fast, every=1, step=512, steps=64))
        noise = (max(a["per_second"] for a in alone) - min(a["per_second"] for a in alone)) / statistics.median(
            a["per_second"] for a in alone)
        self.add("claims_beside_cleanup", swept, alone, usual, noise, True)
        self.add("claims_beside_cleanup_without_pause", hurried, alone, fast, noise, False)
        total = sum(r[1] for r in usual + fast)
        if not total:
            raise Failed("nothing was removed")
        left = self.count("expires = 0")
        if left != self.undecided:
            raise Failed(f"{self.undecided} undecided records were there, {left} are left")
        if self.smoke:  # the rest too: what is not expired stays
            with_pairs = self.count("expires > 0")
            kept = with_pairs - (before - total)
            told = json.loads(self.finish())
            if self.count("expires > 0") != kept or told["removed"] != before - total:
                raise Failed(f"{before} expired records: {total} and {told['removed']} were removed, "
                             f"{self.count('expires > 0')} of {kept} others are left")
            if self.count("expires = 0") != self.undecided:
                raise Failed("undecided records were removed")
        figures, self.sql.figures = self.sql.figures, []
        return figures

    def finish(self):
        """Removes all that is left."""
        sweeper = subprocess.Popen(list(map(str, self.program("purge", "--every", 1, "--step", 10_000, "--steps", 1000))),
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        sweeper.stdout.readline()
        while self.database.sql("select count(*) from semel.semel_records where expires > 0 and expires < "
                                + ("extract(epoch from now()) * 1000000" if self.sql.store == "postgres"
                                   else "unix_timestamp(now(6)) * 1000000")) != "0":
            if sweeper.poll() is not None:
                raise Failed("bench_sql purge ended")
        said, _ = sweeper.communicate(timeout=60)
        return said.splitlines()[-1]
