"""What every measurement needs: figures and their table, the programs of a run, ports."""
import http.client
import os
import pathlib
import random
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
FILES_WANTED = 4000  # open at once: 1,000 joiners, each with its connections


class Failed(Exception):
    """A figure cannot be obtained; the text says why and what to do."""


def say(text):
    print(text, file=sys.stderr, flush=True)


class Figure:
    """One measured figure. `at_least` and `at_most` are the goal, `aim` what is hoped for; without a goal it is stated only."""

    def __init__(self, name, values, unit, semel=None, reference=None, against="", at_least=None, at_most=None, aim=None,
                 note="", bench="gateway", server_us=None):
        self.name, self.values, self.unit, self.note, self.bench = name, values, unit, note, bench
        self.semel, self.reference, self.against = semel, reference, against
        self.at_least, self.at_most, self.aim = at_least, at_most, aim
        self.median, self.least, self.most = statistics.median(values), min(values), max(values)
        self.verdict = None  # of a program that judges its own figure
        self.server_us = server_us  # medians of the server's processor time for an operation: ours, the reference's

    def reaches(self, bound):
        return self.median >= bound if self.at_least is not None else self.median <= bound

    @property
    def goal(self):
        return self.at_least if self.at_least is not None else self.at_most

    @property
    def met(self):
        if self.goal is None or self.verdict is not None:
            return self.verdict
        return self.reaches(self.goal)

    def as_json(self):
        out = {"bench": self.bench, "name": self.name, "unit": self.unit, "median": round(self.median, 4),
               "min": round(self.least, 4), "max": round(self.most, 4), "pairs": len(self.values)}
        if self.semel is not None:
            out["semel"] = round(statistics.median(self.semel), 2)
        if self.reference is not None:
            out["reference"] = round(statistics.median(self.reference), 2)
            out["reference_is"] = self.against
        if self.goal is not None:
            out["goal"] = {"at_least" if self.at_least is not None else "at_most": self.goal}
            out["met"] = self.met
        if self.aim is not None:
            out["aim"], out["aim_met"] = self.aim, self.reaches(self.aim)
        if self.server_us is not None:
            out["server_us_per_operation"] = {"semel": round(self.server_us[0], 2), "reference": round(self.server_us[1], 2)}
        if self.note:
            out["note"] = self.note
        return out


def short(number):
    if number == 0 or abs(number) >= 1000:
        return f"{number:.0f}"
    return f"{number:.3g}" if abs(number) < 10 else f"{number:.1f}"


def table(figures):
    rows = [["figure", "median", "min-max", "unit", "goal", "", "semel", "reference"]]
    for f in figures:
        sign = ">=" if f.at_least is not None else "<="
        goal = "stated" if f.goal is None else f"{sign} {f.goal:g}" + (f", aim {f.aim:g}" if f.aim is not None else "")
        verdict = "" if f.met is None else "met" if f.met else "MISSED"
        if f.met and f.aim is not None and f.reaches(f.aim):
            verdict = "met, aim too"
        rows.append([f.name, short(f.median), f"{short(f.least)}-{short(f.most)}" if len(f.values) > 1 else "", f.unit, goal, verdict,
                     "" if f.semel is None else short(statistics.median(f.semel)),
                     "" if f.reference is None else f"{short(statistics.median(f.reference))} {f.against}"])
    if any(f.server_us for f in figures):
        rows[0].append("server us/op")
        for row, f in zip(rows[1:], figures):
            row.append("{:.1f} : {:.1f}".format(*f.server_us) if f.server_us else "")
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines + [f"{f.name}: {f.note}" for f in figures if f.note])


# ---------------------------------------------------------------- processes

class Rig:
    """Programs of one run: where they are, on which core they run, and their end."""

    def __init__(self, options):
        self.options = options
        self.build = pathlib.Path(options.build).resolve()
        self.semel = os.environ.get("SEMEL_BIN") or str(self.build / "semel")
        self.folder = None
        self.running = []
        self.built = False  # what was missing was built: the build knows best what is up to date
        cores = sorted(os.sched_getaffinity(0))
        self.proxy_core, self.load_core = cores[0], cores[min(1, len(cores) - 1)]
        if len(cores) < 2:
            say("bench/run: WARNING: one core only: proxy, upstream and load generator share it; the figures mean little")

    def __enter__(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="semel-bench-", dir=self.options.dir))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        if hard < FILES_WANTED:
            raise Failed(f"at most {hard} open files are allowed; {FILES_WANTED} are needed (ulimit -Hn)")
        return self

    def __exit__(self, *_):
        for process in reversed(self.running):
            self.stop(process)
        shutil.rmtree(self.folder, ignore_errors=True)

    def program(self, name):
        """Where it is built; None if it is missing or, as long as `built` is not set, older than its sources in its folder."""
        for folder in ("gateway", "store", "redis", "sql", "consumer"):
            found = self.build / "bench" / folder / name
            if found.exists():
                own = (f"{name}.cpp", f"{name.removeprefix('bench_')}.cpp")
                sources = [p.stat().st_mtime for p in (ROOT / "bench" / folder).iterdir() if p.suffix == ".hpp" or p.name in own]
                return str(found) if self.built or found.stat().st_mtime >= max(sources) else None
        return None

    def pinned(self, core, command):
        # pdeathsig: nothing is left behind, however this script ends.
        pin = [] if core is None else ["taskset", "-c", str(core)]
        return ["setpriv", "--pdeathsig", "TERM", *pin, *map(str, command)]

    def start(self, name, core, command, **more):
        log = self.folder / f"{name}.log"
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SEMEL_")}
        with open(log, "wb") as err:
            process = subprocess.Popen(self.pinned(core, command), stderr=err, env=environment,
                                       **{"stdin": subprocess.DEVNULL, "stdout": err, **more})
        process.name, process.log = name, log
        self.running.append(process)
        return process

    def stop(self, process):
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process in self.running:
            self.running.remove(process)

    def until(self, process, what, look, seconds=20):
        """The first true answer of `look`, while the process lives."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            found = look()
            if found:
                return found
            if process.poll() is not None:
                raise Failed(f"{process.name} ended at its start: {tail(process.log)}")
            time.sleep(0.02)
        raise Failed(f"{process.name}: {what} did not come within {seconds} s: {tail(process.log)}")

    def ask(self, core, command, environment=None, seconds=300):
        """Runs a program to its end and answers its stdout."""
        try:
            done = subprocess.run(self.pinned(core, command), capture_output=True, text=True, timeout=seconds,
                                  stdin=subprocess.DEVNULL, env={**os.environ, **(environment or {})})
        except subprocess.TimeoutExpired:
            raise Failed(f"{command[0]} did not end within {seconds} s") from None
        if done.returncode != 0:
            raise Failed(f"{' '.join(map(str, command))} failed ({done.returncode}): {(done.stderr or done.stdout).strip()[-500:]}")
        return done.stdout


def tail(log):
    text = log.read_text(errors="replace").strip()
    return text[-500:] or "its log is empty"


ports_given = set()


def free_port():
    """Never the same twice, and below the range from which the system takes ports by itself."""
    while True:
        port = random.randrange(10_000, 32_000)
        if port in ports_given:
            continue
        ports_given.add(port)
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:  # taken
            continue


def answers(port):
    try:
        with socket.create_connection(("127.0.0.1", port), 1):
            return True
    except OSError:
        return False


def call(port, method, path, body=None, headers=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read()
    finally:
        connection.close()
