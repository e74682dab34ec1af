"""What the documents show and list is what the program does: examples are run, lists are compared with the sources."""
import os
import re
import subprocess
import sys

import pytest

from harness import ROOT, run_semel

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
ENVIRONMENT = {"OPENAI_API_KEY": "sk-of-the-example", "SEMEL_WEB_TOKEN": "token-of-the-example",
               "SEMEL_SECRET": "secret-of-the-example", "REDIS_PASSWORD": "password-of-the-example",
               "SENTINEL_PASSWORD": "password-of-the-example", "POSTGRES_PASSWORD": "password-of-the-example",
               "MYSQL_PASSWORD": "password-of-the-example", "RABBITMQ_URL": "amqp://semel:password@127.0.0.1:5672/",
               "SHOP_URL": "mysql://semel:password@127.0.0.1:3306/shop", "KAFKA": "127.0.0.1:9092",
               "ORDERS_URL": "postgresql://semel:password@127.0.0.1:5432/shop",
               "SEMEL_SHOP_TOKEN": "token-of-the-example"}
# Limits of the mock, of tables in memory and of the log's reader: nobody outside can meet them.
INTERNAL = {"kept_bytes_max", "kept_bodies_max", "kept_body_max", "kept_numbers_max", "body_max_bytes", "download_max_bytes",
            "content_max_bytes", "wait_max", "kSpareBuffersMax", "kKitsMax", "kTlsJoinMaxBytes", "body_part_max",
            "inline_value_max", "kSleepMax", "index_record_max_bytes", "claim_max_bytes", "claims_max_bytes", "claims_max_groups", "log_max_bytes", "open_files_max", "shown_max", "word_max", "ask_again_max",
            "foreground_backoff_max", "background_backoff_max", "lot_max", "lot_max_bytes", "seen_max", "text_max", "resets_max",
            "statements_prepared_max", "max"}


def sources(folder="src"):
    return [p for p in sorted((ROOT / folder).rglob("*.[ch]pp")) if not p.name.endswith("_test.cpp")]


def text_of(paths):
    return "\n".join(p.read_text() for p in paths)


def yaml_blocks():
    for page in PAGES:
        for number, block in enumerate(re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.M | re.S)):
            yield pytest.param(block, id=f"{page.relative_to(ROOT)}-{number}")
    for example in sorted((ROOT / "examples").rglob("*.yaml")):
        yield pytest.param(example.read_text(), id=str(example.relative_to(ROOT / "examples")))


@pytest.mark.parametrize("config", list(yaml_blocks()))
def test_every_configuration_shown_is_valid(config, tmp_path):
    file = tmp_path / "semel.yaml"
    file.write_text(config)
    done = run_semel("serve", "--check", "--config", file, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr


def test_the_sdk_example_pays_once_for_each_key(semel, up):
    done = subprocess.run([sys.executable, str(ROOT / "examples/openai_sdk.py"), "fast"], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "OPENAI_BASE_URL": f"http://127.0.0.1:{semel.port}/v1", "OPENAI_API_KEY": "sk-example"})
    assert done.returncode == 0, done.stderr
    outcomes = [line.split()[0] for line in done.stdout.splitlines()]
    assert outcomes == ["executed", "replayed"] * 2 and len(up.paid()) == 2


def test_every_error_code_is_explained():
    slug = r'"([a-z]+(?:-[a-z]+)*)"'
    code = text_of(sources("src/gateway"))
    given = set()
    for statement in re.findall(r"\bslug\s*=[^;,]*|Refusal\{\s*\d+\s*,\s*\"[a-z-]+\"", code):
        given |= set(re.findall(slug, statement))
    for statement in re.findall(r"\.code = [^;,]*|return \"[a-z-]+\";", code):
        given |= {s for s in re.findall(slug, statement) if "-" in s}
    given |= set(re.findall(r'constexpr const char\* \w+ = "([a-z-]+)";', (ROOT / "src/core/transition.cpp").read_text()))
    server = set(re.findall(r'\d{3},\s*"([a-z]+(?:_[a-z]+)+)"', text_of(sources("src/http"))))
    assert {"key-reused", "upstream-timeout", "busy", "unauthorized", "lease-lost", "stream-cut"} <= given, "the search finds them"
    assert {"malformed_request", "request_timeout", "internal_error"} <= server, "the search finds them"
    page = (ROOT / "docs/reference/errors.md").read_text()
    explained = set(re.findall(r"`([a-z]+(?:[-_][a-z]+)*)`", page))
    assert not (given | server) - explained


def test_every_limit_is_listed_and_none_is_invented():
    code = text_of(sources())
    page = (ROOT / "docs/reference/limits.md").read_text()
    named = set(re.findall(r"constexpr\s+[\w:<>]+\s+(\w*(?:_max|Max|_max_[a-z]+|_patience|_floor_bytes)\w*)\s*(?:=|\{)", code))
    server = (ROOT / "src/http/server.hpp").read_text().split("struct ServerLimits {")[1].split("\n};")[0]
    named |= set(re.findall(r"^\s+std::[\w:]+ (\w+)(?: = |\{)", server, re.M))
    assert {"followers_max", "kFramingGapMaxBytes", "head_timeout"} <= named, "the search finds them"
    cells = [row.split("|")[1] for row in page.splitlines() if row.startswith("| `")]
    listed = {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}
    assert not {n for n in named if n not in listed and n not in INTERNAL}
    assert not {n for n in listed if not re.search(rf"\b{n}\b", code)}


def test_every_header_of_ours_is_explained():
    named = set(re.findall(r'"(Semel-[A-Z][a-z]+(?:-[A-Z][a-z]+)*)', text_of(sources("src/gateway"))))
    assert {"Semel-Intent", "Semel-Outcome"} <= named
    page = (ROOT / "docs/reference/headers.md").read_text()
    assert not {n for n in named if f"`{n}" not in page}
