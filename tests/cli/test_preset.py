"""--preset, --select auto and --predictor: what they set, what check makes of them, and what they refuse."""

import json

import numpy as np

import cases
from captures import CaptureCase, head, layer, tensors, write_capture, write_preset
from cases import call, rng


class PresetCase(CaptureCase):
    """Three heads and a preset for them."""
    tokens = 768

    def setUp(self):
        super().setUp()
        r = rng("presets")
        self.file = self.path("captures") / "layer.1" / "a.safetensors"
        write_capture(self.file, *tensors(r, tokens=self.tokens, heads=3))
        self.heads = [head(0, tau=0.8), head(1, dense=True), head(2, "fp32", tau=0.95, pv_skip="off")]
        self.layers = {"layer.1": layer(self.heads), "layer.10": layer(self.heads), "mid.block": layer(self.heads)}
        self.preset = write_preset(self.path("p.json"), self.layers)
        self.use = ("--preset", self.preset, "--layer", "layer.1")

    def attend(self, *flags):
        """Output, map and figures of a run."""
        o, m = self.path("o.npy"), self.path("m.npy")
        result = self.good("run", "--tensors", self.file, "--out", o, "--map-out", m, "--json", *flags)
        return np.load(o), np.load(m), json.loads(result.stdout)


class Presets(PresetCase):

    def test_every_head_takes_its_own_entry(self):
        o, tiles, figures = self.attend(*self.use)
        keys = ("--predictor", "keys")  # as the preset says
        sparse = self.attend("--tau", "0.8", "--theta", "0.3", "--pv-skip", "8", *keys)
        exact = self.attend(*keys, "--tau", "0.95", "--theta", "0.3", "--pv-skip", "off", "--precision", "fp32")
        dense = self.attend("--select", "all", "--pv-skip", "off")
        for index, same in ((0, sparse), (1, dense), (2, exact)):
            np.testing.assert_array_equal(tiles[index], same[1][index], f"tiles of head {index}")
            np.testing.assert_array_equal(o[index], same[0][index], f"result of head {index}")
        self.assertLess(tiles[0].mean(), 1)  # else the test would not see a head that takes another's entry
        self.assertFalse(np.array_equal(tiles[0], tiles[2]))
        self.assertEqual((figures["select"], figures["layer"], figures["preset"]), ("preset", "layer.1", str(self.preset)))
        self.assertEqual([h["precision"] for h in figures["head_parameters"]], ["int8", "int8", "fp32"])
        self.assertEqual([h["tau"] for h in figures["head_parameters"]], [0.8, 1, 0.95])
        self.assertEqual([h["pv_skip"] for h in figures["head_parameters"]], [8, "off", "off"])
        self.assertIsNone(figures["tau"])
        self.good("map", "--tensors", self.file, "--map-out", self.path("n.npy"), *self.use)
        np.testing.assert_array_equal(np.load(self.path("n.npy")), tiles)

    def test_check_finds_the_layer_in_the_folder(self):
        report = json.loads(self.good("check", "--preset", self.preset, self.path("captures"), "--json").stdout)
        file = report["files"][0]
        self.assertEqual(file["layer"], "layer.1")
        sparse, dense, exact = file["heads"]
        self.assertEqual((dense["l1"], dense["pv_l1"], dense["sparsity"]), (0, 0, 0))
        self.assertGreater(sparse["l1"], 0)
        self.assertGreater(sparse["sparsity"], 0)
        self.assertLess(exact["round_l1"], cases.BOUND["fp32"])
        self.assertLess(cases.BOUND["fp32"], dense["round_l1"])
        self.assertLess(dense["round_l1"], cases.BOUND["int8"])
        bounds = report["bounds"]
        self.assertEqual((bounds["heads"], bounds["share_within_1.2_bounds"], bounds["outside"]), (3, 1, []))
        self.assertAlmostEqual(bounds["mean_sparsity"], np.mean([h["sparsity"] for h in file["heads"]]))
        self.assertIn("passed", self.good("check", "--preset", self.preset, self.path("captures")).stdout)
        self.refused("check", "--preset", self.preset, "--tensors", self.file, says=("--layer",))

    def test_report_takes_presets(self):
        args = ("report", "--preset", self.preset, self.path("captures"), "-o", self.path("r.html"), "--json")
        report = json.loads(self.good(*args).stdout)
        self.assertEqual([h["sparsity"] == 0 for h in report["heads"]], [False, True, False])
        self.refused(*args, "--tau", "0.9", says=("--tau", "--preset"))

    def test_check_fails_beyond_the_bounds(self):
        """One of three heads beyond 1.2 times the bound is more than 5 %; at 1.1 times the bound it is fine."""
        args = ("check", self.path("captures"), "--json", "--preset")
        pv_l1 = [h["pv_l1"] for h in json.loads(self.good(*args, self.preset).stdout)["files"][0]["heads"]]
        for factor, code in ((1.3, 1), (1.1, 0), (0.9, 0)):
            bound = max(pv_l1) / factor
            result = call((*args, write_preset(self.path("tight.json"), self.layers, pv_l1=bound)))
            self.assertEqual(result.code, code, result.stderr)
            report = json.loads(result.stdout)
            self.assertEqual(report["passed"], code == 0)
            self.assertAlmostEqual(report["bounds"]["share_within_1.2_bounds"], np.mean([x <= 1.2 * bound for x in pv_l1]))
            self.assertEqual(len(report["bounds"]["outside"]), sum(x > bound for x in pv_l1))
        round_l1 = write_preset(self.path("round.json"), self.layers, round_l1=1e-6)
        self.assertEqual(call((*args, round_l1)).code, 1)

    def test_check_judges_no_heads_by_the_loss_of_a_model(self):
        """A bound so small that every head would be beyond it, if it were one of heads."""
        bounds = {"loss": 1e-9, "measured_loss": 1e-10}
        args = ("check", self.path("captures"), "--preset", write_preset(self.path("l.json"), self.layers, bounds=bounds))
        report = json.loads(self.good(*args, "--json").stdout)
        usual = json.loads(self.good("check", self.path("captures"), "--preset", self.preset, "--json").stdout)
        self.assertGreater(max(h["pv_l1"] for h in report["files"][0]["heads"]), 1e-9)
        self.assertEqual(report["bounds"], {**bounds, "heads": 3, "judged": False, "passed": True,
                                            "mean_sparsity": usual["bounds"]["mean_sparsity"]})
        self.assertEqual(report["total"], usual["total"])
        table = self.good(*args).stdout
        self.assertIn("loss 1e-09 nats per token", table)
        self.assertIn("not judged", table)
        self.assertEqual(call((*args, "--max-l1", "1e-9")).code, 1)

    def test_what_does_not_fit_is_refused(self):
        run = ("run", "--tensors", self.file, "--out", self.path("o.npy"), "--preset")
        self.refused(*run, self.preset, says=("--layer",))
        self.refused(*run, self.preset, "--layer", "", says=("--layer",))
        self.refused(*run, self.preset, "--layer", "layer.11", says=("'layer.11'", "'layer.1'", "'layer.10'"))
        self.refused(*run, self.path("none.json"), "--layer", "layer.1", says=("--preset", "none.json"))
        for name, other in (("q_heads", layer(self.heads[:2])), ("kv_heads", layer(self.heads, kv_heads=3)),
                            ("qk_dim", layer(self.heads, qk_dim=64)), ("v_dim", layer(self.heads, v_dim=16)),
                            ("causal", layer(self.heads, causal=True))):
            with self.subTest(name):
                file = write_preset(self.path("other.json"), {"layer.1": other})
                self.refused(*run, file, "--layer", "layer.1", says=("other.json", "'layer.1'", name))
                self.refused("check", "--preset", file, self.path("captures"), says=("a.safetensors", "other.json", name))
        partial = write_preset(self.path("p.partial"), self.layers, partial={"options": "", "captures": ""})
        self.refused(*run, partial, "--layer", "layer.1", says=("unfinished",))
        broken = [head(0), head(1, tau=1.5), head(2)]
        file = write_preset(self.path("broken.json"), {"layer.1": layer(broken)})
        self.refused(*run, file, "--layer", "layer.1", says=("broken.json", "'layer.1'", "head 1", "'tau'", "1.5"))
        self.refused("map", "--tensors", self.file, "--map-out", self.preset, *self.use, says=("--map-out", "p.json"))

    def test_flags_beside_a_preset(self):
        run = ("run", "--tensors", self.file, "--out", self.path("o.npy"))
        for flags in (("--tau", "0.9"), ("--theta", "0.3"), ("--topk", "0.5"), ("--select", "cdf"), ("--pv-skip", "8"),
                      ("--precision", "int8"), ("--predictor", "keys"), ("--sink",), ("--no-sink",),
                      ("--select", "auto"), ("--target-l1", "0.1"), ("--seed", "1"), ("--warm", "1")):
            with self.subTest(flags):
                self.refused(*run, *self.use, *flags, says=flags[:1])
        self.refused(*run, "--layer", "layer.1", says=("--layer", "--preset"))


class ShortAuto(PresetCase):
    """So short that it takes more than one call until a layer has a choice."""
    tokens = 1024

    def test_calls(self):
        """The first call of a layer has too few rows for a choice; by default the first with one counts."""
        first, default, third = self.attend("--warm", "0"), self.attend(), self.attend("--warm", "2")
        self.assertEqual((first[2]["calls"], third[2]["calls"]), (1, 3))
        self.assertEqual(first[1].mean(), 1)
        self.assertGreater(default[2]["calls"], 1)
        same = self.attend("--warm", default[2]["calls"] - 1)
        np.testing.assert_array_equal(default[0], same[0])
        self.assertLess(default[1].mean(), 1)
        before = self.attend("--warm", default[2]["calls"] - 2)
        samples = [[head["estimate"]["samples"] for head in run[2]["head_parameters"]] for run in (first, before, default)]
        self.assertLess(samples[0], samples[2])
        self.assertLess(samples[1], samples[2])
        run = ("run", "--tensors", self.file, "--out", self.path("o.npy"))
        self.assertIn("(--warm N", self.good(*run, "--warm", "0").stderr)


class Auto(PresetCase):
    """A layer of the library, which calibrates itself."""
    tokens = 2048

    def test_errors_stay_within_what_was_named(self):
        for measure in ("l1", "l2"):
            flags = (f"--target-{measure}", "0.05", f"--pv-{measure}", "0.06")
            report = json.loads(self.good("check", "--tensors", self.file, *flags, "--json").stdout)
            file = report["files"][0]
            self.assertEqual((file["select"], file["measure"]), ("auto", measure))
            self.assertEqual(len(file["head_parameters"]), 3)
            for figures, chosen in zip(file["heads"], file["head_parameters"]):
                estimate = chosen["estimate"]
                # A choice keeps a margin of more than one standard error; four beyond the bound is what no run should show.
                self.assertLessEqual(figures[measure], 0.05 + 4 * estimate[f"{measure}_error"])
                self.assertLessEqual(figures[f"pv_{measure}"], 0.06 + 4 * estimate[f"pv_{measure}_error"])
            self.assertGreater(report["total"]["sparsity"], 0)
            # The table has the estimate of a head beside what is true of it.
            table = self.good("check", "--tensors", self.file, *flags).stdout.splitlines()
            self.assertIn(f" {measure} ", table[1])
            for line, figures, chosen in zip(table[2:], file["heads"], file["head_parameters"]):
                cells = line.split()
                self.assertEqual(float(cells[-3]), float("%.2e" % figures[f"pv_{measure}"]))
                if cells[-2] != "-":
                    estimate = chosen["estimate"]
                    error, limit = "%.2e" % estimate[f"pv_{measure}"], "<%.1e" % estimate["limit"]
                    self.assertEqual(cells[-2], error if estimate["known"] else limit)

    def test_the_same_seed_gives_the_same_result(self):
        flags = ("--select", "auto", "--seed", "3")
        first, again = self.attend(*flags), self.attend(*flags, "--threads", "1")
        np.testing.assert_array_equal(first[0], again[0])
        self.assertEqual(first[2]["head_parameters"], again[2]["head_parameters"])
        said = self.good("run", "--tensors", self.file, "--out", self.path("o.npy"), *flags).stderr
        self.assertIn(f"call {first[2]['calls']} of its layer: head 0 int8 ", said)

    def test_the_default(self):
        """Nothing at all means auto with the library's own bounds, and with an error named, the ratio for the PV skip."""
        plain = self.attend()
        info = json.loads(self.good("info", "--json").stdout)["defaults"]
        named = self.attend("--select", "auto", "--target-l2", info["target_l2"], "--pv-l2", info["pv_l2"],
                            "--round-l1", info["round_l1"], "--seed", "0")
        np.testing.assert_array_equal(plain[0], named[0])
        np.testing.assert_array_equal(plain[1], named[1])
        self.assertLess(plain[1].mean(), 1)
        wide, same = self.attend("--target-l2", "0.1"), self.attend("--target-l2", "0.1", "--pv-l2", 0.1 * info["pv_room"])
        np.testing.assert_array_equal(wide[0], same[0])
        self.assertLess(wide[1].mean(), plain[1].mean())

    def test_what_is_said_is_what_ran(self):
        """The parameters of the heads, as a preset, give the same tiles and the same bits."""
        out, tiles, figures = self.attend("--target-l1", "0.05", "--warm", "30")
        heads = [head(h["head"], h["precision"], h["theta"], h["tau"], h["pv_skip"], dense=h["tau"] == 1, select="floor")
                 for h in figures["head_parameters"]]
        self.assertTrue(any(h["select"] == "floor" and h["pv_skip"] != "off" for h in heads), heads)
        preset = write_preset(self.path("said.json"), {"layer.1": layer(heads)})
        again = self.attend("--preset", preset, "--layer", "layer.1")
        np.testing.assert_array_equal(again[1], tiles)
        np.testing.assert_array_equal(again[0], out)
        self.assertEqual(again[2]["pv_tiles"], figures["pv_tiles"])

    def test_all_verbs_make_the_same_call(self):
        _, tiles, figures = self.attend()
        mapped = self.good("map", "--tensors", self.file, "--map-out", self.path("n.npy"), "--json").stdout
        np.testing.assert_array_equal(np.load(self.path("n.npy")), tiles)
        self.assertEqual(json.loads(mapped)["head_parameters"], figures["head_parameters"])
        checked = json.loads(self.good("check", "--tensors", self.file, "--json").stdout)
        self.assertEqual(checked["files"][0]["head_parameters"], figures["head_parameters"])
        self.assertEqual(checked["total"]["sparsity"], figures["sparsity"])
        page = ("report", "--tensors", self.file, "-o", self.path("r.html"), "--json")
        report = json.loads(self.good(*page).stdout)
        self.assertEqual(report["total"]["sparsity"], figures["sparsity"])
        self.assertEqual(report["total"]["relative_l1"], checked["total"]["relative_l1"])
        self.assertEqual(report["swept"], "target_l2")
        for found in report["heads"]:
            sparsity = [point["sparsity"] for point in found["frontier"]]
            self.assertGreater(max(sparsity), min(sparsity))
            self.assertEqual(sparsity[-1], max(sparsity), "the largest error skips most")

    def test_rules_of_layers(self):
        """Few keys and few queries skip nothing, and the last queries of a prompt see everything."""
        r = rng("rules")
        q, k, v = tensors(r, tokens=self.tokens, heads=3)
        file = write_capture(self.path("short.safetensors"), q[:, :1000], k[:, :1000], v[:, :1000])
        for name, part, calls in (("keys", (q[:, :1000], k[:, :1000], v[:, :1000]), 1), ("queries", (q[:, :64], k, v), 1)):
            with self.subTest(name):
                write_capture(file, *part)
                done = self.good("run", "--tensors", file, "--out", self.path("o.npy"), "--json", "--target-l1", "0.2")
                figures = json.loads(done.stdout)
                self.assertEqual((figures["sparsity"], figures["calls"]), (0, calls))
                self.assertEqual([h["estimate"] for h in figures["head_parameters"]], [None] * 3)
                self.assertIn("every tile", done.stderr)
        write_capture(self.file, q, k, v, causal=True)
        _, tiles, figures = self.attend("--target-l1", "0.2")
        self.assertGreater(figures["sparsity"], 0.2)
        self.assertTrue(tiles[:, -1].all(), "the last 128 queries")
        self.assertFalse(tiles[:, -2, : tiles.shape[2] - 2].all())

    def test_no_error_is_exact(self):
        figures = json.loads(self.good("check", "--tensors", self.file, "--target-l1", "0", "--json").stdout)
        self.assertLess(figures["total"]["relative_l1"], cases.BOUND["fp32"])
        self.assertEqual(figures["total"]["sparsity"], 0)
        self.assertEqual({h["precision"] for h in figures["files"][0]["head_parameters"]}, {"fp32"})
        run = ("run", "--tensors", self.file, "--out", self.path("o.npy"), "--target-l1", "0")
        self.refused(*run, "--round-l1", "0.1", says=("round_l1=0.1", "a target of 0"))

    def test_precision_is_honoured(self):
        for precision in ("int8", "int16", "fp32"):
            figures = self.attend("--precision", precision)[2]
            self.assertEqual({h["precision"] for h in figures["head_parameters"]}, {precision})

    def test_refusals(self):
        run = ("run", "--tensors", self.file, "--out", self.path("o.npy"))
        for flags in (("--tau", "0.9"), ("--theta", "0.1"), ("--topk", "0.5"), ("--pv-skip", "5"), ("--predictor", "keys")):
            with self.subTest(flags):
                self.refused(*run, "--select", "auto", *flags, says=flags[:1])
        for flag in ("--target-l2", "--pv-l2", "--target-l1", "--pv-l1", "--round-l1", "--seed", "--warm"):
            self.refused(*run, "--select", "cdf", flag, "1", says=(flag, "--select auto"))
            self.refused(*run, flag, "-1", says=(flag, "-1"))
        self.refused(*run, "--select", "auto", "--target-l1", "0.1", "--pv-l1", "0.05", says=("--pv-l1",))
        self.refused(*run, "--select", "all", "--predictor", "keys", says=("--predictor",))
        self.refused(*run, "--predictor", "crystal", says=("--predictor", "crystal"))
