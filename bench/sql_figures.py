"""The SQL stores' figures: beside pgbench, bare C clients and peer libraries."""
import json
import re
import statistics
import subprocess

from measuring import Figure, Failed, say, tail
from sql_servers import DATABASES, HERE

MANY = 256  # callers in flight at a gateway; the store's own defaults make batches of them
BARE_THREADS, BATCH = 4, 64  # of the bare clients that work in batches: as many batches of as many as the store has on the way
AGAIN = 20  # percent of duplicates in the mixed run


class SqlBench:
    def __init__(self, rig, store):
        self.rig, self.options, self.smoke, self.figures, self.store = rig, rig.options, rig.options.smoke, [], store
        self.database = DATABASES[store](rig)
        self.bench = store  # how the figures are grouped

    # ---- one measurement each

    @property
    def half(self):
        """Seconds of a side: figures have up to four."""
        return 0.3 if self.smoke else self.options.seconds / 2

    def counted(self, run, recorded=False):
        """What `run` gives on empty tables, with the server's processor time for each operation."""
        self.database.empty()
        if recorded:
            self.database.record()
        before = self.database.cpu_us()
        result = run()
        if not result["operations"]:
            raise Failed(f"{self.store}: nothing was done in {self.half} s")
        return {**result, "server_us": (self.database.cpu_us() - before) / result["operations"]}

    def ours(self, callers, mode="pairs", alone=False, duplicates=0):
        """Our store: one caller a connection and no batches, or `callers` on the defaults."""
        options = ["--callers", callers, "--milliseconds", int(self.half * 1000), "--warm-up", 50 if self.smoke else 300]
        if alone:
            options += ["--connections", callers, "--batch", 1, "--alone", 1]
        if duplicates:
            options += ["--duplicates", duplicates]

        self.database.empty()
        return self.ask([self.rig.program("bench_sql"), self.store, self.database.url, mode, *options])

    def ask(self, command):
        """What bench_sql prints, with the server's processor time for each operation of the stretch that it counts."""
        process = self.rig.start("bench_sql", self.database.client_core, command, stdout=subprocess.PIPE, text=True)
        first = process.stdout.readline()
        before = self.database.cpu_us()
        try:
            said, _ = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            raise Failed(f"bench_sql did not end: {' '.join(map(str, command))}") from None
        used = self.database.cpu_us() - before
        self.rig.stop(process)
        if process.returncode != 0 or first != "begin\n":
            raise Failed(f"{' '.join(map(str, command))} failed ({process.returncode}): {tail(process.log)}")
        result = json.loads(said)
        return {**result, "server_us": used / max(1, result["operations"])}

    def pgbench(self, clients, script, recorded=False):
        def run():
            out = self.rig.ask(self.database.client_core, [
                self.database.pgbench, "-n", "-M", "prepared", "-f", HERE / f"{script}.pgbench", "-c", clients, "-j", 1, "-T",
                max(1, round(self.half)), "-h", self.database.folder, "-p", self.database.port, "-U", "semel", "postgres"])
            rate = re.search(r"^tps = ([\d.]+) \(without", out, re.M)
            done = re.search(r"^number of transactions actually processed: (\d+)", out, re.M)
            if not rate or not done or "number of failed transactions: 0 " not in out:
                raise Failed(f"pgbench: {out.strip()[-400:]}")
            return {"operations": int(done[1]), "per_second": float(rate[1])}
        return self.counted(run, recorded)

    def bare(self, mode, threads=BARE_THREADS, batch=BATCH, percent=0):
        program = self.rig.program(f"bench_{self.store}_client")

        def run():
            return json.loads(self.rig.ask(self.database.client_core, [program, self.at, mode, threads, batch, percent, self.half]))
        return self.counted(run, recorded=percent > 0 or mode == "look-up")

    @property
    def at(self):
        """The server as C clients name it."""
        return f"host={self.database.folder} port={self.database.port} user=semel dbname=postgres" if self.store == "postgres" \
            else self.database.socket

    def inbox(self, mode):
        program = self.rig.program("bench_inbox")

        def run():
            self.rig.ask(self.database.client_core, [program, self.store, self.at, "make"])
            return json.loads(self.rig.ask(self.database.client_core, [program, self.store, self.at, mode, BARE_THREADS, BATCH, self.half]))
        return self.counted(run)

    # ---- figures

    def rounds(self, *measured):
        """Each of `measured` once a round; which one begins rotates. The results of each, by round."""
        results = [[] for _ in measured]
        for round_ in range(self.options.pairs):
            for i in range(len(measured)):
                which = (round_ + i) % len(measured)
                results[which].append(measured[which]())
        return results

    def add(self, name, mine, its, unit, against, **more):
        medians = [statistics.median(r["server_us"] for r in side) if "server_us" in side[0] else 0 for side in (mine, its)]
        ratios = [m["per_second"] / r["per_second"] for m, r in zip(mine, its)]
        self.figures.append(Figure(name, ratios, "x " + unit, [m["per_second"] for m in mine], [r["per_second"] for r in its], against,
                                   bench=self.bench, server_us=medians if all(medians) else None, **more))
        say(f"  {name}: {self.figures[-1].median:.2f} ({self.figures[-1].least:.2f}-{self.figures[-1].most:.2f})")

    def one_pair(self, clients):
        """The reference for pairs of two transactions, and its name."""
        if self.store == "postgres":
            return lambda: self.pgbench(clients, "pair")
        return lambda: self.bare("alone", threads=clients, batch=1)

    @property
    def one_pair_by(self):
        return "pgbench -M prepared" if self.store == "postgres" else "bare C client"

    def pairs(self):
        """One pair as two transactions, and many callers batched, beside the same reference in the same rounds."""
        references = {}
        for clients in (8, 32):
            alone, reference = self.rounds(lambda: self.ours(clients, alone=True), self.one_pair(clients))
            self.add(f"pair_alone_{clients}", alone, reference, "pairs/s", f"{self.one_pair_by}, {clients} clients", at_least=0.90)
            references[clients] = reference
            if self.smoke:
                break
        goal = 5 if self.store == "postgres" else 3
        batched, *sides = self.rounds(lambda: self.ours(MANY), *(self.one_pair(clients) for clients in references),
                                      lambda: self.bare("pairs"))
        for clients, side in zip(references, sides):
            self.add(f"pairs_{MANY}_batched_vs_{clients}", batched, side, "pairs/s", f"{self.one_pair_by}, {clients} clients", at_least=goal)
        self.add(f"pairs_{MANY}_vs_bare_batches", batched, sides[-1], "pairs/s", f"bare client, {BARE_THREADS} x {BATCH}")
        self.figures.append(Figure(f"pairs_{MANY}_absolute", [b["per_second"] for b in batched], "pairs/s", bench=self.bench,
                                   note="a commonly told figure for such tables is 10,000 a second"))

    def mixed(self):
        mine, select_first, insert_first = self.rounds(
            lambda: self.ours(MANY, duplicates=AGAIN), lambda: self.bare("select-first", percent=AGAIN),
            lambda: self.bare("insert-first", percent=AGAIN))
        sides = {"SELECT first": select_first, "INSERT first": insert_first}
        better = max(sides, key=lambda side: statistics.median(r["per_second"] for r in sides[side]))
        self.add(f"mixed_{AGAIN}_percent_duplicates", mine, sides[better], "calls/s",
                 f"bare client, {better}, {BARE_THREADS} x {BATCH}", at_least=0.85,
                 note="; ".join(f"{side}: {statistics.median(r['per_second'] for r in sides[side]):.0f}/s" for side in sides))

    def duplicates(self):
        look_up = (lambda: self.pgbench(8, "duplicate", recorded=True)) if self.store == "postgres" else \
            (lambda: self.bare("look-up", threads=8, batch=1))
        mine, batched, its = self.rounds(lambda: self.ours(8, "duplicates", alone=True), lambda: self.ours(MANY, "duplicates"), look_up)
        against = f"{'pgbench' if self.store == 'postgres' else 'bare C client'}, SELECT only, 8 clients"
        self.add("duplicate_alone_8", mine, its, "duplicates/s", against, at_least=0.90)
        self.add(f"duplicates_{MANY}", batched, its, "duplicates/s", against)

    def inboxes(self):
        mine, its = self.rounds(lambda: self.inbox("inbox"), lambda: self.inbox("bare"))
        self.add("inbox_with_a_business_row", mine, its, "messages/s", f"bare client, same statements, {BARE_THREADS} x {BATCH}",
                 at_least=0.80)

    def run(self, store, peers):
        if store:
            for part in (self.pairs, self.mixed, self.duplicates, self.inboxes):
                part()
        if peers:
            from sql_peers import SqlPeers  # with what they need
            SqlPeers(self).run()
        return self.figures
