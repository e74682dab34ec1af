import pytest

import harness
from redis_server import RedisServer
from upstream import Upstream


def pytest_configure(config):
    if not config.option.collectonly and not harness.BINARY.exists():
        raise pytest.UsageError(f"{harness.BINARY} is not there: build it (cmake --preset release && ninja -C build/release "
                                "semel), or name another one with SEMEL_BIN")


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
def semel(make):
    return make().start()
