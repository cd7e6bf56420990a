"""Measures one case: every contestant in turn, round after round, the least time of each; and checks its answer."""

import os
import time
from dataclasses import asdict

import cases
import peers
import report

SAMPLE_SECONDS = 0.01  # short calls are repeated within a sample, or the clock and Python would be measured
ROUNDS = {"quick": (2, 4), "default": (3, 8), "full": (5, 20)}  # at least, at most
CASE_SECONDS = {"quick": 0.6, "default": 4.0, "full": 15.0}  # more rounds than the least only within this time
BUSY_PATIENCE = 3
IDLE_SECONDS = 0.05


def measure_case(case, found, missing, level):
    """One entry per contestant: time_ms and error, or `missing` with the reason, or `wrong`."""
    inputs = cases.Inputs(case)
    entries, ready = [], []
    for who in peers.contestants(case, level):
        entry = {"case": asdict(case), "label": case.label, "name": who.name, "peer": who.peer,
                 "dense_yardstick": case.kept < 1 and not who.uses_map, "threads": who.threads or case.threads}
        entries.append(entry)
        if who.peer in missing:
            entry["missing"] = missing[who.peer]
            continue
        try:
            ready.append(prepare(case, inputs, who, found[who.peer], entry))
        except Exception as error:  # a foreign library may throw anything; the others are still worth measuring
            entry["missing"] = peers.one_line(error)
    before = OtherLoad()
    try:
        run_rounds(ready, level, before)
    finally:
        other = before.cores()
        for entry in entries:
            entry["other_cpu"] = other
        for run, entry in ready:
            finish(run, entry)
    return entries


def prepare(case, inputs, who, peer, entry):
    """Opens, runs once (compiling, first touch of memory), judges the result, finds how often to call per sample."""
    run = peer.open(case, inputs, who)
    run.run()
    entry["error"] = inputs.error(run.output(), dense=entry["dense_yardstick"])
    entry["error_bound"] = who.bound
    if not entry["error"] <= who.bound:  # also catches NaN
        entry["wrong"] = f"relative L1 {entry['error']:.2g} is above {who.bound:g}"
    entry["idle_cpu"] = idle_cpu()
    start = time.perf_counter()
    run.run()
    entry["calls"] = max(1, min(1000, int(SAMPLE_SECONDS / (time.perf_counter() - start + 1e-9))))
    entry["samples_ms"] = []
    return run, entry


def idle_cpu():
    """Cores that this process keeps busy while it does nothing: spinning threads of whoever ran last."""
    before, start = time.process_time(), time.perf_counter()
    time.sleep(IDLE_SECONDS)
    return (time.process_time() - before) / (time.perf_counter() - start)


class OtherLoad:
    """Cores that other processes keep busy meanwhile: measurements on a busy machine say so."""

    def __init__(self):
        self.start, self.own, self.all = time.perf_counter(), time.process_time(), self.busy_seconds()

    @staticmethod
    def busy_seconds():
        try:
            with open("/proc/stat") as stat:
                user, nice, system, _, _, interrupt, soft, steal = map(int, stat.readline().split()[1:9])
        except (OSError, ValueError):
            return 0.0
        return (user + nice + system + interrupt + soft + steal) / os.sysconf("SC_CLK_TCK")

    def cores(self):
        passed = time.perf_counter() - self.start
        others = self.busy_seconds() - self.all - (time.process_time() - self.own)
        return max(0.0, others / passed) if passed > 0.1 else 0.0  # the system counts in hundredths of a second


def run_rounds(ready, level, load):
    least, most = ROUNDS[level]
    start = time.perf_counter()
    for number in range(most):
        # On a busy machine it takes more rounds until everyone has had a quiet moment.
        seconds = CASE_SECONDS[level] * (BUSY_PATIENCE if load.cores() > report.BUSY else 1)
        if number >= least and time.perf_counter() - start > seconds:
            break
        # Every other round backwards, so that nobody always follows the same neighbour.
        for run, entry in ready if number % 2 == 0 else reversed(ready):
            sample = time_sample(run, entry["calls"])
            if not entry["samples_ms"] or sample < min(entry["samples_ms"]):
                entry["stages_ms"] = run.stages() if run.stages else None
            entry["samples_ms"].append(sample)


def time_sample(run, calls):
    if calls > 1:
        run.run()  # the caches hold somebody else's data; a long call does not notice
    start = time.perf_counter()
    for _ in range(calls):
        run.run()
    return 1e3 * (time.perf_counter() - start) / calls


def finish(run, entry):
    run.close()
    if entry["samples_ms"]:
        entry["time_ms"] = min(entry["samples_ms"])
    else:
        entry.setdefault("missing", "interrupted")


def add_ratios(entries):
    """ratio = time of the yardstick in the same case / own time."""
    yardstick = {entry["label"]: entry.get("time_ms") for entry in entries if entry["name"] == peers.YARDSTICK.name
                 and "wrong" not in entry}
    for entry in entries:
        base = yardstick.get(entry["label"])
        if base and entry.get("time_ms"):
            entry["ratio"] = base / entry["time_ms"]
