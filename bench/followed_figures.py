"""Streams that one gateway runs and another hands on: what following adds, and what happens where it cannot follow."""
import json
import re
import threading
import time

from measuring import Failed, Figure, call, free_port, say

STREAMS, EVENTS, GAP_MS = 200, 60, 50  # 20 events a second each
JOINERS = 1000


class SharedGateway:
    """One of several Semel processes on one Redis."""

    made = 0

    def __init__(self, rig, upstream, redis_url, peer=""):
        SharedGateway.made += 1
        self.rig = rig
        folder = rig.folder / f"shared-{SharedGateway.made}"
        folder.mkdir()
        config = folder / "semel.yaml"
        config.write_text(
            "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\nthreads: 1\n"
            f"store: {{ redis: {{ url: '{redis_url}' }} }}\nspool: {{ path: {folder}/spool }}\n{peer}"
            f'upstreams: [{{ name: up, base_url: "http://127.0.0.1:{upstream.port}" }}]\n')
        self.process = rig.start(f"shared-{SharedGateway.made}", rig.proxy_core, [rig.semel, "serve", "--config", config])
        ready = re.compile(r"ready: API http://127\.0\.0\.1:(\d+), admin http://127\.0\.0\.1:(\d+)")
        found = rig.until(self.process, "its ready line", lambda: ready.search(self.process.log.read_text(errors="replace")))
        self.port, self.admin = int(found[1]), int(found[2])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.rig.stop(self.process)

    def metric(self, name):
        text = call(self.admin, "GET", "/metrics")[2].decode()
        return sum(float(v) for v in re.findall(rf"^{name}(?:{{[^}}]*}})? ([\d.e+]+)$", text, re.M))


class FollowedBench:
    def __init__(self, rig, server, upstream):
        self.rig, self.options, self.server, self.upstream = rig, rig.options, server, upstream
        self.smoke, self.figures = rig.options.smoke, []

    def add(self, *args, **more):
        figure = Figure(*args, bench="followed", **more)
        self.figures.append(figure)
        say(f"  {figure.name}: {figure.median:.2f} {figure.unit}")

    def read(self, port, **options):
        command = [self.rig.program("bench_stream_client"), "--port", port]
        for name, value in {"streams": STREAMS, "events": EVENTS, "gap": GAP_MS, "stamped": 1, **options}.items():
            command += ["--" + name.replace("_", "-"), value]
        result = json.loads(self.rig.ask(self.rig.load_core, command))
        if result["complete"] != result["calls"]:
            raise Failed(f"port {port}: not all streams were whole: {result}")
        return result

    def both(self, owner, other, **options):
        """The same calls asked for at their owner, and a moment later elsewhere: what each place's clients saw."""
        results = {}
        started = threading.Thread(target=lambda: results.update(owner=self.read(owner.port, **options)))
        started.start()
        time.sleep(0.5)  # longer than the spread of the starts: the other place joins, and never owns
        results["other"] = self.read(other.port, **options)
        started.join()
        if "owner" not in results:
            raise Failed("the owner's clients did not get their streams")
        return results["owner"], results["other"]

    def run(self):
        with SharedGateway(self.rig, self.upstream, self.server.url) as owner, \
                SharedGateway(self.rig, self.upstream, self.server.url) as other:
            self.delay(owner, other)
            self.joiners(owner, other)
        # Its peers are told an address at which nobody listens.
        unreachable = f"peer: {{ advertise: 127.0.0.1:{free_port()} }}\n"
        with SharedGateway(self.rig, self.upstream, self.server.url, unreachable) as owner, \
                SharedGateway(self.rig, self.upstream, self.server.url) as other:
            self.fallback(owner, other)
        return self.figures

    def delay(self, owner, other):
        added, mine, its, added_p99 = [], [], [], []
        for i in range(self.options.pairs):
            calls, follows = self.upstream.calls(), other.metric("semel_peer_follows_total")
            here, there = self.both(owner, other, key=f"delay-{i}", spread=200)
            if self.upstream.calls() - calls != STREAMS:
                raise Failed(f"{STREAMS} keys asked for at two gateways made {self.upstream.calls() - calls} calls")
            if other.metric("semel_peer_follows_total") - follows != STREAMS:
                raise Failed("not every stream was followed")
            added.append((there["delay_p50_us"] - here["delay_p50_us"]) / 1000)
            added_p99.append((there["delay_p99_us"] - here["delay_p99_us"]) / 1000)
            mine.append(there["delay_p50_us"])
            its.append(here["delay_p50_us"])
        self.add("followed_200_added_delay_p50", added, "ms", mine, its, "us, at the owner itself", at_most=5)
        self.add("followed_200_added_delay_p99", added_p99, "ms")

    def joiners(self, owner, other):
        calls, follows = self.upstream.calls(), other.metric("semel_peer_follows_total")
        self.both(owner, other, same_key="joiners", streams=JOINERS, events=20 if self.smoke else EVENTS, spread=0)
        self.add("followed_1000_joiners_connections", [other.metric("semel_peer_follows_total") - follows], "connections", at_most=1)
        self.add("followed_1000_joiners_upstream_calls", [self.upstream.calls() - calls], "calls", at_most=1)

    def fallback(self, owner, other):
        late = []
        for i in range(self.options.pairs):
            ends = {}
            def ask(name, port):
                self.read(port, streams=1, events=10, gap=100, same_key=f"fallback-{i}", spread=0, stamped=0)
                ends[name] = time.monotonic()
            started = threading.Thread(target=ask, args=("owner", owner.port))
            started.start()
            time.sleep(0.3)
            ask("other", other.port)
            started.join()
            late.append((ends["other"] - ends["owner"]) * 1000)
        self.add("fallback_answer_after_owner's", late, "ms, owner unreachable", at_most=1000)
