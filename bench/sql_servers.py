"""PostgreSQL and MariaDB servers of a run: each its own, durable at every commit, on the core of what is measured."""
import glob
import os
import pathlib
import pwd
import subprocess
import tempfile

from measuring import ROOT, Failed, free_port

HERE = ROOT / "bench" / "sql"
INBOX = ["message_dedup", "semel_assignments", "semel_offsets", "semel_flights", "semel_crashes", "semel_inbox_schema", "business"]
TICK_US = 1e6 / os.sysconf("SC_CLK_TCK")


def postgres_programs():
    found = sorted(glob.glob("/usr/lib/postgresql/*/bin/postgres"), key=lambda p: int(p.split("/")[4]))
    return pathlib.Path(found[-1]).parent if found else None


class Database:
    """What both have: a folder that their user may use, one process to start, and the processor time of all their processes."""

    user = None
    pinned = True

    def __init__(self, rig):
        self.rig, self.port = rig, free_port()
        self.server_core, self.client_core = (rig.proxy_core, rig.load_core) if self.pinned else (None, None)
        rig.folder.chmod(0o711)  # a user other than root goes through
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix=f"{self.name}-", dir=rig.folder))  # several figures have one each
        self.as_user = ["setpriv", "--pdeathsig", "INT"]
        if os.geteuid() == 0:
            owner = pwd.getpwnam(self.user)
            os.chown(self.folder, owner.pw_uid, owner.pw_gid)
            self.as_user += [f"--reuid={self.user}", f"--regid={self.user}", "--init-groups"]

    def make(self, *command):
        done = subprocess.run([*self.as_user, *map(str, command)], cwd=self.folder, capture_output=True, text=True)
        if done.returncode != 0:
            raise Failed(f"{command[0]} failed: {(done.stderr or done.stdout).strip()[-500:]}")

    def start(self, *command):
        self.process = self.rig.start(self.name, self.server_core, [*self.as_user, *command])
        self.rig.until(self.process, "its first answer", lambda: self.try_sql("select 1")[0], seconds=60)

    def try_sql(self, text):
        done = subprocess.run([str(word) for word in self.client], input=text, capture_output=True, text=True, cwd="/")
        return done.returncode == 0, (done.stdout if done.returncode == 0 else done.stderr).strip()

    def sql(self, text):
        good, answer = self.try_sql(text)
        if not good:
            raise Failed(f"{self.name}: {answer[-500:]}")
        return answer

    def cpu_us(self):
        """Of the server and its children, those that have ended included."""
        pids = [self.process.pid]
        try:
            pids += pathlib.Path(f"/proc/{pids[0]}/task/{pids[0]}/children").read_text().split()
        except OSError:
            pass
        ticks = 0
        for n, pid in enumerate(pids):
            try:
                fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            except OSError:
                continue
            ticks += sum(map(int, fields[11:15 if n == 0 else 13]))
        return ticks * TICK_US


class Postgres(Database):
    name, user = "postgres", "postgres"

    def __init__(self, rig):
        super().__init__(rig)
        programs = postgres_programs()
        self.pgbench = programs / "pgbench"
        self.client = ["psql", "-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-h", self.folder, "-p", self.port, "-U", "semel", "postgres"]
        self.make(programs / "initdb", "-D", self.folder / "db", "-U", "semel", "-A", "trust", "-E", "UTF8", "--locale=C", "-N")
        settings = {"port": self.port, "listen_addresses": "127.0.0.1", "unix_socket_directories": self.folder, "shared_buffers": "1GB",
                    "max_wal_size": "4GB", "checkpoint_timeout": "15min", "max_connections": 100, "synchronous_commit": "on"}
        self.start(programs / "postgres", "-D", self.folder / "db", *(w for n, v in settings.items() for w in ("-c", f"{n}={v}")))
        self.version = self.sql("show server_version").split()[0]

    @property
    def url(self):
        return f"postgresql://semel@127.0.0.1:{self.port}/postgres?sslmode=disable" if self.rig.options.tcp else \
            f"postgresql:///postgres?host={self.folder}&port={self.port}&user=semel"

    def empty(self):
        """Our tables are gone, the references' are empty; both sides begin behind a checkpoint."""
        self.sql("set client_min_messages = warning; drop schema if exists semel cascade;"
                 f"drop table if exists {', '.join(INBOX)};\n" + (HERE / "postgres.sql").read_text()
                 + "\ncheckpoint;")

    def record(self):
        self.sql((HERE / "postgres_recorded.sql").read_text())


class Mysql(Database):
    """Not pinned: threads of InnoDB wait in turns for each other, and on one core they burn each other's time (32 clients: a
    tenth). For the same reason they do not spin: with two cores the bare client is four times as fast at 32 so."""

    name, user, pinned = "mysql", "mysql", False

    def __init__(self, rig):
        super().__init__(rig)
        self.socket = self.folder / "s"
        self.client = ["mariadb", "--no-defaults", "--batch", "--skip-column-names", "-S", self.socket, "-uroot"]
        self.make("mariadb-install-db", "--no-defaults", f"--datadir={self.folder}/db", "--auth-root-authentication-method=normal",
                  "--skip-test-db", f"--tmpdir={self.folder}")
        self.start("mariadbd", "--no-defaults", f"--datadir={self.folder}/db", f"--tmpdir={self.folder}", f"--port={self.port}", "--bind-address=127.0.0.1",
                   f"--socket={self.socket}", f"--pid-file={self.folder}/pid", "--skip-log-bin", "--skip-name-resolve",
                   "--innodb-flush-log-at-trx-commit=1", "--innodb-buffer-pool-size=1G", "--innodb-log-file-size=1G",
                   "--innodb-sync-spin-loops=0", "--innodb-spin-wait-delay=0", "--max-connections=200")
        self.sql("create user semel identified by 'semel'; create user semel@localhost identified by 'semel';"
                 "grant all on *.* to semel; grant all on *.* to semel@localhost")
        self.version = self.sql("select version()")

    @property
    def url(self):
        where = "" if self.rig.options.tcp else f"?socket={self.socket}"
        return f"mysql://semel:semel@127.0.0.1:{self.port}/semel{where}"

    def empty(self):
        self.sql("drop database if exists semel; create database semel;"
                 f"drop database if exists reference;\n" + (HERE / "mysql.sql").read_text())

    def record(self):
        self.sql((HERE / "mysql_recorded.sql").read_text())


DATABASES = {"postgres": Postgres, "mysql": Mysql}
