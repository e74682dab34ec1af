import pytest

import consumers
import harness
from kafka_server import KafkaServer
from mysql_server import MysqlServer
from postgres_server import PostgresServer
from rabbitmq_server import RabbitServer
from redis_faults import KEEPS
from redis_server import RedisServer
from upstream import Upstream


SQL = {"postgres": PostgresServer, "mysql": MysqlServer}


def pytest_configure(config):
    if not config.option.collectonly and not harness.BINARY.exists():
        raise pytest.UsageError(f"{harness.BINARY} is not there: build it (cmake --preset release && ninja -C build/release "
                                "semel), or name another one with SEMEL_BIN")


def pytest_runtest_setup():
    consumers.places.clear()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    """A test that fails tells what its processes said last, and what is left in its topics and queues."""
    report = (yield).get_result()
    if report.when != "call" or not report.failed:
        return
    for fixture in ("run", "make"):
        for semel in getattr(item.funcargs.get(fixture), "made", ()):
            report.sections.append((f"{semel.folder.name}, its last words", "\n".join(semel.said().splitlines()[-40:])))
    report.sections += [(place.name, consumers.told(place)) for place in consumers.places[:8]]


@pytest.fixture
def up():
    upstream = Upstream()
    yield upstream
    upstream.close()


@pytest.fixture
def make(tmp_path, up):
    """make(**config) -> a Semel in front of `up`, not started. All are ended after the test."""
    made = []

    def build(upstream=up, folder=None, **config):
        semel = harness.Semel(folder or tmp_path / f"semel{len(made)}", upstream, **config)
        made.append(semel)
        return semel
    build.made = made
    yield build
    for semel in made:
        semel.clean_up()


@pytest.fixture
def redis_servers(tmp_path):
    """redis_servers(*arguments, env={}) -> a running redis-server. All are ended after the test."""
    made = []

    def start(*arguments, env=None):
        made.append(RedisServer(tmp_path / f"server{len(made)}", *arguments, env=env))
        return made[-1]
    yield start
    for server in made:
        server.clean_up()


@pytest.fixture
def sql_servers():
    """sql_servers("postgres" or "mysql", *arguments) -> a running server. All are ended after the test, and what `keep` is told of."""
    made = []

    def start(kind, *arguments, **kw):
        made.append(SQL[kind](*arguments, **kw))
        return made[-1]

    def keep(thing):
        made.append(thing)
        return thing
    start.keep = keep
    yield start
    for one in reversed(made):
        one.clean_up()


@pytest.fixture(params=["redis", "postgres", "mysql"])
def server(request, redis_servers, sql_servers):
    """A server that gateways share, one of each kind in turn; it forgets nothing when it is killed."""
    return redis_servers(*KEEPS) if request.param == "redis" else sql_servers(request.param)


@pytest.fixture(scope="module")
def servers_of_the_file():
    """kind -> server, for tests that do it no harm."""
    made = {}
    yield made
    for one in made.values():
        one.clean_up()


@pytest.fixture(params=["redis", "postgres", "mysql"])
def unharmed_server(request, redis_servers, servers_of_the_file):
    """The same as `server`, for tests that only talk to it: the databases are one for all of a file's, and empty."""
    if request.param == "redis":
        return redis_servers(*KEEPS)
    if request.param not in servers_of_the_file:
        servers_of_the_file[request.param] = SQL[request.param]()
    return servers_of_the_file[request.param].fresh()


@pytest.fixture
def semel(make):
    return make().start()


@pytest.fixture(scope="session")
def kafka():
    """One broker for all tests of this process that do it no harm."""
    server = KafkaServer()
    yield server
    server.clean_up()


@pytest.fixture(scope="session")
def rabbitmq():
    server = RabbitServer()
    yield server
    server.clean_up()


@pytest.fixture(scope="session")
def databases():
    """kind -> an empty database on a server that is one for all tests of this process."""
    made = {}

    def fresh(kind):
        if kind not in made:
            made[kind] = SQL[kind]()
        return made[kind].fresh()
    yield fresh
    for one in made.values():
        one.clean_up()


@pytest.fixture(params=["kafka", "rabbitmq"])
def place(request):
    """A topic or a queue of its own, one of each in turn."""
    server = request.getfixturevalue(request.param)
    return consumers.Topic(server) if request.param == "kafka" else consumers.Queue(server)


@pytest.fixture
def topic(kafka):
    return consumers.Topic(kafka)


@pytest.fixture
def service():
    service = consumers.Service()
    yield service
    service.close()


@pytest.fixture
def run(tmp_path):
    """run(consumer, …, store=…) -> a process with these consumers, started. All are ended after the test."""
    made = []

    def start(*entries, fault=None, started=True, **config):
        made.append(consumers.process(tmp_path / f"process{len(made)}", *entries, **config))
        return made[-1].start(fault=fault) if started else made[-1]
    start.made = made
    yield start
    for one in made:
        one.clean_up()
