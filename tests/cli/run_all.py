#!/usr/bin/env python3
"""Runs the command-line tests: python3 tests/cli/run_all.py --sparge PATH [--quick] [--seed N] [--keep] [NAME ...]"""

import argparse
import os
import sys
import time
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from cases import Config  # noqa: E402

MODULES = ("test_oracle", "test_refusals", "test_maps", "test_extremes", "test_results", "test_preset",
           "test_tune", "test_documents")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sparge", required=True, help="the program to test")
    parser.add_argument("--quick", action="store_true", default=bool(os.environ.get("SPARGE_TEST_QUICK")),
                        help="smaller shapes, fewer cases; also by SPARGE_TEST_QUICK in the environment")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="keep the folders with the files of each test")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("names", nargs="*", help="module, module.Class or module.Class.test; default: all")
    options = parser.parse_args()
    Config.sparge = str(Path(options.sparge).resolve())
    Config.quick, Config.seed, Config.keep = options.quick, options.seed, options.keep
    suite = unittest.defaultTestLoader.loadTestsFromNames(options.names or MODULES)
    begin = time.monotonic()
    result = unittest.TextTestRunner(verbosity=2 if options.verbose else 1).run(suite)
    print(f"seed {options.seed}, {result.testsRun} tests, {time.monotonic() - begin:.1f} s", file=sys.stderr)
    return 0 if result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main())
