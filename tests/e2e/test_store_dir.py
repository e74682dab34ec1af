"""The data directory is not as it should be: a clear sentence, an exit code, and nothing lost."""
import itertools
import shutil
import subprocess

import pytest

from harness import Died, Semel, eventually


def refuse(semel, *words):
    """Starting fails by itself, quickly, with a sentence that holds all words."""
    with pytest.raises(Died) as died:
        semel.start()
    assert died.value.code not in (0, -6, -11), died.value
    text = died.value.text
    for word in words:
        assert word.lower() in text.lower(), (word, text)
    assert len(text.splitlines()) < 20 and "terminate called" not in text and "Traceback" not in text
    return text


def filled(semel, count=20):
    semel.start()
    return {f"k{i}": semel.chat(f"k{i}", f"text {i}").body for i in range(count)}


def assert_all_there(semel, up, answers):
    paid = len(up.paid())
    for key, body in answers.items():
        again = semel.chat(key, f"text {key[1:]}")
        assert again.body == body and again.replayed == "true", key
    assert len(up.paid()) == paid


def wal(semel):
    files = sorted(semel.data.rglob("*.log"), key=lambda p: p.stat().st_size)
    assert files, "no write-ahead log in the directory"
    return files[-1]


def test_a_directory_that_another_process_uses_is_refused_and_the_other_goes_on(make, up):
    first = make()
    answers = filled(first)
    second = make()
    second.config["store"]["rocksdb"]["path"] = str(first.data)
    second.write_config()
    refuse(second, str(first.data), "lock")
    assert_all_there(first, up, answers)
    first.kill()
    second.start()
    assert_all_there(second, up, answers)


def test_a_lock_left_behind_by_a_killed_process_stops_nobody(make, up):
    semel = make()
    answers = filled(semel)
    semel.kill()
    semel.start()
    assert_all_there(semel, up, answers)


def test_a_path_that_is_a_file_is_refused(make):
    semel = make()
    semel.data.write_text("precious")
    refuse(semel, str(semel.data))
    assert semel.data.read_text() == "precious"


def test_a_path_that_cannot_be_made_is_refused(make, tmp_path):
    (tmp_path / "file").write_text("x")
    semel = make(store={"rocksdb": {"path": str(tmp_path / "file" / "data")}})
    refuse(semel, str(tmp_path / "file"))


def test_a_directory_that_cannot_be_written_is_refused(make):
    """/proc takes no new directories, whoever asks."""
    semel = make(store={"rocksdb": {"path": "/proc/semel-data"}})
    refuse(semel, "/proc/semel-data")


def test_missing_parents_are_made_or_named(make, tmp_path):
    path = tmp_path / "a" / "b" / "data"
    semel = make(store={"rocksdb": {"path": str(path)}})
    try:
        semel.start()
    except Died as died:
        assert str(path) in died.text and died.code != 0
    else:
        assert semel.chat("k").status == 200


def test_a_foreign_directory_is_not_taken_over(make):
    semel = make()
    semel.data.mkdir()
    (semel.data / "CURRENT").write_text("this is no database\n")
    (semel.data / "thesis.txt").write_text("precious")
    refuse(semel, str(semel.data))
    assert (semel.data / "thesis.txt").read_text() == "precious"


def test_a_corrupt_middle_of_the_log_is_an_error_and_the_data_is_left_alone(make, up):
    semel = make()
    answers = filled(semel, 60)
    semel.kill()
    file = wal(semel)
    good = file.read_bytes()
    middle = len(good) // 2
    file.write_bytes(good[:middle] + bytes(b ^ 0x5A for b in good[middle:middle + 64]) + good[middle + 64:])
    text = refuse(semel, str(semel.data))
    assert "corrupt" in text.lower() or "checksum" in text.lower() or "damaged" in text.lower(), text
    file.write_bytes(good)
    semel.start()
    assert_all_there(semel, up, answers)


@pytest.mark.parametrize("cut", [1, 7, 64])
def test_a_torn_tail_of_the_log_is_tolerated_and_everything_before_it_is_there(make, up, cut):
    semel = make()
    answers = filled(semel)
    semel.chat("last", "the tail")
    semel.kill()
    file = wal(semel)
    file.write_bytes(file.read_bytes()[:-cut])
    semel.start()
    assert_all_there(semel, up, answers)
    assert semel.chat("last", "the tail").status == 200


def test_a_missing_manifest_is_an_error(make, up):
    semel = make()
    answers = filled(semel)
    semel.kill()
    manifest = next(semel.data.rglob("MANIFEST-*"))
    aside = semel.folder / "manifest-aside"
    shutil.move(manifest, aside)
    refuse(semel, str(semel.data))
    shutil.move(aside, manifest)
    semel.start()
    assert_all_there(semel, up, answers)


def test_a_damaged_table_file_never_gives_a_wrong_answer(make, up):
    semel = make()
    answers = filled(semel)
    semel.kill()
    semel.start()  # opening writes what was in the log into table files
    semel.stop()
    tables = sorted(semel.data.rglob("*.sst"))
    if not tables:
        pytest.fail("no table files after a restart: this test needs another way to make them")
    for table in tables:
        data = bytearray(table.read_bytes())
        for i in range(min(200, len(data) // 4), len(data) // 2, 97):
            data[i] ^= 0xFF
        table.write_bytes(data)
    try:
        semel.start()
    except Died as died:
        assert str(semel.data) in died.text and died.code not in (-6, -11)
        return
    paid = len(up.paid())
    for key, body in answers.items():
        again = semel.chat(key, f"text {key[1:]}")
        assert again.body == body or again.status == 503, "an error, not silence and not a second call"
    assert len(up.paid()) == paid


def test_the_directory_moves_with_its_records(make, up):
    semel = make()
    answers = filled(semel)
    semel.stop()
    other = make()
    shutil.copytree(semel.data, other.data)
    other.start()
    assert_all_there(other, up, answers)


def test_the_directory_is_for_its_owner_only(make):
    semel = make().start()
    semel.chat("k")
    loose = [str(p) for p in [semel.data, *semel.data.rglob("*")] if p.stat().st_mode & 0o077]
    assert loose == [], "answers lie in it"


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 24 MiB in memory."""
    where = tmp_path / "disk"
    where.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(where)], capture_output=True, text=True)
    if done.returncode != 0:
        pytest.fail(f"this test mounts a small tmpfs and so must run as root: {done.stderr}")
    yield where
    subprocess.run(["umount", "-l", str(where)], check=True)


def test_a_full_disk_fails_closed_and_works_again_when_there_is_room(tmp_path, up, small_disk):
    semel = Semel(tmp_path / "semel", up, store={"rocksdb": {"path": str(small_disk / "data")}})
    try:
        semel.start()
        answers = {f"k{i}": semel.chat(f"k{i}", f"text {i}").body for i in range(10)}
        with open(small_disk / "ballast", "wb") as ballast:
            try:
                while True:
                    ballast.write(b"x" * 65536)
                    ballast.flush()
            except OSError:
                pass
        refused, i = None, 0
        while refused is None and i < 5000:  # what the store had reserved is used up first
            answer = semel.chat(f"full-{i}", "x" * 100)
            i += 1
            if answer.status == 503:
                refused = answer
        assert refused is not None and refused.headers.get("retry-after")
        paid = len(up.paid())
        for n in range(5):
            assert semel.chat(f"still-full-{n}").status == 503
        assert len(up.paid()) == paid, "no call without a durable claim"
        assert_all_there(semel, up, answers)
        (small_disk / "ballast").unlink()
        ids = itertools.count()
        assert eventually(lambda: semel.chat(f"room-{next(ids)}").status == 200, seconds=20, what="claims again")
        assert_all_there(semel, up, answers)
        semel.kill()
        semel.start()
        assert_all_there(semel, up, answers)
    finally:
        semel.clean_up()


def test_a_directory_of_a_newer_version_is_refused_and_left_alone(make, up):
    semel = make()
    answers = filled(semel)
    semel.stop()
    version = semel.data / "SEMEL_LAYOUT"
    present = version.read_text()
    version.write_text("999\n")
    before = {p: p.stat().st_mtime_ns for p in semel.data.rglob("*")}
    refuse(semel, str(semel.data), "999", "version")
    assert {p: p.stat().st_mtime_ns for p in semel.data.rglob("*")} == before, "nothing in it was touched"
    version.write_text(present)
    semel.start()
    assert_all_there(semel, up, answers)
