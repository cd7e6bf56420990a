"""Lost ranks: lost_rank_test.py MPIRUN LOST_RANK. Every other rank names the one that is lost, in time, and nothing hangs."""

import re
import subprocess
import sys
import time

RANKS, CULPRIT, TIMEOUT_S, MORE_S = 4, 1, 3, 2
RANK_LOST, INTERNAL = 7, 4
SAID = re.compile(r"^(\d): status (\d+), lost (-?\d+), call (\d+), after ([\d.]+) s: (.*)$", re.MULTILINE)
AGAIN = re.compile(r"^(\d): again status (\d+): (.*)$", re.MULTILINE)


def run(mpirun, program, how):
    began = time.monotonic()
    done = subprocess.run([*mpirun, "-n", str(RANKS), program, how], capture_output=True, text=True, timeout=60, check=False)
    return done, time.monotonic() - began


def check(how, text, soonest, done):
    """All others speak of the culprit, between `soonest` seconds and the deadline."""
    others = {}
    for rank, status, lost, call, seconds, said in SAID.findall(done.stdout):
        others[int(rank)] = (int(status), int(lost), int(call), float(seconds), said)
    own = others.pop(CULPRIT, None)
    context = f"{how}:\n{done.stdout}{done.stderr}"
    assert sorted(others) == [r for r in range(RANKS) if r != CULPRIT], context
    for status, lost, call, seconds, said in others.values():
        assert status == RANK_LOST and lost == CULPRIT and call == 2, context
        assert said.startswith(f"rank {CULPRIT} ") and re.search(text, said), context
        assert soonest <= seconds <= TIMEOUT_S + MORE_S, context
    again = {int(rank): (int(status), said) for rank, status, said in AGAIN.findall(done.stdout)}
    for rank in others:
        assert again[rank][0] == RANK_LOST and "of no use any more" in again[rank][1], context
    assert done.returncode != 0, context
    print(f"{how}: {max(seconds for _, _, _, seconds, _ in others.values()):.2f} s, {others[0][-1]}")
    return own


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    mpirun, program = sys.argv[1:-1], sys.argv[-1]
    whoever = r"|does not do its part, says rank \d"
    check("stopped", r"(is silent|has not come): nothing from it for 3\.\d s" + whoever, TIMEOUT_S - 0.5, run(mpirun, program, "stopped")[0])
    check("missing", r"has not come: (its last call is 2, not 3, after 3 s \(timeout_s\)|nothing from it for 3\.\d s)" + whoever, TIMEOUT_S - 0.5, run(mpirun, program, "missing")[0])
    check("leaves", r"has left the group" + whoever, 0, run(mpirun, program, "leaves")[0])
    own = check("fails", "has failed with an error of its own" + whoever, 0, run(mpirun, program, "fails")[0])
    assert own is not None and own[0] == INTERNAL and own[4] == "no more threads", own
    # Nobody can say anything of a rank that is killed: mpirun ends all of them.
    done, seconds = run(mpirun, program, "killed")
    assert done.returncode != 0 and seconds < TIMEOUT_S + MORE_S + 5, (done, seconds)
    assert "signal 9" in done.stdout + done.stderr, done
    print(f"killed: the job ended after {seconds:.1f} s")


if __name__ == "__main__":
    main()
