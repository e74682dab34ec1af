"""Real MariaDB servers for tests."""
import os
import signal

from harness import eventually
from sql_server import DATABASE, PASSWORD, USER, SqlError, SqlServer, own_folder, run, template

ACCOUNT = "mysql"
SMALL = ("--innodb-buffer-pool-size=32M", "--innodb-log-file-size=16M")


@template
def installed():
    folder = own_folder("semel-mysql-template-", ACCOUNT)
    who = [f"--user={ACCOUNT}"] if os.geteuid() == 0 else []
    run(["mariadb-install-db", "--no-defaults", f"--datadir={folder / 'data'}", f"--tmpdir={folder}", *who,
         "--auth-root-authentication-method=normal", "--skip-test-db", *SMALL], timeout=120)
    return folder


class MysqlServer(SqlServer):
    """`MysqlServer("--max-connections=20")`. User semel may do everything in the database semel and nothing else."""

    kind, scheme, account = "mysql", "mysql", ACCOUNT
    fast_stop = signal.SIGTERM
    not_durable = ("--innodb-flush-method=nosync",)

    def template(self):
        return installed() / "data"

    def command(self):
        who = [f"--user={ACCOUNT}"] if os.geteuid() == 0 else []
        return ["env", *(f"{name}={value}" for name, value in self.env.items()), "mariadbd", "--no-defaults", *who, f"--datadir={self.data}", f"--socket={self.home}/sock",
                f"--tmpdir={self.home}", f"--pid-file={self.home}/pid", "--bind-address=127.0.0.1", f"--port={self.port}", "--skip-log-bin",
                "--skip-name-resolve", "--character-set-server=utf8mb4", "--performance-schema=OFF", *SMALL,
                *self.durability, *self.arguments]

    def start(self):
        super().start()
        if not self.sql("SELECT 1 FROM mysql.user WHERE user = %s" % quoted(USER), database=""):
            self.sql(f"CREATE USER {USER}@'127.0.0.1' IDENTIFIED BY {quoted(PASSWORD)};"
                     f"CREATE DATABASE {DATABASE}; GRANT ALL ON {DATABASE}.* TO {USER}@'127.0.0.1'", database="")
        return self

    def sql(self, text, database=DATABASE, user="root"):
        """Rows of text; NULL is the word NULL."""
        command = ["mariadb", "--no-defaults", "--connect-timeout=10", "-S", self.home / "sock", f"-u{user}", "-N", "-B",
                   *(["-D", database] if database else []), "-e", text]

        def rows():
            try:
                return [line.split("\t") for line in run(command).splitlines()],
            except SqlError as full:
                # Whoever is being turned away has the administrator's place for that moment.
                if "Too many connections" not in str(full):
                    raise
        return eventually(rows, 20, "a connection for the administrator")[0]

    def table(self, name):
        return f"semel_{name}"

    def fresh(self):
        """An empty database again, whoever is connected."""
        self.sql(f"DROP DATABASE IF EXISTS {DATABASE}; CREATE DATABASE {DATABASE}", database="")
        return self


def quoted(text):
    return "'" + text.replace("\\", "\\\\").replace("'", "''") + "'"
