"""The Redis store's figures: beside the same script driven by redis-benchmark, the usual hash script, a plain GET, and a peer library."""
import json
import re
import socket
import statistics
import subprocess

from measuring import ROOT, Failed, Figure, free_port, say

HERE = ROOT / "bench" / "redis"
PEERS = ROOT / "bench" / "peers"
PEERS_PYTHON = ROOT / "build" / "peers" / "bin" / "python"

# Undecided records stay in their bucket's sorted set until they are completed; a stretch of acquires ends before those are longer than
# with so many calls on the way at once. MANY: what happens then.
STRETCH, MANY = 16_384, 200_000
CONNECTIONS = 8  # of redis-benchmark, each with a pipeline; as many batches of the store are on the way
COMPLETED = 20_000  # as bench_redis fills


class Server:
    """A redis-server of its own, without persistence, on the core of what is measured. Killed with the rig."""

    def __init__(self, rig, tcp):
        self.port = free_port()
        self.socket_path = rig.folder / f"redis-{self.port}.sock"  # several figures have one each
        self.tcp = tcp
        self.process = rig.start("redis-server", rig.proxy_core, [
            "redis-server", "--port", self.port, "--bind", "127.0.0.1", "--unixsocket", self.socket_path, "--save", "", "--appendonly", "no",
            "--dir", rig.folder])
        rig.until(self.process, "its socket", self.socket_path.exists)
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.settimeout(60)
        self.connection.connect(str(self.socket_path))
        self.reader = self.connection.makefile("rb")
        self.version = re.search(r"redis_version:(\S+)", self.ask("INFO", "server"))[1]

    @property
    def url(self):
        return f"redis://127.0.0.1:{self.port}" if self.tcp else f"unix://{self.socket_path}"

    @property
    def at(self):
        """As redis-benchmark wants it."""
        return ["-h", "127.0.0.1", "-p", self.port] if self.tcp else ["-s", self.socket_path]

    @property
    def place(self):
        return f"127.0.0.1:{self.port}" if self.tcp else str(self.socket_path)

    def ask(self, *words):
        parts = [w if isinstance(w, bytes) else str(w).encode() for w in words]
        self.connection.sendall(b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts))
        return self.reply()

    def reply(self):
        line = self.reader.readline()
        kind, text = line[:1], line[1:-2]
        if kind == b"-":
            raise Failed(f"redis-server: {text.decode()}")
        if kind == b"*":
            return [self.reply() for _ in range(int(text))]
        if kind == b"$":
            return None if text == b"-1" else self.reader.read(int(text) + 2)[:-2].decode(errors="replace")
        return int(text) if kind == b":" else text.decode()

    def cpu_us(self):
        return sum(float(v) for v in re.findall(r"used_cpu_(?:user|sys):([\d.]+)", self.ask("INFO", "cpu"))) * 1e6

    def empty(self):
        self.ask("FLUSHALL", "SYNC")


class RedisBench:
    def __init__(self, rig):
        self.rig, self.options, self.smoke, self.figures = rig, rig.options, rig.options.smoke, []
        self.server = Server(rig, rig.options.tcp)
        load = lambda text: self.server.ask("SCRIPT", "LOAD", text)
        self.hash_acquire = load((HERE / "hash_acquire.lua").read_text())
        self.hash_complete = load((HERE / "hash_complete.lua").read_text())
        # The same script as the store's, but for the first lines: redis-benchmark sends no binary arguments, and makes up one name.
        own = rig.ask(rig.load_core, [rig.program("bench_redis"), "script"])
        self.own_script = load("local KEYS = {KEYS[1], 'semel:{b0' .. string.sub(KEYS[1], -3) .. '}:u'}\n" + own)

    # ---- one measurement each: operations a second and the server's us for each

    def stretches(self, stretch, operations, seconds):
        """Repeats `stretch` on an emptied server until `seconds` are measured."""
        done = spent = cpu = 0
        while spent < seconds:
            self.server.empty()
            result = stretch(operations)
            done += result["operations"]
            spent += result["operations"] / result["per_second"]
            cpu += result["server_us"] * result["operations"]
            if self.smoke:
                break
        return {"per_second": done / spent, "server_us": cpu / done}

    def store(self, mode, batch, ahead, operations, threads=1):
        return json.loads(self.rig.ask(self.rig.load_core, [
            self.rig.program("bench_redis"), self.server.url, mode, "--batch", batch, "--ahead", ahead, "--threads", threads,
            "--operations", operations]))

    def counted(self, operations, run):
        """What `run` gives, with the server's time for each operation."""
        before = self.server.cpu_us()
        result = run()
        return {"operations": operations, "server_us": (self.server.cpu_us() - before) / operations, **result}

    def redis_benchmark(self, connections, pipeline, operations, *command, keys=1_000_000_000):
        def run():
            out = self.rig.ask(self.rig.load_core, [
                "redis-benchmark", *self.server.at, "-c", connections, "-P", pipeline, "-n", operations, "-r", keys, "--csv", *command])
            rate = re.search(r'^"[^\n]*?","([\d.]+)",', out.strip().splitlines()[-1])
            if not rate or "ERR" in out:
                raise Failed(f"redis-benchmark: {out.strip()[-300:]}")
            return {"per_second": float(rate[1])}
        return self.counted(operations, run)

    def own_by_benchmark(self, connections, pipeline, operations):
        name = "semel:{b0417}:r:" + "0" * 31 + "__rand_int__"
        return self.redis_benchmark(connections, pipeline, operations, "EVALSHA", self.own_script, 1, name)

    def hash_by_benchmark(self, connections, pipeline, operations):
        return self.redis_benchmark(connections, pipeline, operations, "EVALSHA", self.hash_acquire, 1, "i:0000__rand_int__-uuid", "owner-1",
                                    1000000, 30000, 600000)

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
                                   bench="redis", server_us=medians if all(medians) else None, **more))
        say(f"  {name}: {self.figures[-1].median:.2f} ({self.figures[-1].least:.2f}-{self.figures[-1].most:.2f})")

    @property
    def half(self):
        return self.options.seconds / 3  # many halves of figures with three sides

    def acquires(self):
        best = None
        for batch in (1, 16, 64):
            many = 1 if batch == 1 else CONNECTIONS
            operations = 2048 if self.smoke else STRETCH // 4 if batch == 1 else STRETCH
            halves = [lambda run=run: self.stretches(run, operations, self.half) for run in (
                lambda n: self.store("acquire", batch, many, n),
                lambda n: self.own_by_benchmark(many, batch, n),
                lambda n: self.hash_by_benchmark(many, batch, n))]
            mine, own, plain = self.rounds(*halves)
            self.add(f"acquire_{batch}_vs_own_script", mine, own, "acquires/s", "redis-benchmark, same script", at_least=0.90)
            self.add(f"acquire_{batch}_vs_hash_script", mine, plain, "acquires/s", "redis-benchmark, hash script",
                     at_least=None if batch == 1 else 1.5)
            best = mine
        if self.smoke:
            return
        self.figures.append(Figure("acquire_64_absolute", [m["per_second"] for m in best], "acquires/s", bench="redis",
                                   note="100,000 operations a second is what is commonly said of Redis"))
        mine, plain = self.rounds(lambda: self.stretches(lambda n: self.store("acquire", 64, CONNECTIONS, n), MANY, self.half),
                                  lambda: self.stretches(lambda n: self.hash_by_benchmark(CONNECTIONS, 64, n), MANY, self.half))
        self.add("acquire_64_with_200k_undecided", mine, plain, "acquires/s", "redis-benchmark, hash script",
                 note=f"{MANY} acquires and no complete: about 200 names in each of the 1,024 sets")

    def pairs(self):
        operations = 2048 if self.smoke else 50_000

        def reference(n):
            return self.counted(n, lambda: json.loads(self.rig.ask(self.rig.load_core, [
                self.rig.program("bench_hash_client"), self.server.place, self.hash_acquire, self.hash_complete, 2, 64, n])))
        mine, its = self.rounds(lambda: self.stretches(lambda n: self.store("pairs", 64, 1, n, threads=2), operations, self.half),
                                lambda: self.stretches(reference, operations, self.half))
        self.add("pairs_2x64_vs_hash_client", mine, its, "pairs/s", "hiredis, hash scripts", at_least=1.5)

    def replays(self):
        self.server.empty()
        self.store("get", 64, 1, 64)  # records them
        first = self.server.ask("SCAN", 0, "MATCH", "semel:*:r:*", "COUNT", 1000)[1][0]
        self.server.ask("EVAL", "for i = 0, ARGV[1] - 1 do redis.call('COPY', KEYS[1], string.format('g:%012d', i)) end", 1, first, COMPLETED)
        for batch in (1, 16, 64):
            many = 1 if batch == 1 else CONNECTIONS
            operations = 2048 if self.smoke else round((20_000 if batch == 1 else 150_000) * self.half)
            commands = {}

            def ours(mode):
                result = self.store(mode, batch, many, operations)
                for name, calls in result["commands"].items():
                    commands.setdefault(mode, {}).setdefault(name, []).append(calls / result["operations"])
                return result
            mine, acquires, its = self.rounds(
                lambda: ours("get"), lambda: ours("replay"),
                lambda: self.redis_benchmark(many, batch, operations, "GET", "g:__rand_int__", keys=COMPLETED))
            for mode, side in (("get", mine), ("replay", acquires)):
                counts = {name: statistics.median(c) for name, c in commands[mode].items()}
                # One command reads the record, by itself or (SET NX GET) in the script; a batch's time is told in the same round trip.
                reads = counts.get("get", 0) + counts.get("set", 0)
                if abs(reads - 1) > 0.01:
                    raise Failed(f"{mode}: {reads} commands read each record, not one: {counts}")
                told = ", ".join(f"{calls:.3f} {name}" for name, calls in sorted(counts.items()) if calls >= 0.001)
                self.add(f"{mode}_{batch}_vs_get", side, its, "look-ups/s", "redis-benchmark GET, same bytes", at_least=0.90,
                         note=f"commands for each, in one round trip: {told}")

    def peers(self):
        if not PEERS_PYTHON.exists():
            say("bench/run: making the environment of bench/peers")
            done = subprocess.run([PEERS / "setup"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            if done.returncode != 0:
                raise Failed(f"bench/peers/setup failed: {done.stdout[-1000:]}")

        def powertools(kind):
            self.server.empty()
            before = self.server.cpu_us()
            result = json.loads(self.rig.ask(self.rig.load_core, [PEERS_PYTHON, PEERS / "powertools.py", self.server.socket_path, kind,
                                                                  self.half]))
            return {**result, "server_us": (self.server.cpu_us() - before) / result["operations"]}

        def duplicates(batch, ahead, operations):
            self.server.empty()
            return self.store("replay", batch, ahead, operations)
        lone, many = round(10_000 * self.half) + 1, round(50_000 * self.half) + 1
        new_lone, new_many, new_peer = self.rounds(
            lambda: self.stretches(lambda n: self.store("pairs", 1, 1, n), lone, self.half / 2),
            lambda: self.stretches(lambda n: self.store("pairs", 64, 1, n, threads=2), many, self.half / 2), lambda: powertools("new"))
        again_lone, again_many, again_peer = self.rounds(
            lambda: duplicates(1, 1, lone), lambda: duplicates(64, CONNECTIONS, many), lambda: powertools("duplicate"))
        against = "Powertools for Python, one thread"
        self.add("new_call_alone_vs_powertools", new_lone, new_peer, "calls/s", against, at_least=5)
        self.add("new_calls_2x64_vs_powertools", new_many, new_peer, "calls/s", against, at_least=5)
        self.add("duplicate_alone_vs_powertools", again_lone, again_peer, "duplicates/s", against, at_least=5)
        self.add("duplicates_8x64_vs_powertools", again_many, again_peer, "duplicates/s", against, at_least=5)

    def run(self, store, peers):
        if store:
            for part in (self.acquires, self.pairs, self.replays):
                part()
        if peers:
            self.peers()
        return self.figures
