"""Drives the moekit binary with what it must refuse: words, numbers, files, settings; exit codes and who is named.

usage: test_cli_refusals.py BINARY SOURCE_TREE [unittest arguments]
"""
import glob
import json
import os
import sys
import time

sys.dont_write_bytecode = True
sys.path.insert(0, sys.path[0] + "/support")
from cli_driver import QUANT, SMALL, TINY, CommandLine, main, read_text, records, write_npy  # noqa: E402


class Refusals(CommandLine):
    def test_unknown_words_are_usage_errors_with_the_nearest_spelling(self):
        self.assertIn("did you mean bench?", self.expect(2, "benhc").stderr)
        self.assertIn("did you mean --tokens?", self.expect(2, "bench", SMALL, "--tokns", "1").stderr)
        self.assertIn("did you mean cpu.portable?", self.expect(2, "bench", SMALL, "--impl", "cpu.portble").stderr)
        self.assertIn("did you mean zipf?", self.expect(2, "bench", SMALL, "--routing", "zpif:1").stderr)
        self.expect(2)
        self.expect(2, "bench")
        self.expect(2, "bench", SMALL, "--tokens", "0")
        self.expect(2, "bench", SMALL, "--determinism", "often")
        self.expect(2, "bench", "e4k9h64i32:bf16")
        self.expect(2, "explain", "e4k2h64")
        self.expect(2, "explain", SMALL + "@tokns=4")
        self.expect(2, "explain", SMALL, "--layer", "1")
        self.expect(2, "run", TINY, "--layer", "9")
        self.assertRegex(self.expect(0, "--version").stdout, r"^moekit \d+\.\d+\.\d+$")

    def test_what_is_not_there_is_unsupported(self):
        self.expect(4, "bench", SMALL, "--peer", "somebody")
        for verb in ["explain", "bench", "verify"]:
            self.expect(4, verb, SMALL, "--device", "cuda")
        self.expect(4, "explain", "e4k2h64i32:bf16", "--weights", "mxfp4")

    def test_implementations_that_cannot_run_here_are_no_success(self):
        os.environ["MOEKIT_CPU_ISA"] = "portable"
        try:
            for subject in [SMALL, TINY]:
                self.assertIn("cpu.avx2: ", self.expect(4, "verify", subject, "--impl", "cpu.avx2").stderr)
        finally:
            del os.environ["MOEKIT_CPU_ISA"]

    def test_settings_of_generated_rows_beside_given_ones(self):
        x = self.path("x.npy")
        write_npy(x, [0.5] * 256, [2, 128])
        for flag in ["--tokens", "--seed"]:
            self.assertIn("--x excludes " + flag, self.expect(2, "run", TINY, "--x", x, flag, "2").stderr)

    def test_interface_of_later_versions_is_answered_by_name(self):
        for verb in "synth quantize tune plan trace plot pack cache config report".split():
            self.assertIn(verb + " comes in a later version", self.expect(4, verb, SMALL).stderr)
        for flag, *args in [("--trace", "run", TINY, "--trace", "t.json"), ("--ep", "run", TINY, "--ep", "threads:2"),
                            ("--ep", "explain", SMALL, "--ep", "nccl"), ("--ep", "explain", SMALL, "--ep=mpi")]:
            self.assertIn(args[0] + " " + flag + " comes in a later version", self.expect(4, *args).stderr)
        for verb, subject in [("explain", SMALL), ("bench", SMALL), ("verify", SMALL), ("run", TINY)]:
            self.assertIn("cuda", self.expect(4, verb, subject, "--device", "cuda").stderr.lower())
        self.assertIn("somebody", self.expect(4, "bench", SMALL, "--peer", "somebody").stderr)

    def test_every_flag_of_the_interface_is_known(self):
        interface = {
            "bench": "--layer --tokens --weights --activations --impl --device --routing --threads --determinism --vs --peer --json",
            "explain": "--layer --tokens --device --ep --json",
            "run": "--layer --x --out --routing-out --trace --device --ep --json",
            "verify": "--layer --impl --device --json",
            "inspect": "--json", "doctor": "--json", "demo": "--json"}
        for verb, flags in interface.items():
            for flag in flags.split():
                if flag == "--json":
                    self.assertIn(flag, self.expect(0, verb, "--help").stdout)
                else:  # it misses its value, and nothing else is wrong with it
                    error = self.expect(2, verb, flag).stderr
                    self.assertIn(flag, error)
                    self.assertNotIn("unknown flag", error)

    def test_every_scheme_of_the_interface_is_implemented_or_comes_later(self):
        now = ["f32", "bf16", "f16", "int8", "fp8_block128"]
        later = ["fp8_tensor", "fp8_channel", "mxfp4", "mxfp8", "nvfp4", "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q2_k",
                 "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs"]
        later += [f"int{bits}_g{group}" for bits in (4, 8) for group in (16, 32, 64, 128)]
        sizes = "e4k2h128i128"
        for scheme in now:
            self.expect(0, "explain", sizes, "--weights", scheme, "--tokens", "1", "--json")
            self.expect(0, "explain", sizes + ":" + scheme, "--tokens", "1", "--json")
        for scheme in later:
            for args in [[sizes, "--weights", scheme], [sizes + ":" + scheme], [sizes + "@weights=" + scheme]]:
                self.assertIn(scheme + ": in a later version", self.expect(4, "explain", *args).stderr)
        for scheme in ["int8_token", "int8", "fp8_group128", "fp8"]:
            weights = "int8" if "int8" in scheme else "fp8_block128"
            self.expect(0, "explain", sizes, "--weights", weights, "--activations", scheme, "--tokens", "1", "--json")
        self.assertIn("later version", self.expect(4, "explain", sizes, "--activations", "fp8_token").stderr)
        self.assertIn("did you mean bf16?", self.expect(2, "explain", sizes, "--weights", "bf61").stderr)
        self.assertIn("did you mean bf16?", self.expect(2, "explain", sizes + ":bf61").stderr)

    def test_settings_of_a_shape_are_honoured_or_refused_by_name(self):
        """Every key that a shape string may carry, with every verb that takes a shape."""
        values = {"tokens": "3", "impl": "cpu.portable", "device": "cuda", "layer": "1", "routing": "zipf:1", "determinism":
                  "repeatable", "threads": "1", "vs": "reference", "peer": "somebody", "seed": "3", "weights": "f32",
                  "activations": "f32"}
        refused = {"explain": {"routing", "vs", "peer", "seed", "layer"}, "verify": {"determinism", "vs", "peer", "layer"},
                   "bench": {"layer"}}
        base = {"explain": ["--json"], "verify": ["--json"], "bench": ["--json", "--seconds", "0.02"]}
        shape = "e4k2h64i32@"
        for verb, keys in refused.items():
            for key, value in values.items():
                text = shape + key + "=" + value + ("" if key == "tokens" else ",tokens=2" if verb == "bench" else "")
                if key in keys:
                    self.assertIn("setting " + key, self.expect(2, verb, text, *base[verb]).stderr)
                elif key in ("device", "peer"):
                    self.expect(4, verb, text, *base[verb])
                else:
                    self.expect(0, verb, text, *base[verb])
        record, = records(self.expect(0, "explain", shape + "impl=cpu.portable,determinism=batch_invariant,tokens=5", "--json"))
        self.assertEqual((record["experts"], record["determinism"], record["tokens"]), ("cpu.portable", "batch_invariant", 5))
        record, = records(self.expect(0, "explain", shape + "impl=cpu.portable,tokens=5", "--impl", "reference", "--json"))
        self.assertEqual(record["experts"], "reference")
        found = records(self.expect(0, "verify", shape + "impl=reference,tokens=5", "--json"))
        self.assertEqual({r["impl"] for r in found}, {"reference"})
        self.assertTrue(all(r["case"].startswith("M5 ") for r in found))
        row, = records(self.expect(0, "bench", shape + "seed=7,tokens=2,threads=1", "--seconds", "0.02", "--json"))
        self.assertEqual((row["env"]["seed"], row["threads"]), (7, 1))
        for wrong in ["tokens=0", "tokens=1,,2", "tokens=", "threads=-1", "threads=99999", "seed=-1", "impl=", "routing=often",
                      "tokens=99999999999999999999", "determinism=often", "device=tpu"]:
            self.expect(2, "bench", shape + wrong, "--seconds", "0.02")

    def test_numbers_that_do_not_fit_are_refused(self):
        huge = "99999999999999999999"
        for args in [["bench", SMALL, "--tokens", huge], ["bench", SMALL, "--tokens", "1," + huge],
                     ["bench", SMALL, "--tokens", "9223372036854775807"], ["bench", SMALL, "--seed", huge],
                     ["bench", SMALL, "--seed", "-1"], ["bench", SMALL, "--threads", huge], ["bench", SMALL, "--threads", "99999"],
                     ["bench", SMALL, "--seconds", "nan"], ["bench", SMALL, "--seconds", "1e999"],
                     ["bench", SMALL, "--gap-ms", "-1"], ["explain", SMALL, "--tokens", huge], ["explain", TINY, "--layer", huge],
                     ["run", TINY, "--seed", "-1"], ["run", TINY, "--seed", huge], ["run", TINY, "--tokens", huge],
                     ["run", TINY, "--tokens", "-1"], ["run", TINY, "--threads", "1x"], ["bench", SMALL, "--tokens", "0x10"],
                     ["bench", SMALL, "--routing", "hot:99999999999999999999,0.5"]]:
            self.expect(2, *args)

    def test_files_that_never_end_are_refused(self):
        fifo = self.path("fifo")
        os.mkfifo(fifo)
        for path in ["/dev/zero", "/dev/null", fifo, self.folder]:
            self.assertIn("regular file", self.expect(3, "bench", SMALL, "--routing", "trace:" + path).stderr)
            self.assertIn("regular file", self.expect(3, "run", TINY, "--layer", "0", "--x", path).stderr)
        for path in ["/dev/zero", fifo]:
            self.assertIn("regular file", self.expect(3, "verify", path).stderr)
        sparse = self.path("sparse.csv")
        with open(sparse, "wb") as file:
            file.truncate(1 << 40)
        self.assertIn("at most 256 MiB", self.expect(3, "bench", SMALL, "--routing", "trace:" + sparse).stderr)

    def test_trace_lines_that_mean_nothing_are_refused_with_their_number(self):
        csv = self.path("t.csv")
        for line, why in [("0,0,1,1,nan", "finite"), ("0,0,1,1,inf", "finite"), ("0,0,1,1,1e999", "finite"),
                          ("0,0,1,1,1e300", "finite"), ("0,0,0,1,0.5", "line 2 already"), ("0,0,1,99999999999999999999,1", "is not"),
                          ("0,0,1,1,", "is not"), ("0,0,1,1,0.5x", "is not"), ("0,0, 1,1,0.5", "is not"), ("0,0,1,-2,0.5", "range")]:
            with open(csv, "w") as file:
                file.write("layer,token,slot,expert,weight\n0,0,0,0,0.5\n" + line + "\n")
            error = self.expect(3, "bench", SMALL, "--tokens", "1", "--routing", "trace:" + csv).stderr
            self.assertIn("line 3", error)
            self.assertIn(why, error)

    def test_empty_and_colliding_output_names_are_refused(self):
        for args in [["run", TINY, "--out", ""], ["run", TINY, "--routing-out", ""], ["run", TINY, "--x", ""],
                     ["bench", SMALL, "--svg", ""], ["bench", SMALL, "--impl", ""], ["demo", "--out", ""]]:
            self.assertIn("needs a value", self.expect(2, *args).stderr)
        same = self.path("z")
        for other in [same, self.folder + "/./z", self.folder + "//z"]:
            self.assertIn("same file", self.expect(2, "run", TINY, "--out", same, "--routing-out", other).stderr)
        write_npy(self.path("x.npy"), [0.0] * 128, [1, 128])
        os.symlink(self.path("x.npy"), self.path("link"))
        self.expect(2, "run", TINY, "--layer", "0", "--x", self.path("x.npy"), "--out", self.path("link"))
        self.assertFalse(os.path.exists(same))

    def test_outputs_are_tried_before_the_work_begins(self):
        for args in [["bench", "e64k8h2048i1024:bf16", "--svg", "/nowhere/l.svg"],
                     ["run", TINY, "--tokens", "100000", "--out", "/nowhere/y.npy"],
                     ["run", TINY, "--tokens", "100000", "--routing-out", self.folder]]:
            start = time.monotonic()
            result = self.expect(3, *args)
            self.assertLess(time.monotonic() - start, 5)
            self.assertEqual(result.stdout, "")
        kept = self.path("kept.svg")
        with open(kept, "w") as file:
            file.write("old")
        self.expect(2, "bench", SMALL, "--svg", kept, "--routing", "often")
        self.assertEqual(read_text(kept), "old")
        self.expect(2, "bench", SMALL, "--svg", self.path("new.svg"), "--routing", "often")
        self.assertFalse(os.path.exists(self.path("new.svg")))

    def test_missing_inputs_and_unwritable_outputs(self):
        self.assertIn("/nowhere/model", self.expect(3, "inspect", "/nowhere/model").stderr)
        self.expect(3, "verify", "no/such/folder")
        self.expect(3, "run", TINY, "--layer", "0", "--tokens", "1", "--out", "/nowhere/y.npy")
        self.expect(3, "run", TINY, "--layer", "0", "--tokens", "1", "--routing-out", "/nowhere/r.csv")
        self.expect(3, "run", TINY, "--x", self.path("none.npy"))
        write_npy(self.path("narrow.npy"), [0.0] * 6, [2, 3])
        self.assertIn("[M, 128]", self.expect(3, "run", TINY, "--x", self.path("narrow.npy")).stderr)
        self.expect(3, "bench", SMALL, "--routing", "trace:" + self.path("none.csv"))

    def test_malformed_folders(self):
        for folder in sorted(glob.glob(os.path.join(QUANT, "bad", "*"))):
            with open(os.path.join(folder, "expected.json")) as file:
                expected = json.load(file)
            name = os.path.basename(folder)
            gguf_or_gptq = name.startswith(("gguf", "gptq")) or name in ("control_gguf", "control_gptq")
            code = 4 if gguf_or_gptq else 0 if expected["must"] == "ok" else 3
            for verb in ["inspect", "run", "verify"]:
                result = self.expect(code, verb, folder)
                if code == 3:
                    names = expected.get("names_any", [expected["names"]])
                    self.assertTrue(any(n in result.stderr for n in names), result.stderr)


if __name__ == "__main__":
    main()
