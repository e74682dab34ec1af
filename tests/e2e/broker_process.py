"""A server of several processes that is gone with the tests, however those end."""
import os
import pathlib
import shutil
import signal
import socket
import subprocess

from harness import eventually
from sql_server import as_user, own_folder


def answers(port):
    try:
        with socket.create_connection(("127.0.0.1", port), 2):
            return True
    except OSError:
        return False


class ServerProcess:
    """A command in a session of its own, with a folder and a log that outlive its restarts. `user`: who runs it if we are root."""

    def __init__(self, name, user=None):
        self.user = user
        self.folder = own_folder(f"semel-{name}-", user) if user else pathlib.Path(own_folder(f"semel-{name}-", "root"))
        self.log = self.folder / "output.log"
        self.process = None
        self._guardian = None

    def start(self, command, ready, seconds, env=None):
        """Waits until `ready()`; an end before that raises with what it said."""
        if self.user:
            command = as_user(self.user, *command, env=env)
            env = None
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen([*map(str, command)], stdout=log, stderr=log, stdin=subprocess.DEVNULL, cwd=self.folder,
                                            start_new_session=True, env={**os.environ, **(env or {})})
        # The pipe's other end is closed when this program ends in whatever way.
        self._guardian = subprocess.Popen(["sh", "-c", f"read never; kill -9 -{self.process.pid} 2>/dev/null"], stdin=subprocess.PIPE,
                                          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)

        def up():
            if self.process.poll() is not None:
                raise AssertionError(f"{command[0]} ended with {self.process.returncode}: {self.said()[-2000:]}")
            return ready()
        eventually(up, seconds, f"{self.folder.name} answers")

    def said(self):
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def signal(self, number):
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass

    def kill(self):
        if self.process is None:
            return
        self.signal(signal.SIGKILL)
        self.process.wait(20)
        self.process = None
        self._guardian.kill()
        self._guardian.wait(20)
        self._guardian.stdin.close()

    def clean_up(self):
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
