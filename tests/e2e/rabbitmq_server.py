"""A real RabbitMQ node for tests, and what is looked up in it with a client that is not ours."""
import itertools
import os
import pathlib
import secrets
import subprocess

import pika

from broker_process import ServerProcess, answers
from harness import free_port
from kafka_server import Message
from sql_server import as_user, run

ACCOUNT = "rabbitmq"
_names = itertools.count(1)
# Reads a queue's name from each line and answers how many messages it holds; ends with its input.
ASKER = """
Ask = fun(Name) ->
    case rpc:call('NODE', rabbit_amqqueue, lookup, [{resource, <<"/">>, queue, Name}]) of
        {ok, Queue} ->
            [{messages, Count}] = rpc:call('NODE', rabbit_amqqueue, info, [Queue, [messages]]),
            io:format("~b~n", [Count]);
        Other -> io:format("~0p~n", [Other])
    end
end,
Loop = fun Loop() ->
    case io:get_line("") of
        eof -> halt();
        Line -> Ask(list_to_binary(string:trim(Line))), Loop()
    end
end,
Loop().
"""


def programs():
    """Debian's wrapper in /usr/sbin changes the user by itself and reads /etc."""
    return next(pathlib.Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*")) / "sbin"


class RabbitServer:
    """One node on free ports."""

    kind = "rabbitmq"

    def __init__(self, *settings, rabbit=""):
        """`settings`: lines of rabbitmq.conf; `rabbit`: more of the application's environment."""
        self.settings = settings
        self._asker = None
        self.process = ServerProcess("rabbit", ACCOUNT)
        self.epmd = ServerProcess("epmd", ACCOUNT)
        self.port, self.epmd_port, self.distribution_port = free_port(), free_port(), free_port()
        try:
            folder = self.process.folder
            for name in ("home", "mnesia", "logs"):
                (folder / name).mkdir()
            self.cookie = secrets.token_hex(10)
            file = folder / "home/.erlang.cookie"
            file.write_text(self.cookie)
            file.chmod(0o400)
            (folder / "enabled_plugins").write_text("[].\n")
            # The broker looks for slow consumers once a minute otherwise.
            (folder / "advanced.config").write_text(f"[{{rabbit, [{{channel_tick_interval, 200}}{rabbit and ', ' + rabbit}]}}].\n")
            (folder / "rabbitmq.conf").write_text("\n".join([
                f"listeners.tcp.1 = 127.0.0.1:{self.port}", "vm_memory_high_watermark.absolute = 1GiB", "disk_free_limit.absolute = 50MB",
                "log.file.level = warning", "log.console = false", *settings]) + "\n")
            if os.geteuid() == 0:
                run(["chown", "-R", f"{ACCOUNT}:", folder])
            self.epmd.start(["epmd", "-port", self.epmd_port, "-address", "127.0.0.1"], lambda: answers(self.epmd_port), 20)
            self.start()
        except BaseException:
            self.clean_up()
            raise

    @property
    def environment(self):
        folder = self.process.folder
        return {"HOME": f"{folder}/home", "ERL_EPMD_PORT": self.epmd_port, "ERL_EPMD_ADDRESS": "127.0.0.1",
                "RABBITMQ_NODENAME": f"semel{self.port}@localhost", "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
                "RABBITMQ_NODE_PORT": self.port, "RABBITMQ_DIST_PORT": self.distribution_port,
                "RABBITMQ_CONFIG_FILE": f"{folder}/rabbitmq.conf", "RABBITMQ_ADVANCED_CONFIG_FILE": f"{folder}/advanced.config",
                "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/enabled_plugins", "RABBITMQ_MNESIA_BASE": f"{folder}/mnesia",
                "RABBITMQ_LOG_BASE": f"{folder}/logs", "RABBITMQ_PID_FILE": f"{folder}/rabbitmq.pid",
                "RABBITMQ_CONF_ENV_FILE": "/dev/null",
                "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}"}

    def start(self):
        self.process.start([programs() / "rabbitmq-server"], self.serves, 90, env=self.environment)
        return self

    def serves(self):
        if not answers(self.port):
            return False
        try:
            self.connect().close()
            return True
        except pika.exceptions.AMQPError:
            return False

    def control(self, *words):
        """rabbitmqctl; takes a second or two."""
        return run(as_user(ACCOUNT, programs() / "rabbitmqctl", *words, env=self.environment), timeout=60)

    def sync_queues(self):
        """Queues declared so far survive kill(): the node keeps what it commits in memory for some seconds."""
        self.control("eval", "mnesia:sync_log().")

    def kill(self):
        self.process.kill()

    def restart(self):
        self.kill()
        return self.start()

    def clean_up(self):
        if self._asker is not None:
            self._asker.kill()
            self._asker.wait(20)
        self.process.clean_up()
        self.epmd.clean_up()

    @property
    def url(self):
        return f"amqp://guest:guest@127.0.0.1:{self.port}/"

    # ---- queues

    def connect(self):
        return pika.BlockingConnection(pika.URLParameters(f"{self.url}%2F"))

    def queue(self, name=None, **arguments):
        """A new durable classic queue, or what its arguments say; its name."""
        name = name or f"queue-{next(_names)}"
        connection = self.connect()
        connection.channel().queue_declare(name, durable=True, arguments=arguments or None)
        connection.close()
        return name

    def delete_queue(self, name):
        connection = self.connect()
        connection.channel().queue_delete(name)
        connection.close()

    def send(self, queue, messages):
        """Publishes them in order, each confirmed."""
        connection = self.connect()
        channel = connection.channel()
        channel.confirm_delivery()
        for message in messages:
            headers = {name: value.decode() if isinstance(value, bytes) else value for name, value in message.headers}
            channel.basic_publish("", queue, message.value or b"", mandatory=True,
                                  properties=pika.BasicProperties(delivery_mode=2, message_id=message.id, headers=headers or None))
        connection.close()

    def ready(self, queue):
        connection = self.connect()
        try:
            return connection.channel().queue_declare(queue, passive=True).method.message_count
        finally:
            connection.close()

    def unsettled(self, queue):
        """Ready, and out to consumers. AMQP tells the first alone, and rabbitmqctl takes a second: an Erlang node of ours asks."""
        if self._asker is None or self._asker.poll() is not None:
            self._asker = subprocess.Popen(
                ["erl", "-noshell", "-sname", f"asker{self.port}@localhost", "-setcookie", self.cookie, "-kernel", "inet_dist_use_interface",
                 "{127,0,0,1}", "-eval", ASKER.replace("NODE", f"semel{self.port}@localhost")], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True, cwd="/", start_new_session=True,
                env={**os.environ, "HOME": "/tmp", "ERL_EPMD_PORT": str(self.epmd_port), "ERL_EPMD_ADDRESS": "127.0.0.1"})
        self._asker.stdin.write(queue + "\n")
        self._asker.stdin.flush()
        said = self._asker.stdout.readline().strip()
        assert said.isdigit(), f"{queue}: {said}"
        return int(said)

    def read(self, queue):
        """All messages that are ready in it; they stay there. None if there is no such queue."""
        connection = self.connect()
        try:
            channel, found = connection.channel(), []
            while True:
                method, properties, body = channel.basic_get(queue)
                if method is None:
                    return found
                headers = [(name, value if isinstance(value, bytes) else str(value).encode())
                           for name, value in (properties.headers or {}).items()]
                found.append(Message(body, None, headers, 0, properties.message_id))
        except pika.exceptions.ChannelClosedByBroker as closed:
            if closed.reply_code == 404:
                return []
            raise
        except pika.exceptions.ConnectionClosedByBroker as closed:
            if closed.reply_code == 541 and "noproc" in closed.reply_text:  # a queue that is being made
                return []
            raise
        finally:
            if connection.is_open:
                connection.close()  # what was got is unsettled, and ready again
