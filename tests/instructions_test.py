#!/usr/bin/env python3
"""The comparison of bench/instructions.py, without valgrind."""
import importlib.util
import json
import pathlib
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
spec = importlib.util.spec_from_file_location("instructions", ROOT / "bench" / "instructions.py")
instructions = importlib.util.module_from_spec(spec)
spec.loader.exec_module(instructions)


class Comparison(unittest.TestCase):
    def judge(self, before, now):
        rows, well = instructions.compare({"a": before} if before else {}, {"a": now} if now else {})
        return rows[0][3].split(":")[0], well

    def test_growth(self):
        self.assertEqual(self.judge(1000, 1000), ("", True))
        self.assertEqual(self.judge(1000, 1030), ("", True))
        self.assertEqual(self.judge(1000, 1031), ("GREW by more than 3%", False))

    def test_improvement_is_no_failure(self):
        self.assertEqual(self.judge(1000, 970), ("", True))
        self.assertEqual(self.judge(1000, 969), ("better", True))

    def test_cases_must_be_in_the_table(self):
        self.assertEqual(self.judge(None, 5), ("no entry", False))
        self.assertEqual(self.judge(5, None), ("no such case", False))

    def test_one_bad_case_is_enough(self):
        rows, well = instructions.compare({"a": 100, "b": 100, "c": 100}, {"a": 50, "b": 104, "c": 100})
        self.assertFalse(well)
        self.assertEqual([row[0] for row in rows if row[3].startswith("GREW")], ["b"])

    def test_table(self):
        rows, _ = instructions.compare({"a": 1000000, "gone": 5}, {"a": 1040000, "new": 7})
        lines = instructions.table_text(rows).splitlines()
        self.assertEqual(len(lines), 4)
        for part in ("1 000 000", "1 040 000", "+4.00%", "GREW"):
            self.assertIn(part, lines[1])
        self.assertIn("--update", lines[2])

    def test_toolchain(self):
        here = {"compiler": "g++ 12", "build": "Release", "highway": "1.0.3"}
        self.assertEqual(instructions.toolchain_difference(here, dict(here)), "")
        self.assertIn("g++ 13", instructions.toolchain_difference(here, {**here, "compiler": "g++ 13"}))
        self.assertNotEqual(instructions.toolchain_difference({}, here), "")

    def test_recorded_table_has_all_cases(self):
        recorded = json.loads(instructions.TABLE.read_text())
        self.assertEqual(set(recorded["instructions"]), set(instructions.CASES))
        self.assertEqual(recorded["toolchain"]["build"], "Release")


if __name__ == "__main__":
    unittest.main()
