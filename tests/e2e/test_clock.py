"""The machine's clock is wrong by a year: while running, and across a restart (libfaketime on the gateway only)."""
import glob
import time

import pytest

import upstream
from harness import SHORT_LEASE, background, eventually, together
from upstream import Gate


def library():
    found = glob.glob("/usr/lib/*/faketime/libfaketimeMT.so.1") or glob.glob("/usr/lib/*/faketime/libfaketime.so.1")
    assert found, "libfaketime is not there: install the package faketime"
    return found[0]


def shifted(offset):
    return {"LD_PRELOAD": library(), "FAKETIME": offset, "FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1"}


@pytest.fixture
def movable(make, tmp_path):
    """A gateway whose wall clock the test moves while it runs: (semel, move)."""
    clock = tmp_path / "clock"
    clock.write_text("+0\n")
    semel = make(engine={"lease": SHORT_LEASE})
    semel.start(env={"LD_PRELOAD": library(), "FAKETIME_TIMESTAMP_FILE": str(clock), "FAKETIME_NO_CACHE": "1",
                     "FAKETIME_DONT_FAKE_MONOTONIC": "1", "DONT_FAKE_MONOTONIC": "1"})
    return semel, lambda offset: clock.write_text(offset + "\n")


@pytest.mark.parametrize("offset", ["+365d", "-365d"])
def test_a_clock_that_jumps_a_year_while_running_changes_nothing(movable, up, offset):
    semel, move = movable
    before = semel.chat("before")
    gate = Gate()
    up.on("held", upstream.plain(gate=gate))
    running = background(semel.chat, "running", model="held")
    gate.wait_until_entered()
    move(offset)
    joined = background(semel.chat, "running", model="held")
    time.sleep(4)  # more than a lease: an owner judged by the wall clock would be dead
    assert semel.chat("during").status == 200
    gate.open()
    assert running.result(20).body == joined.result(20).body
    assert semel.chat("before").body == before.body and semel.chat("during").replayed == "true"
    move("+0")
    assert semel.chat("before").body == before.body
    assert semel.chat("running", model="held").body == running.result(0).body
    assert len(up.paid()) == 3 and semel.metric("semel_paid_maybe_twice_total") == 0


@pytest.mark.parametrize("offset", ["+365d", "-365d"])
@pytest.mark.parametrize("how", ["stop", "kill"])
def test_a_clock_wrong_by_a_year_at_a_restart_loses_no_record(make, up, offset, how):
    semel = make().start()
    first = semel.chat("k")
    getattr(semel, how)()
    semel.start(env=shifted(offset))
    assert semel.chat("k").body == first.body and semel.chat("new").status == 200
    semel.kill()
    semel.start()
    assert semel.chat("k").body == first.body and semel.chat("new").replayed == "true" and len(up.paid()) == 2


def test_a_clock_far_ahead_is_named_in_the_log_and_by_doctor_until_it_is_accepted(make, up):
    semel = make().start()
    first = semel.chat("k")
    semel.stop()
    semel.start(env=shifted("+365d"))
    assert "clock" in semel.said().lower()
    assert semel.chat("k").body == first.body
    semel.stop()
    doctor = semel.command_line("doctor", "--config", semel.config_file, env=shifted("+365d"))
    assert "clock" in (doctor.stdout + doctor.stderr).lower()
    semel.start("--accept-clock", env=shifted("+365d"))
    anew = semel.chat("k")
    assert anew.attempt == 1 and anew.outcome == "executed" and len(up.paid()) == 2, "a year later the record has expired"


def test_a_clock_ahead_by_days_is_believed_at_a_restart(make, up):
    semel = make().start()
    semel.chat("k")
    semel.stop()
    semel.start(env=shifted("+2d"))
    assert semel.chat("k").outcome == "executed" and len(up.paid()) == 2, "kept for 24 hours, two days ago"


def test_time_never_falls_back_over_restarts(make, up):
    semel = make().start(env=shifted("+5d"))
    first = semel.chat("k")
    for offset in ("+1d", "-30d", "+3d"):
        semel.kill()
        semel.start(env=shifted(offset))
        assert semel.chat("k").body == first.body, offset
    assert len(up.paid()) == 1


@pytest.mark.parametrize("offset", ["+365d", "-365d"])
def test_a_restart_with_a_wrong_clock_takes_over_what_ran(make, up, offset):
    semel = make().start(fault="gateway.call.sent=kill")
    assert semel.try_chat("k") is None
    semel.wait_dead()
    semel.start(env=shifted(offset))
    answers = together(5, lambda i: semel.chat("k", timeout=20))
    assert {(a.status, a.body) for a in answers} == {(200, answers[0].body)}
    eventually(lambda: len(up.paid()) in (1, 2))
    assert answers[0].attempt == 2
