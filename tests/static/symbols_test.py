#!/usr/bin/env python3
"""No name of the library may meet one of sparge.hpp: symbols_test.py NM ARCHIVE

Symbols of an archive that any program can see are C functions of sparge.h or in namespace sparge::impl; the header's own
are in sparge, and in an inline namespace of its version there.
"""

import re
import subprocess
import sys


def faults(symbols):
    """Those of the given (mangled) symbols that a program with sparge.hpp could define, too."""
    in_sparge = re.compile(r"^_ZT?[A-Z]*N[A-Z]*6sparge(?!4impl)")
    return [s for s in symbols if in_sparge.match(s)]


def main():
    # The check itself: sparge::Plan::~Plan(), the type information of sparge::Error, and what is allowed.
    bad = ["_ZN6sparge4PlanD1Ev", "_ZTIN6sparge5ErrorE", "_ZNK6sparge11Calibration7SettingEl"]
    good = ["_ZN6sparge4impl4PlanD1Ev", "_ZNSt6vectorIN6sparge4impl4PlanESaIS2_EED1Ev", "sparge_run"]
    assert faults(bad + good) == bad

    nm, archive = sys.argv[1:]
    out = subprocess.run([nm, "--defined-only", "--extern-only", "--format=posix", archive], check=True,
                         capture_output=True, text=True).stdout
    symbols = sorted({line.split()[0] for line in out.splitlines() if len(line.split()) > 1})
    assert any("6sparge" in s for s in symbols) and "sparge_run" in symbols, "nothing to check"
    found = faults(symbols)
    for symbol in found:
        print(f"{archive}: {symbol} is in namespace sparge; sparge.hpp could have it, too")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
