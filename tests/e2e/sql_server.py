"""What real PostgreSQL and MariaDB servers of the tests have in common: a folder of their own, a user who may run them, a life."""
import atexit
import functools
import os
import pathlib
import pwd
import shutil
import signal
import subprocess
import tempfile

from harness import eventually, free_port

USER = "semel"
PASSWORD = "pw-that-is-private"
DATABASE = "semel"


class SqlError(Exception):
    """The server refused a statement, in its own words."""


def own_folder(prefix, user):
    """A new folder that `user` may use: pytest's own are closed to everybody but us."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix=prefix))
    folder.chmod(0o755)
    if os.geteuid() == 0:
        account = pwd.getpwnam(user)
        os.chown(folder, account.pw_uid, account.pw_gid)
    return folder


def as_user(user, *command, env=None):
    """The command as that user; as ourselves if we are not root, who alone can be somebody else. `env`: what nobody but that user
    meets, such as a library to load."""
    command = ["env", *(f"{name}={value}" for name, value in (env or {}).items()), *map(str, command)]
    if os.geteuid() != 0:
        return command
    return ["setpriv", f"--reuid={user}", f"--regid={pwd.getpwnam(user).pw_gid}", "--init-groups", *command]


def run(command, input=None, timeout=60, env=None):
    """Its output; raises SqlError with what it complained about."""
    done = subprocess.run([*map(str, command)], input=input, capture_output=True, text=True, timeout=timeout, cwd="/",
                          env=None if env is None else {**os.environ, **env})
    if done.returncode:
        raise SqlError((done.stderr or done.stdout).strip()[-2000:])
    return done.stdout


def template(make):
    """make(folder) fills a data directory, once per process of the tests; every server starts on a copy of it."""
    @functools.cache
    def folder():
        made = make()
        atexit.register(shutil.rmtree, made, ignore_errors=True)
        return made
    return folder


def family(pid):
    """A process and its children."""
    found = [pid]
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = pathlib.Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has ended
                continue
            if int(stat[1]) == pid and stat[0] != "Z":
                found.append(int(entry))
    return found


def send(pids, number):
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


class SqlServer:
    """One server on a free port. `sql()` asks it as its administrator, past whatever the test does to the gateways' way."""

    def __init__(self, *arguments, copy_of=None, env=None, durable=False):
        """`copy_of`: a data directory, else the template's. Unless `durable`, it does not wait for the disk: what it has committed
        survives its own death, which is all that tests do to it, and not a power cut."""
        self.home = own_folder(f"semel-{self.kind}-", self.account)
        self.data = self.home / "data"
        self.durability = () if durable else self.not_durable
        self.port = free_port()
        self.arguments = arguments
        self.env = env or {}
        self.process = None
        try:
            run(["cp", "-a", "--reflink=auto", copy_of or self.template(), self.data])
            self.start()
        except BaseException:
            self.clean_up()
            raise

    def start(self):
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd="/",
                                            start_new_session=True)
        eventually(self.answers, 60, f"{self.kind} answers")
        return self

    @property
    def log(self):
        return self.home / "server.log"

    def answers(self):
        if self.process.poll() is not None:
            raise AssertionError(f"{self.kind} ended with {self.process.returncode}: {self.log.read_text(errors='replace')[-2000:]}")
        try:
            self.sql("SELECT 1", database="")
            return True
        except SqlError:
            return False

    def url(self, user=USER, password=PASSWORD, database=DATABASE, at=None, options=""):
        """`at`: another port, of what is in front of it. `options`: after the question mark."""
        return self._url(user, password, f"127.0.0.1:{at or self.port}", database, options)

    def _url(self, user, password, where, database, options):
        who = user + (f":{password}" if password else "")
        return f"{self.scheme}://{who}@{where}/{database}" + (f"?{options}" if options else "")

    def records(self):
        """(status, version, token) of each record."""
        return [(int(status), int(version), int(token))
                for status, version, token in self.sql(f"SELECT status, version, token FROM {self.table('records')} ORDER BY k")]

    def count(self, name, where="1 = 1"):
        """Rows of one of the store's tables."""
        return int(self.sql(f"SELECT count(*) FROM {self.table(name)} WHERE {where}")[0][0])

    def intents(self):
        """How many records it holds."""
        return self.count("records")

    def freeze(self):
        pids = family(self.process.pid)
        send(pids, signal.SIGSTOP)
        send(set(family(self.process.pid)) - set(pids), signal.SIGSTOP)  # born meanwhile

    def thaw(self):
        send(family(self.process.pid), signal.SIGCONT)

    def kill(self):
        """SIGKILL to all of it at once."""
        self.freeze()
        pids = family(self.process.pid)
        send(pids[1:] + pids[:1], signal.SIGKILL)
        self.process.wait(20)

    def stop(self):
        """An orderly end that does not wait for its clients."""
        self.process.send_signal(self.fast_stop)
        self.process.wait(60)

    def restart(self):
        self.stop()
        return self.start()

    def clean_up(self):
        if self.process and self.process.poll() is None:
            self.kill()
        shutil.rmtree(self.home, ignore_errors=True)
