"""Rung: pure, in processes of their own: signals, the clock, and the line a rank leaves with. No torch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import pytest
from support.ranks.progress import finish, run_program, wait_until
from tpkernels.symmetric.signals import Signals, control_bytes, waits_for_peer, words_over

from tpengine.observe.activity import Activity, Doing, OtherRanks
from tpengine.observe.watch import Watch

# The program's clock moves only by `pass_time`, which then waits until the watch has looked at it and read its signals.
HEAD = """
import os, signal, sys, threading, time, types
import tpengine.observe.activity, tpengine.observe.watch
from tpengine.observe.activity import Activity
from tpengine.observe.watch import Watch

now, looks = [100.0], [0]
# More than the watch needs, once it has begun, to look and to say its last words: it leaves before the program goes on.
LOOKS = 12

def clock():
    looks[0] += threading.current_thread().name == "tpengine-watch"
    return now[0]

def pass_time(seconds):
    now[0] += seconds
    before = looks[0]
    while looks[0] < before + LOOKS:
        time.sleep(0.01)

def say(what):
    print(what, file=sys.stderr, flush=True)

tpengine.observe.activity.time = types.SimpleNamespace(monotonic=clock)
tpengine.observe.watch._POLL_SECONDS = 0.02
activity = Activity()
with Watch(3, activity, clock) as watch:
    activity.step = 6
"""


def leave(body: str, tmp_path: Path, *signals: signal.Signals) -> tuple[int, str]:
    """Run the body inside a watch, send the signals when it prints, return exit code and standard error."""
    script = tmp_path / "program.py"
    script.write_text(HEAD + "".join(f"    {line}\n" for line in body.splitlines()))
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    if signals:
        assert process.stdout.readline()
    for number in signals:
        process.send_signal(number)
    _, errors = finish(process)
    return process.returncode, errors


# Blocks the main thread in C as a collective does: Python's own handlers, which run between bytecodes, never come.
BLOCKED = (
    "print('ready', flush=True)\nimport ctypes\nmutex, lock = bytes(64), ctypes.CDLL(None).pthread_mutex_lock\n"
    "lock(mutex)\nlock(mutex)"
)


def waits_for_a_lock(pid: int) -> bool:
    """Whether a program's main thread sleeps in C, waiting for a lock that nobody ever opens."""
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[0]
    place = Path(f"/proc/{pid}/wchan").read_text()
    if state == "S" and place == "0":
        pytest.skip("this machine does not tell where a process sleeps: /proc/<pid>/wchan is 0")
    return state == "S" and place.startswith("futex")


def pending_signals(pid: int) -> bool:
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return any(int(lines[name], 16) for name in ("SigPnd", "ShdPnd"))


def test_a_blocked_main_thread_runs_no_handler_of_pythons(tmp_path: Path) -> None:
    """What makes the watch necessary: without it the same program does not react."""
    script = tmp_path / "program.py"
    script.write_text(f"import signal, sys\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(3))\n{BLOCKED}\n")
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline()
    try:
        wait_until(lambda: waits_for_a_lock(process.pid), process, "the program is not blocked")
        process.send_signal(signal.SIGTERM)
        wait_until(lambda: not pending_signals(process.pid), process, "the signal is not delivered")
        # Python's part in C has noted the signal; the thread that would run the handler waits for the lock again.
        wait_until(lambda: waits_for_a_lock(process.pid), process, "the program has heard")
    finally:
        process.kill()
        process.communicate()


def test_before_training_an_interrupt_ends_the_process_at_once(tmp_path: Path) -> None:
    code, errors = leave("activity.last_checkpoint = ': nothing yet'\n" + BLOCKED, tmp_path, signal.SIGINT)
    assert code == 130 and errors == ""  # rank 3: rank 0 speaks
    code, errors = leave(
        "watch._rank = 0\nactivity.last_checkpoint = ': nothing yet'\n" + BLOCKED, tmp_path, signal.SIGINT
    )
    assert code == 130 and errors == "tpengine: interrupted: nothing yet\n"


def test_before_training_a_request_to_terminate_names_what_was_going_on(tmp_path: Path) -> None:
    code, errors = leave("activity.begin('reading')\n" + BLOCKED, tmp_path, signal.SIGTERM)
    assert code == 143
    assert errors == "tpengine: rank 3 ends: SIGTERM: step 7, in reading for 0.0 s\n"


def test_ranks_that_only_start_are_silent(tmp_path: Path) -> None:
    """torchrun ends them when one has found an error of the user's, which is one line."""
    assert leave("activity.step = None\n" + BLOCKED, tmp_path, signal.SIGTERM) == (143, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def test_while_training_a_signal_is_noted_and_nothing_ends(tmp_path: Path, number: signal.Signals) -> None:
    body = (
        "activity.stoppable = True\nprint('ready', flush=True)\n"
        "while not watch.stop:\n    activity.begin('0F0')\n    time.sleep(0.01)\n"
        "watch._rank = 0\nwatch.leave_stopped(watch.stop, 'saved')"
    )
    assert leave(body, tmp_path, number) == (128 + number, "tpengine: saved\n")


# For programs whose main thread is blocked: another thread lets time pass.
LATER = """
def later():
    while not ({when}):
        time.sleep(0.01)
    for seconds in {seconds}:
        pass_time(seconds)
        say('still here')
threading.Thread(target=later, daemon=True).start()
"""


def later(seconds: tuple[float, ...], when: str = "True") -> str:
    return LATER.format(when=when, seconds=seconds)


def test_a_blocked_main_thread_is_reported_after_a_signal(tmp_path: Path) -> None:
    body = (
        "activity.stoppable = True\nactivity.ranks.explain = lambda what: f', waiting for {what}s peer'\n"
        "activity.begin('0B1')\n"
        "activity.longest_seconds = 1.0\n"
    )
    code, errors = leave(body + later((4.9, 0.2), "watch.stop") + BLOCKED, tmp_path, signal.SIGTERM)
    assert code == 70
    report = "SIGTERM, and nothing moved for 5 s after it: step 7, in 0B1 for 5.1 s, waiting for 0B1s peer"
    assert errors == f"still here\ntpengine: rank 3 ends: {report}\n"


def test_an_action_that_outlives_the_limit_is_reported(tmp_path: Path) -> None:
    body = "activity.begin('0F2')\nactivity.timeout_seconds = 0.5\n"
    code, errors = leave(body + later((0.4, 0.2)) + BLOCKED, tmp_path)
    report = "--train.timeout-seconds 0.5 is over: step 7, in 0F2 for 0.6 s"
    assert (code, errors) == (70, f"still here\ntpengine: rank 3 ends: {report}\n")


def test_what_is_not_timed_may_take_as_long_as_it_likes(tmp_path: Path) -> None:
    body = (
        "activity.begin('writing', timed=False)\nactivity.timeout_seconds = 0.2\npass_time(1.5)\nsay('still here')\n"
        "activity.begin('0F0')\npass_time(1)\nsay('and here')"
    )
    code, errors = leave(body, tmp_path)
    assert code == 70 and errors.startswith("still here\ntpengine: rank 3 ends: ") and "in 0F0 for 1.0 s" in errors


def test_a_second_interrupt_ends_a_slow_save(tmp_path: Path) -> None:
    """The same Ctrl-C often arrives twice, from the terminal and from torchrun; a person's second comes later."""
    body = (
        "watch._rank = 0\nactivity.stoppable = True\nactivity.begin('writing', timed=False)\n"
        "interrupt = lambda: (os.kill(os.getpid(), signal.SIGINT), pass_time(0))\n"
        "interrupt()\npass_time(1.9)\ninterrupt()\nsay('still here')\npass_time(0.2)\ninterrupt()\nsay('and here')"
    )
    code, errors = leave(body, tmp_path)
    assert code == 130 and errors == "still here\ntpengine: interrupted again: this step is lost\n"
    code, errors = leave(
        body.replace("activity.begin", "activity.last_checkpoint = ': saved in it'\nactivity.begin"), tmp_path
    )
    assert code == 130 and errors == "still here\ntpengine: interrupted again: saved in it\n"


def test_a_broken_explanation_does_not_swallow_the_report(tmp_path: Path) -> None:
    body = "activity.begin('0F2')\nactivity.ranks.explain = lambda what: 1 / 0\nactivity.timeout_seconds = 0.3\n"
    code, errors = leave(body + later((1.0,)) + BLOCKED, tmp_path)
    assert code == 70 and "whom it waited for is unknown: ZeroDivisionError" in errors


def test_a_finished_watch_gives_the_signals_back(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(
        "import signal\n"
        + HEAD
        + "    pass\n"
        + "print(signal.getsignal(signal.SIGINT) is signal.default_int_handler, signal.set_wakeup_fd(-1))\n"
    )
    done = run_program([sys.executable, str(script)], capture_output=True, text=True)
    assert done.stdout == "True -1\n", done.stderr


def test_a_rank_that_waits_for_nobody_is_never_given_up(tmp_path: Path) -> None:
    """A long forward pass is no sign of a dead peer: it ends, and the run saves."""
    body = (
        "watch._rank = 0\nactivity.stoppable = True\nactivity.ranks.waits = lambda what: what != '0F0'\n"
        "activity.longest_seconds = 0.1\nactivity.begin('0F0')\nprint('ready', flush=True)\n"
        "while not watch.stop:\n    time.sleep(0.01)\n"
        "pass_time(7)\nwatch.leave_stopped(watch.stop, 'saved')"
    )
    assert leave(body, tmp_path, signal.SIGTERM) == (143, "tpengine: saved\n")


def test_a_rank_whose_standard_error_is_closed_still_leaves(tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(HEAD + "".join(f"    {line}\n" for line in BLOCKED.splitlines()))
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline() and process.stderr is not None
    process.stderr.close()
    process.send_signal(signal.SIGTERM)
    wait_until(lambda: process.poll() is not None, process, "the rank has not left")
    assert process.returncode == 143


def test_a_rank_that_torchrun_has_left_behind_stops_by_itself(tmp_path: Path) -> None:
    """Nobody would pass on a request to it any more, and the next run would find it writing."""
    script, said = tmp_path / "program.py", tmp_path / "said"
    script.write_text(
        HEAD
        + "    activity.stoppable = True\n    print('ready', flush=True)\n"
        + "    while not watch.stop:\n        time.sleep(0.05)\n"
        + f"    open({str(said)!r}, 'w').write(str(watch.stop))\n"
    )
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, {str(script)!r}])"
    process = subprocess.Popen(
        [sys.executable, "-c", launcher],
        stdout=subprocess.PIPE,
        env={**os.environ, "TORCHELASTIC_RUN_ID": "drill"},
    )
    assert process.stdout is not None and process.stdout.readline()
    process.kill()
    process.stdout.read()  # until the rank itself has ended
    assert said.read_text() == str(int(signal.SIGTERM))


def test_nohup_is_respected(tmp_path: Path) -> None:
    body = "activity.stoppable = True\nprint('ready', flush=True)\ninput()\npass_time(0)\nsay(watch.stop)"
    script = tmp_path / "program.py"
    script.write_text(
        "import signal\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        + HEAD
        + "".join(f"    {line}\n" for line in body.splitlines())
    )
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, str(script)], stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    assert process.stdin is not None and process.stdout is not None and process.stdout.readline()
    process.send_signal(signal.SIGHUP)
    process.stdin.write("sent\n")
    process.stdin.flush()
    assert finish(process)[1] == "0\n"


class Left(Exception):
    """What a rank says when it leaves."""


class Pulses:
    moved_at = float("-inf")


def stopped_watch(
    monkeypatch: pytest.MonkeyPatch, longest_seconds: float, number: signal.Signals = signal.SIGTERM
) -> tuple[Watch, list[float], Pulses]:
    """A watch of a rank that waits in 0B1 since 100 s and was asked to stop then; with its clock and its pulse."""
    now, activity, pulse = [100.0], Activity(), Pulses()
    activity.step, activity.longest_seconds = 6, longest_seconds
    activity.now = Doing("0B1", 100.0, timed=True)
    watch = Watch(3, activity, lambda: now[0])
    activity.stoppable, watch._pulse = True, pulse  # type: ignore[assignment]
    watch.hear(number)

    def leave(code: int, line: str) -> NoReturn:
        raise Left(line)

    monkeypatch.setattr(watch, "leave", leave)
    return watch, now, pulse


def left_at(watch: Watch, now: list[float], until: int) -> int | None:
    """The first second at which the watch gives its rank up."""
    for second in range(int(now[0]), until):
        now[0] = float(second)
        try:
            watch.look_at_the_clock()
        except Left:
            return second
    return None


@pytest.mark.parametrize(("longest_seconds", "patience"), [(0.0, 20), (0.5, 5), (50.0, 150)])
def test_patience_follows_the_longest_wait_known(
    monkeypatch: pytest.MonkeyPatch, longest_seconds: float, patience: int
) -> None:
    """A rank that had waited 50 s before for a busy peer was given up after 20 s, unsaved."""
    watch, now, _ = stopped_watch(monkeypatch, longest_seconds)
    assert left_at(watch, now, 500) == 100 + patience + 1


def test_a_rank_waits_as_long_as_any_rank_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, now, pulse = stopped_watch(monkeypatch, 0.5)
    for now[0] in range(100, 200):
        pulse.moved_at = now[0]
        watch.look_at_the_clock()
    assert left_at(watch, now, 500) == 199 + 5 + 1, "nobody moves any more"


@pytest.mark.parametrize(
    ("number", "handled", "leaves"),
    [
        (signal.SIGTERM, None, True),
        (signal.SIGUSR1, None, False),
        (signal.SIGUSR1, "SIGTERM,SIGUSR1", True),
    ],
)
def test_torchruns_limit_is_kept_where_torchrun_sent_the_signal(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, handled: str | None, leaves: bool
) -> None:
    """It kills 30 s after the signals that it passes on; the report comes before. srun knows no such limit."""
    monkeypatch.delenv("TORCHELASTIC_SIGNALS_TO_HANDLE", raising=False)
    if handled is not None:
        monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", handled)
    watch, now, pulse = stopped_watch(monkeypatch, 0.5, number)
    pulse.moved_at = 1000.0
    assert left_at(watch, now, 200) is None, "there is no torchrun"
    now[0], watch.parent = 100.0, os.getppid()
    assert left_at(watch, now, 200) == (128 if leaves else None)


@pytest.mark.parametrize(
    ("number", "has_torchrun", "seconds"),
    [(signal.SIGTERM, True, 17.0), (signal.SIGTERM, False, 60.0), (signal.SIGUSR1, True, 60.0), (0, True, 60.0)],
)
def test_who_must_leave_before_torchrun_kills_knows_how_long_it_can_stay(
    monkeypatch: pytest.MonkeyPatch, number: int, has_torchrun: bool, seconds: float
) -> None:
    monkeypatch.delenv("TORCHELASTIC_SIGNALS_TO_HANDLE", raising=False)
    watch, now, _ = stopped_watch(monkeypatch, 0.5, signal.SIGTERM)
    watch.stop, watch.parent = number, os.getppid() if has_torchrun else None
    now[0] = watch._stopped_at + 10
    assert watch.seconds_left(60.0) == seconds and watch.seconds_left(3.0) == 3.0
    now[0] += 100
    assert watch.seconds_left(60.0) == (0.0 if seconds == 17.0 else 60.0)


class WaitsBut0F0(OtherRanks):
    def waits(self, what: object) -> bool:
        return what != "0F0"


def test_a_rank_moves_if_it_begins_another_thing_or_waits_for_nobody() -> None:
    watch = Watch(0, Activity())
    watch.activity.begin("0F0")
    assert watch.moves()
    time.sleep(0.05)
    assert not watch.moves(), "asleep in a wait"
    watch.activity.ranks = WaitsBut0F0()
    assert watch.moves()
    watch.activity.begin("0F1")
    assert watch.moves() and not watch.moves()
    watch.activity.begin("writing", timed=False)
    assert watch.moves() and watch.moves()


def test_a_rank_that_computes_while_others_might_have_to_act_moves() -> None:
    """A forward pass of a tensor-parallel rank is one action, in which it may compute or wait."""
    watch = Watch(0, Activity())
    watch.activity.begin("0F0")
    watch.moves()

    def take_time() -> None:
        begin = time.process_time()
        while time.process_time() - begin < 0.1:
            pass

    take_time()
    assert watch.moves()
    take_time()
    assert not watch.moves(computes_on_cores=False), "what waits for a GPU takes time on a core, too"


def test_a_rank_that_polls_for_a_peer_does_not_move() -> None:
    """It takes time on a core as one that computes does."""
    areas = [words_over(memoryview(bytearray(control_bytes(2)))) for _ in range(2)]
    signals = Signals(areas, 0, [os.getpid()] * 2, [0, 1], "pair", ["call"], timeout_seconds=1e9)
    watch = Watch(0, Activity())
    watch.activity.begin("0F0")
    watch.moves()
    answers: list[bool] = []

    def ask() -> None:
        main = threading.main_thread().ident or 0
        while not waits_for_peer(sys._current_frames()[main]):
            time.sleep(0.01)
        watch.moves()
        used = time.clock_gettime(time.pthread_getcpuclockid(main))
        while time.clock_gettime(time.pthread_getcpuclockid(main)) - used < 0.02:
            time.sleep(0.01)
        answers.append(watch.moves())
        areas[0].store(16, 1)  # the peer's notice

    thread = threading.Thread(target=ask)
    thread.start()
    signals.wait(1, 1, 0)
    thread.join()
    assert answers == [False]
