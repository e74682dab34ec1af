"""Real PostgreSQL servers for tests, with standbys, and PgBouncer in transaction mode."""
import glob
import os
import signal
import subprocess

from harness import eventually, free_port
from sql_server import DATABASE, PASSWORD, USER, SqlError, SqlServer, as_user, own_folder, run, template

ACCOUNT = "postgres"
COPIER = "copier"


def program(name):
    """A program of the newest PostgreSQL that is installed: Debian keeps them out of the PATH."""
    found = sorted(glob.glob(f"/usr/lib/postgresql/*/bin/{name}"), key=lambda path: int(path.split("/")[4]))
    return found[-1] if found else name


@template
def initialised():
    folder = own_folder("semel-postgres-template-", ACCOUNT)
    data = folder / "data"
    run(as_user(ACCOUNT, program("initdb"), "-D", data, "-U", "postgres", "--auth-local=trust", "--auth-host=scram-sha-256", "-E",
                "UTF8", "--locale=C.UTF-8", "--no-sync"))
    run(as_user(ACCOUNT, program("postgres"), "--single", "-D", data, "postgres"), input=(
        f"CREATE ROLE {USER} LOGIN PASSWORD '{PASSWORD}'\nCREATE ROLE {COPIER} LOGIN REPLICATION PASSWORD '{PASSWORD}'\n"
        f"CREATE DATABASE {DATABASE} OWNER {USER}\n"))
    return folder


class PostgresServer(SqlServer):
    """`PostgresServer("-c", "max_connections=20")`. User semel owns the database semel and is no superuser."""

    kind, scheme, account = "postgres", "postgresql", ACCOUNT
    fast_stop = signal.SIGINT
    not_durable = ("-c", "fsync=off", "-c", "full_page_writes=off")

    def template(self):
        return initialised() / "data"

    def command(self):
        return as_user(ACCOUNT, program("postgres"), "-D", self.data, "-p", self.port, "-c", "listen_addresses=127.0.0.1", "-c",
                       f"unix_socket_directories={self.home}", "-c", "shared_buffers=32MB", "-c", "max_wal_size=256MB",
                       *self.durability, *self.arguments, env=self.env)

    def sql(self, text, database=DATABASE, user="postgres"):
        """Rows of text; NULL is empty."""
        out = run(["psql", "-X", "-A", "-t", "-q", "-F", "\t", "-v", "ON_ERROR_STOP=1", "-h", self.home, "-p", self.port, "-U", user, "-d",
                   database or "postgres", "-c", text], env={"PGCONNECT_TIMEOUT": "10"})
        return [line.split("\t") for line in out.splitlines()]

    def table(self, name):
        return f"semel.semel_{name}"

    def fresh(self):
        """An empty database again, whoever is connected."""
        self.sql(f"DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE)", database="postgres")
        self.sql(f"CREATE DATABASE {DATABASE} OWNER {USER}", database="postgres")
        return self

    def standby(self, env=None):
        """A copy that follows this one as it goes, asynchronously."""
        folder = own_folder("semel-postgres-copy-", ACCOUNT)
        run(as_user(ACCOUNT, program("pg_basebackup"), "-D", folder / "data", "-R", "-X", "stream", "-c", "fast", "--no-sync", "-d",
                    f"postgresql://{COPIER}:{PASSWORD}@127.0.0.1:{self.port}/"), timeout=120)
        try:
            standby = PostgresServer(*self.arguments, copy_of=folder / "data", env=env)
        finally:
            run(["rm", "-rf", folder])
        eventually(lambda: self.sql("SELECT 1 FROM pg_stat_replication WHERE state = 'streaming'"), 30, "the standby follows")
        return standby

    def has_caught_up(self, standby):
        position = self.sql("SELECT pg_current_wal_lsn()")[0][0]
        return standby.sql(f"SELECT pg_last_wal_replay_lsn() >= '{position}'")[0][0] == "t"

    def part(self):
        """From now on no standby gets anything from this one."""
        self.sql(f"ALTER ROLE {COPIER} NOLOGIN")
        self.sql("SELECT pg_terminate_backend(pid) FROM pg_stat_replication")
        eventually(lambda: not self.sql("SELECT 1 FROM pg_stat_replication"), what="no standby is connected")

    def promote(self):
        self.sql("SELECT pg_promote(true)", database="postgres")
        eventually(lambda: self.sql("SELECT pg_is_in_recovery()")[0][0] == "f", 30, "promoted")


class PgBouncer:
    """PgBouncer in transaction mode before a server: clients of `url` share `connections` connections to it."""

    def __init__(self, server, connections=4, **settings):
        self.server = server
        self.port = free_port()
        self.home = own_folder("semel-pgbouncer-", ACCOUNT)
        settings = {"listen_addr": "127.0.0.1", "listen_port": self.port, "unix_socket_dir": "", "auth_type": "plain",
                    "auth_file": self.home / "users", "pool_mode": "transaction", "default_pool_size": connections,
                    "max_client_conn": 200, "admin_users": USER, **settings}
        (self.home / "users").write_text(f'"{USER}" "{PASSWORD}"\n')
        (self.home / "ini").write_text(f"[databases]\n* = host=127.0.0.1 port={server.port}\n[pgbouncer]\n" +
                                       "".join(f"{name} = {value}\n" for name, value in settings.items()))
        self.log = self.home / "log"
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(as_user(ACCOUNT, "pgbouncer", self.home / "ini"), stdout=log, stderr=log,
                                            stdin=subprocess.DEVNULL, cwd="/", start_new_session=True)
        eventually(self.answers, 20, "pgbouncer answers")

    def answers(self):
        try:
            return bool(self.ask("SHOW VERSION"))
        except SqlError:
            return False

    def ask(self, text, database="pgbouncer"):
        """Rows of text, from its own console or through it."""
        out = run(["psql", "-X", "-A", "-t", "-q", "-F", "\t", "-d", self.server.url(database=database, at=self.port), "-c", text],
                  env={"PGCONNECT_TIMEOUT": "10"})
        return [line.split("\t") for line in out.splitlines()]

    @property
    def url(self):
        return self.server.url(at=self.port)

    def clean_up(self):
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait(20)
        run(["rm", "-rf", self.home])
