#!/usr/bin/env python3
"""Output files from outside: never one file twice, never an input, all of them or none, safe from a power cut.

Standard library only: python3 cli_outputs_test.py PATH_TO_SPARGE PATH_TO_FILE_CALLS (a library made of file_calls.c)
"""
import json
import os
import pathlib
import subprocess
import sys
import unittest

import cli_verbs_test as verbs
from cli_verbs_test import call, npy, read_npy

FILE_CALLS = ""


class Files(verbs.Folder):
    def setUp(self):
        super().setUp()
        for seed, name in enumerate("qkv"):
            npy(self.path(name + ".npy"), "<f4", (1, 70, 8), verbs.floats(560, seed=seed))
        self.inputs = sum((("--" + n, self.path(n + ".npy")) for n in "qkv"), ())

    def tree(self):
        """Every file and folder with what it holds; links by where they point."""
        found = {}
        for path in sorted(self.folder.rglob("*")):
            found[str(path)] = (os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else None)
        return found

    def refused(self, *args, says=(), code=2, **more):
        before = self.tree()
        done = call(*args, **more)
        self.assertEqual((done.returncode, done.stdout), (code, ""), done.stderr)
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)
        for part in says:
            self.assertIn(part, done.stderr)
        self.assertEqual(self.tree(), before, "files were touched")
        return done

    def capture(self, name, heads=2, tokens=70, **metadata):
        tensors = {n: ("F32", (h, tokens, 8), verbs.floats(h * tokens * 8, seed=h)) for n, h in
                   (("q", heads), ("k", 1), ("v", 1))}
        self.path(name).parent.mkdir(parents=True, exist_ok=True)
        verbs.safetensors(self.path(name), tensors, metadata)
        return self.path(name)

    def watched(self, *args, fail=""):
        """Runs with the calls noted; `fail` = "rename:2": the second rename fails. Returns the process and the calls."""
        log = self.folder.parent / (self.folder.name + ".calls")
        self.addCleanup(log.unlink, missing_ok=True)
        log.unlink(missing_ok=True)
        env = {"LD_PRELOAD": FILE_CALLS, "SPARGE_CALLS": str(log), "ASAN_OPTIONS": "verify_asan_link_order=0"}
        done = call(*args, env={**env, **({"SPARGE_FAIL": fail} if fail else {})})
        return done, [tuple(line.split(" ")) for line in log.read_text().splitlines()] if log.exists() else []


class SameFile(Files):
    """Every way of spelling one file, absent and present, for pairs of outputs and for outputs that are inputs."""

    def spellings(self, present):
        """(first, second) that name one file. All in a folder `d`; `l` is a link to it."""
        self.path("d/sub").mkdir(parents=True, exist_ok=True)
        self.path("l").symlink_to("d")
        d = self.path("d")
        if present:
            (d / "x.npy").write_bytes(b"precious")
            os.link(d / "x.npy", d / "hard.npy")
        (d / "link.npy").symlink_to("x.npy")
        (d / "far.npy").symlink_to(self.path("l") / "link.npy")
        names = ["x.npy", "./x.npy", "sub/../x.npy", "../d/x.npy", "../l/x.npy", "link.npy", "far.npy", d / "x.npy",
                 self.path("l") / "x.npy"] + ["hard.npy"] * present
        return [(a, b) for a in names for b in names if str(a) <= str(b)]

    def inside(self, *args, **more):
        done = subprocess.run([verbs.SPARGE, *map(str, args)], capture_output=True, text=True, cwd=self.path("d"), **more)
        return done

    def check_pairs(self, present):
        for first, second in self.spellings(present):
            with self.subTest(first=str(first), second=str(second)):
                before = self.tree()
                for flags in (("--out", first, "--lse", second), ("--out", self.path("o.npy"), "--lse", first,
                                                                  "--map-out", second)):
                    done = self.inside("run", *self.inputs, *flags)
                    self.assertEqual(done.returncode, 2, f"{flags}: both were written")
                    self.assertIn("same file as " + flags[-4], done.stderr)
                self.assertEqual(self.tree(), before)

    def test_absent(self):
        self.check_pairs(present=False)

    def test_present(self):
        self.check_pairs(present=True)

    def test_two_files_are_two(self):
        """What is alike and not the same is accepted."""
        self.spellings(present=False)
        self.path("d/sub/x.npy").symlink_to("y.npy")
        for first, second in (("x.npy", "sub/x.npy"), ("x.npy", "../x.npy"), ("x.npy", "X.npy"), ("x.npy", "x.npy.npy")):
            done = self.inside("run", *self.inputs, "--out", first, "--lse", second)
            self.assertEqual(done.returncode, 0, done.stderr)
        self.assertTrue(self.path("d/sub/y.npy").exists())

    def test_inputs(self):
        os.link(self.path("k.npy"), self.path("hard.npy"))
        self.path("link.npy").symlink_to("v.npy")
        file = self.capture("in/0/a.safetensors")
        npy(self.path("mask.npy"), "|u1", (70, 70), bytes([1] * 4900))
        for flags, flag in ((("--lse", self.path("hard.npy")), "--k"), (("--lse", self.path("link.npy")), "--v"),
                            (("--map-out", self.path("in/../q.npy")), "--q"),
                            (("--mask", self.path("mask.npy"), "--lse", self.path("mask.npy")), "--mask")):
            with self.subTest(flags):
                self.refused("run", *self.inputs, "--out", self.path("o.npy"), *flags, says=("overwrite", flag))
        self.refused("map", *self.inputs, "--map-out", self.path("link.npy"), says=("--map-out", "overwrite", "--v"))
        os.link(file, self.path("page.html"))
        self.refused("report", self.path("in"), "-o", self.path("page.html"), says=("-o", "overwrite"))
        self.path("mask.html").symlink_to("mask.npy")
        self.refused("report", file, "--mask", self.path("mask.npy"), "-o", self.path("mask.html"),
                     says=("-o", "overwrite", "--mask"))

    def test_tune(self):
        self.capture("in/0/a.safetensors")
        self.path("p.json").symlink_to("p.json.partial")
        self.refused("tune", self.path("in"), "-o", self.path("p.json"), says=("--out", "p.json.partial", "same file"))
        self.path("p.json").unlink()
        self.path("p.json.partial").symlink_to(self.path("in/0/a.safetensors"))
        self.refused("tune", self.path("in"), "-o", self.path("p.json"), says=("--out", "overwrite", "a.safetensors"))

    def test_report(self):
        file = self.capture("in/0/a.safetensors")
        report = ("report", self.path("in"), "-o", self.path("p.html"))
        self.refused(*report, "--png", self.path("p.html"), says=("--png", "same file as -o"))
        self.path("maps").mkdir()
        self.path("maps/0-a-head1.png").symlink_to("../p.html")
        self.refused(*report, "--png", self.path("maps"), says=("0-a-head1.png", "same file as -o"))
        self.path("maps/0-a-head1.png").unlink()
        self.path("maps/0-a-head1.png").symlink_to(file)
        self.refused(*report, "--png", self.path("maps"), says=("0-a-head1.png", "overwrite", "a.safetensors"))
        self.path("maps/0-a-head1.png").unlink()
        self.path("maps/0-a-head1.png").mkdir()
        self.refused(*report, "--png", self.path("maps"), says=("--png", "0-a-head1.png", "directory"))


class PictureNames(Files):
    def pictures(self, *paths):
        done = call("report", *paths, "-o", self.path("p.html"), "--png", self.path("maps"))
        self.assertEqual(done.returncode, 0, done.stderr)
        return sorted(os.listdir(self.path("maps")))

    def test_equal_names(self):
        """Samples of one name in folders of one name, given one by one: nothing in the path sets them apart."""
        one, two = self.capture("a/x/s.safetensors"), self.capture("b/x/s.safetensors", heads=1)
        names = self.pictures(one, two)
        self.assertEqual(names, ["s-2-head0.png", "s-head0.png", "s-head1.png"])

    def test_names_that_become_equal(self):
        files = (self.capture("a/s.safetensors", layer="l/1"), self.capture("b/s.safetensors", layer="l_1"),
                 self.capture("c/s-2.safetensors", layer="l_1"), self.capture("d/S.safetensors", layer="L_1"))
        names = self.pictures(*files)
        self.assertEqual(len(names), 8)
        self.assertEqual(len({name.lower() for name in names}), 8, names)

    def test_long_names(self):
        names = self.pictures(self.capture("a.safetensors", layer="x" * 300), self.capture("b.safetensors", layer="x" * 301))
        self.assertEqual(len(names), 4)


class AllOrNone(Files):
    """A failure after the work leaves everything as it was."""

    def setUp(self):
        super().setUp()
        self.capture("in/0/a.safetensors")
        self.report = ("report", self.path("in"), "-o", self.path("p.html"), "--png", self.path("maps"))
        self.attend = ("run", *self.inputs, "--out", self.path("o.npy"), "--lse", self.path("l.npy"),
                       "--map-out", self.path("m.npy"))

    def failing(self, *args, fail, says=("Input/output error",)):
        before = self.tree()
        done, _ = self.watched(*args, fail=fail)
        self.assertEqual((done.returncode, done.stdout), (2, ""), f"{fail}: {done.stderr}")
        for part in says:
            self.assertIn(part, done.stderr)
        self.assertEqual(self.tree(), before, f"{fail}: not as before")

    def test_run(self):
        for present in (False, True):
            for name in ("o.npy", "m.npy") * present:
                self.path(name).write_bytes(b"precious")
            for fail in ("rename:1", "rename:2", "rename:3", "fsync:1", "fsync:3", "fsync:4"):
                with self.subTest(fail=fail, present=present):
                    self.failing(*self.attend, fail=fail)

    def test_report(self):
        for fail in ("rename:1", "rename:2", "rename:3", "fsync:2", "fsync:4"):
            with self.subTest(fail=fail):
                self.failing(*self.report, fail=fail)
        self.path("maps").mkdir()
        self.path("maps/0-a-head0.png").write_bytes(b"precious")
        self.path("p.html").write_bytes(b"precious")
        for fail in ("rename:2", "rename:3"):
            with self.subTest(fail=fail, present=True):
                self.failing(*self.report, fail=fail)

    def test_without_hard_links(self):
        """Where a file system has none, the old file is moved away meanwhile: one rename more for each."""
        for name in ("o.npy", "l.npy"):
            self.path(name).write_bytes(b"precious")
        done, calls = self.watched(*self.attend, fail="link:1")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(sum(c[0] == "rename" for c in calls), 4)
        self.assertEqual(len(os.listdir(self.folder)), 7)

    def test_stdout_that_cannot_be_written(self):
        for name in ("o.npy", "l.npy"):
            self.path(name).write_bytes(b"precious")
        for args in (self.attend, self.report, ("map", *self.inputs, "--map-out", self.path("m.npy"))):
            with self.subTest(args[0]):
                before = self.tree()
                with open("/dev/full", "w") as full:
                    done = subprocess.run([verbs.SPARGE, *map(str, args), "--json"], stdout=full, stderr=subprocess.PIPE)
                self.assertEqual(done.returncode, 2)
                self.assertIn(b"stdout", done.stderr)
                self.assertEqual(self.tree(), before)

    def test_a_failure_says_nothing_of_success(self):
        done, _ = self.watched(*self.attend, fail="rename:2")
        self.assertIn("cannot be put in place", done.stderr.splitlines()[-1])
        self.assertNotIn("computed", done.stderr)


class PowerCut(Files):
    """A file is on the disk before its name is, and the name when the program ends."""

    def check_calls(self, calls, targets):
        synced = {}
        for at, entry in enumerate(calls):
            if entry[0] == "fsync":
                synced.setdefault(entry[1], []).append(at)
        for target in targets:
            (at, temporary), = [(i, c[1]) for i, c in enumerate(calls) if c[0] == "rename" and c[2] == str(target)]
            self.assertTrue(any(i < at for i in synced.get(temporary, [])), f"{target}: renamed, not synced\n{calls}")
            self.assertTrue(any(i > at for i in synced.get(str(target.parent), [])), f"{target}: folder\n{calls}")

    def test_run(self):
        targets = [self.path(name) for name in ("o.npy", "l.npy", "m.npy")]
        done, calls = self.watched("run", *self.inputs, "--out", targets[0], "--lse", targets[1], "--map-out", targets[2])
        self.assertEqual(done.returncode, 0, done.stderr)
        self.check_calls(calls, targets)
        last_sync = max(i for i, c in enumerate(calls) if c[0] == "fsync" and c[1].endswith(".tmp"))
        self.assertLess(last_sync, min(i for i, c in enumerate(calls) if c[0] == "rename"), "all synced, then renamed")

    def test_report_and_map(self):
        self.capture("in/0/a.safetensors", heads=1)
        done, calls = self.watched("report", self.path("in"), "-o", self.path("p.html"), "--png", self.path("maps"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.check_calls(calls, [self.path("p.html"), self.path("maps/0-a-head0.png")])
        done, calls = self.watched("map", *self.inputs, "--map-out", self.path("m.npy"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.check_calls(calls, [self.path("m.npy")])

    def test_tune(self):
        """The partial preset after each layer, too: what is finished stays finished."""
        for layer in ("0", "1"):
            self.capture(f"in/{layer}/a.safetensors", heads=1, tokens=200)
        done, calls = self.watched("tune", self.path("in"), "-o", self.path("p.json"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.check_calls(calls, [self.path("p.json")])
        partial = str(self.path("p.json.partial"))
        self.assertEqual([c[2] for c in calls if c[0] == "rename"], [partial, partial, str(self.path("p.json"))])


class Links(Files):
    """As with `command > link`: the target is written, and the link stays."""

    def test_to_a_file_that_is_there_and_one_that_is_not(self):
        self.path("sub").mkdir()
        self.path("sub/there.npy").write_bytes(b"old")
        self.path("there.npy").symlink_to("sub/there.npy")
        self.path("new.npy").symlink_to("sub/new.npy")
        self.path("two.npy").symlink_to(self.path("new.npy"))
        for link, target in (("there", "there"), ("new", "new"), ("two", "new")):
            with self.subTest(link):
                self.path("sub/new.npy").unlink(missing_ok=True)
                before = os.readlink(self.path(link + ".npy"))
                done = call("run", *self.inputs, "--out", self.path(link + ".npy"))
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertTrue(self.path(link + ".npy").is_symlink(), "the link was replaced")
                self.assertEqual(os.readlink(self.path(link + ".npy")), before)
                self.assertEqual(read_npy(self.path(f"sub/{target}.npy"))[1], (1, 70, 8))
        self.assertEqual(sorted(os.listdir(self.path("sub"))), ["new.npy", "there.npy"])

    def test_to_nowhere(self):
        self.path("far.npy").symlink_to("no/such/folder.npy")
        self.refused("run", *self.inputs, "--out", self.path("far.npy"), says=("--out", "far.npy", "does not exist"))
        self.path("loop.npy").symlink_to("loop.npy")
        self.refused("run", *self.inputs, "--out", self.path("loop.npy"), says=("--out", "loop.npy"))

    def test_a_folder_for_pictures(self):
        file = self.capture("in/0/a.safetensors")
        self.path("maps").symlink_to("elsewhere")
        done = call("report", file, "-o", self.path("p.html"), "--png", self.path("maps"))
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(os.listdir(self.path("elsewhere"))), 2)

    def test_who_may_read(self):
        self.path("o.npy").write_bytes(b"old")
        self.path("o.npy").chmod(0o600)
        self.assertEqual(call("run", *self.inputs, "--out", self.path("o.npy")).returncode, 0)
        self.assertEqual(self.path("o.npy").stat().st_mode & 0o777, 0o600)


if __name__ == "__main__":
    verbs.SPARGE, FILE_CALLS = (str(pathlib.Path(sys.argv.pop(1)).resolve()) for _ in range(2))
    unittest.main()
