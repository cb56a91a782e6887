"""Records that survive restarts and each other, and honest rates."""

import json
import math
import shutil
import subprocess
import sys

import pytest

from hyjax.train.metrics import Logger, Throughput, describe_metrics, next_attempt, read_records


def lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def events(workdir):
    """{file name: its scalar (tag, step, value) triples}."""
    from tensorboardX.event_file_writer import EventFileWriter  # noqa: F401  (the format's own module must be there)
    from tensorboardX.proto.event_pb2 import Event

    found = {}
    for path in sorted(workdir.glob("events.out.tfevents.*")):
        data, position, triples = path.read_bytes(), 0, []
        while position < len(data):
            length = int.from_bytes(data[position : position + 8], "little")
            event = Event.FromString(data[position + 12 : position + 12 + length])
            triples += [(v.tag, event.step, v.simple_value) for v in event.summary.value]
            position += 16 + length
        found[path.name] = triples
    return found


def test_attempts_append_and_never_truncate_each_other(tmp_path, capsys):
    for attempt in (1, 2, 3):  # all within a second, in one process: same clock, same pid
        logger = Logger(tmp_path, steps=100)
        assert logger.attempt == attempt
        logger.log(10 * attempt, {"loss": float(attempt), "utilisation": None})
        logger.close()
    records = [line for line in lines(tmp_path) if line["split"] != "start"]
    assert [(r["attempt"], r["step"], r["loss"], r["split"]) for r in records] == [
        (1, 10, 1.0, "train"),
        (2, 20, 2.0, "train"),
        (3, 30, 3.0, "train"),
    ]
    assert all(r["time"] > 1e9 and r["utilisation"] is None for r in records)
    files = events(tmp_path)
    assert len(files) == 3
    assert sorted(t for triples in files.values() for t in triples) == [
        ("train/loss", 10 * a, float(a)) for a in (1, 2, 3)
    ]
    assert capsys.readouterr().out.splitlines()[0] == "step  10/100  train  loss 1.0000"


# Opens loggers as fast as it can, the first at the moment that its parent gives.
WRITER = """
import sys
from hyjax.train.metrics import Logger

workdir, count = sys.argv[1], int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
for _ in range(count):
    logger = Logger(workdir, steps=9, console=False)
    for step in range(1, 5):
        logger.log(step, {"loss": float(logger.attempt)})
        logger.log_text(step, "sample", "x" * 20_000)
    logger.close()
"""


def test_processes_that_start_at_once_do_not_share_an_attempt_or_a_line(tmp_path):
    """P27 with real processes: 2 · 8 loggers in one workdir, the first two within milliseconds."""
    command = [sys.executable, "-c", WRITER, str(tmp_path), "8"]
    writers = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        writer.stdin.write("\n")
        writer.stdin.flush()
    assert [writer.communicate(timeout=60) and writer.returncode for writer in writers] == [0, 0]
    found = lines(tmp_path)  # every line is whole
    assert all(type(r["step"]) is int and type(r["attempt"]) is int and r["time"] > 1e9 for r in found)
    starts = [line for line in found if line["split"] == "start"]
    assert sorted(line["attempt"] for line in starts) == list(range(1, 17))
    assert {line["pid"] for line in starts} == {writer.pid for writer in writers}
    for attempt in range(1, 17):
        mine = [line["split"] for line in found if line["attempt"] == attempt]
        assert mine == ["start", *["train", "text"] * 4]
    assert len(found) == 16 * 9
    scalars = [[t[1:] for t in triples if t[0] == "train/loss"] for triples in events(tmp_path).values()]
    assert sorted(scalars) == [[(step, float(attempt)) for step in (1, 2, 3, 4)] for attempt in range(1, 17)]


def test_attempts_that_never_logged_keep_their_number(tmp_path):
    """A process killed between the claim of its number and its first line; and a workdir without claims."""
    (tmp_path / "attempts").mkdir()
    (tmp_path / "attempts" / "1").touch()
    assert next_attempt(tmp_path) == 2
    logger = Logger(tmp_path, steps=9, console=False)
    logger.close()
    assert logger.attempt == 2 and next_attempt(tmp_path) == 3
    shutil.rmtree(tmp_path / "attempts")
    assert next_attempt(tmp_path) == 3 and next_attempt(tmp_path / "nowhere") == 1


def test_a_line_cut_off_by_a_full_disk_costs_only_itself(tmp_path):
    class Full:
        """Takes half a line, then refuses."""

        def __init__(self, file):
            self.file, self.room = file, 30

        def write(self, line):
            if not self.room:
                raise OSError(28, "No space left on device")
            written, self.room = self.file.write(line[: self.room]), 0
            return written

    logger = Logger(tmp_path, steps=9, console=False)
    logger.log(1, {"loss": 1.0})
    file, logger._file = logger._file, Full(logger._file)
    with pytest.raises(OSError, match="No space"):
        logger.log(2, {"loss": 2.0})
    logger._file = file
    logger.log(3, {"loss": 3.0})
    logger.close()
    assert [r["step"] for r in read_records(tmp_path)] == [1, 3]


def test_a_line_cut_off_by_a_kill_costs_only_itself(tmp_path):
    logger = Logger(tmp_path, steps=9, console=False)
    for step in (1, 2):
        logger.log(step, {"loss": 1.0})
    logger.close()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-9])
    logger = Logger(tmp_path, steps=9, console=False)
    logger.log(2, {"loss": 5.0})
    logger.close()
    assert [(r["step"], r["attempt"]) for r in read_records(tmp_path)] == [(1, 1), (2, 2)]


def test_records_of_a_resumed_run_hold_each_step_once(tmp_path):
    for start, stop in [(0, 5), (3, 8)]:
        logger = Logger(tmp_path, steps=9, start=start, console=False)
        for step in range(start + 1, stop + 1):
            logger.log(step, {"loss": float(step)})
            if step == 2:
                logger.log(step, {"loss": 0.5}, split="heldout")
        logger.log_text(stop, "sample", "a\nb")
        logger.close()
    train = read_records(tmp_path, "train")
    assert [(r["step"], r["attempt"]) for r in train] == [(s, 1 if s < 4 else 2) for s in range(1, 9)]
    assert [r["step"] for r in read_records(tmp_path, "heldout")] == [2]
    assert read_records(tmp_path, "text")[-1]["text"] == "a\nb"
    assert len(lines(tmp_path)) == 2 + 10 + 1 + 2  # nothing was taken out of the file itself
    assert [line["step"] for line in lines(tmp_path) if line["split"] == "start"] == [0, 3]


def test_what_no_person_follows_is_recorded_and_not_printed(tmp_path, capsys):
    logger = Logger(tmp_path, steps=9)
    logger.log(3, {"reason": "done"}, split="end")
    logger.close()
    assert capsys.readouterr().out == "" and read_records(tmp_path, "end")[0]["reason"] == "done"


def test_non_finite_numbers_are_valid_json_and_come_back(tmp_path):
    logger = Logger(tmp_path, steps=1, console=False)
    logger.log(1, {"loss": math.nan, "grad_norm": math.inf})
    logger.close()

    def refuse(text):
        raise AssertionError(text)

    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
    record = read_records(tmp_path)[0]
    assert math.isnan(record["loss"]) and record["grad_norm"] == math.inf


def test_rates_leave_out_compilation_and_pauses():
    now = [0.0]
    rates = Throughput(forward_flops_per_token=1e6, device_kind="TPU v4", num_devices=2, clock=lambda: now[0])
    rates.add(999)  # the step that compiles
    now[0] = 60.0
    assert set(rates.read().values()) == {None}
    rates.start()
    for _ in range(4):
        now[0] += 0.5
        rates.add(1000)
        with rates.paused():
            now[0] += 100.0
    read = rates.read()
    assert read["tokens_per_second"] == pytest.approx(2000)
    assert read["model_flops_per_second"] == pytest.approx(3 * 1e6 * 2000)
    assert read["utilisation"] == pytest.approx(6e9 / (2 * 275e12))
    now[0] += 2.0
    rates.add(1000)
    assert rates.read()["tokens_per_second"] == pytest.approx(500)  # a window of its own
    assert rates.read()["tokens_per_second"] is None


def test_unknown_peaks_are_null_and_said_so():
    rates = Throughput(1e6, "cpu", clock=iter([0.0, 1.0]).__next__)
    rates.start()
    rates.add(10)
    read = rates.read()
    assert read["utilisation"] is None and read["model_flops_per_second"] == pytest.approx(3e7)
    assert "'cpu' is not known" in rates.describe()
    assert describe_metrics(read) == "10 tokens/s  0.0 GFLOP/s"


def test_training_modules_import_without_the_optional_libraries():
    """Step, optimizer and metrics work where grain, ml_collections and tensorboardX are not installed."""
    code = """
import sys
for name in ("grain", "ml_collections", "tensorboardX", "matplotlib"):
    sys.modules[name] = None
import tempfile
import hyjax.train.step, hyjax.train.optimizer, hyjax.train.plots
from hyjax.train.metrics import Logger
logger = Logger(tempfile.mkdtemp(), steps=1)
logger.log(1, {"loss": 1.0})
logger.close()
import jax
assert not jax._src.xla_bridge._backends, "importing touched a device"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "tensorboardX is not installed" in done.stderr
