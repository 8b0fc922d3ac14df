"""Drives the moekit binary: every verb on the sample checkpoint, JSON, exit codes, malformed folders, Ctrl-C.

usage: test_cli_verbs.py BINARY SOURCE_TREE [unittest arguments]
"""
import array
import glob
import json
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

BINARY, SOURCE = sys.argv[1], sys.argv[2]
DATA = os.path.join(SOURCE, "tests", "data")
TINY = os.path.join(DATA, "models", "tiny-qwen3-moe")
GOLDEN = os.path.join(DATA, "golden")
QUANT = os.path.join(DATA, "golden_quant")
SMALL = "e4k2h64i32:bf16"
VERBS = ["doctor", "inspect", "explain", "run", "verify", "bench", "demo"]
BENCH_FIELDS = (
    "schema shape weights activations tokens impl device threads routing determinism experts_hit median_us min_us p90_us"
    " p99_us samples bytes flops ceiling_gbps ceiling_gflops floor_us frac_floor verified max_rel_err env").split()


def read_text(path):
    with open(path) as file:
        return file.read()


def moekit(*args):
    return subprocess.run([BINARY, *map(str, args)], capture_output=True, text=True, timeout=300)


def records(result):
    return [json.loads(line) for line in result.stdout.splitlines()]


def safetensors(path):
    """name -> (dtype, shape, begin, end), and the file's bytes; offsets into the file."""
    with open(path, "rb") as file:
        data = file.read()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    base = 8 + size
    return {name: (t["dtype"], t["shape"], base + t["data_offsets"][0], base + t["data_offsets"][1])
            for name, t in header.items()}, data


def write_npy(path, values, shape):
    head = "{'descr': '<f4', 'fortran_order': False, 'shape': %s, }" % (tuple(shape),)
    head = head.ljust(117) + "\n"
    with open(path, "wb") as file:
        file.write(b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode() + array.array("f", values).tobytes())


def read_npy(path):
    with open(path, "rb") as file:
        data = file.read()
    size = struct.unpack("<H", data[8:10])[0]
    head = eval(data[10:10 + size].decode())
    values = array.array("f")
    values.frombytes(data[10 + size:])
    return list(head["shape"]), values


class CommandLine(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp()
        self.addCleanup(shutil.rmtree, self.folder)

    def path(self, name):
        return os.path.join(self.folder, name)

    def expect(self, code, *args):
        result = moekit(*args)
        self.assertEqual(result.returncode, code, " ".join(map(str, args)) + "\n" + result.stdout + result.stderr)
        return result

    # ---- the command line itself

    def test_help_shows_examples_before_flags(self):
        for args in [["--help"]] + [[verb, "--help"] for verb in VERBS]:
            out = self.expect(0, *args).stdout
            self.assertLess(out.index("Examples:"), out.index("Options:"), args)
            self.assertIn("moekit " + (args[0] if args[0] != "--help" else "demo"), out)

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

    # ---- verbs

    def test_doctor(self):
        record, = records(self.expect(0, "doctor", "--json"))
        for key in ["version", "cpu", "isa_used", "isa_detected", "threads", "l3_bytes", "hugepages", "memory_bytes",
                    "read_gbps", "f32_fma_gflops", "cuda", "mpi", "implementations"]:
            self.assertIn(key, record)
        self.assertGreater(record["read_gbps"], 0)
        self.assertGreater(record["f32_fma_gflops"], 0)
        names = {entry["name"] for entry in record["implementations"]}
        self.assertIn("reference", names)
        for entry in record["implementations"]:
            self.assertTrue(entry["available"] or entry["reason"])
        text = self.expect(0, "doctor").stdout
        self.assertRegex(text, r"GPU +none")
        self.assertRegex(text, r"MPI, NCCL +none")

    def test_inspect(self):
        record, = records(self.expect(0, "inspect", TINY, "--json"))
        self.assertEqual(record["model_type"], "qwen3_moe")
        self.assertEqual([layer["layer"] for layer in record["layers"]], [0, 1])
        layer = record["layers"][0]
        self.assertEqual((layer["experts"], layer["top_k"], layer["hidden"], layer["intermediate"], layer["weights"]),
                         (16, 4, 128, 64, "bf16"))
        self.assertEqual(layer["bytes_per_token"], 4 * 3 * 128 * 64 * 2)
        self.assertTrue(layer["runs"]["ok"])
        self.assertIn("2 MoE layers", self.expect(0, "inspect", TINY).stdout)

    def test_explain(self):
        for subject in [["e8k2h96i64:bf16"], [TINY, "--layer", "1"]]:
            found = records(self.expect(0, "explain", *subject, "--tokens", "1,64", "--json"))
            self.assertEqual([r["tokens"] for r in found], [1, 64])
            for record in found:
                chosen = [c for c in record["candidates"] if c["chosen"] and c["stage"] == "experts"]
                self.assertEqual([c["name"] for c in chosen], [record["experts"]])
                for candidate in record["candidates"]:
                    self.assertTrue(candidate["chosen"] or candidate["reason"], candidate)
                self.assertGreater(record["floor_us"], 0)
        self.assertIn("experts", self.expect(0, "explain", "e8k2h96i64:bf16", "--tokens", "16").stdout)
        settings = records(self.expect(0, "explain", "e8k2h96i64:bf16@tokens=3,7,threads=1", "--json"))
        self.assertEqual([r["tokens"] for r in settings], [3, 7])

    def test_run_all_layers(self):
        y, csv = self.path("y.npy"), self.path("r.csv")
        found = records(self.expect(0, "run", TINY, "--tokens", "5", "--out", y, "--routing-out", csv, "--json"))
        self.assertEqual([r["layer"] for r in found], [0, 1])
        self.assertEqual(sum(found[0]["expert_tokens"]), 5 * 4)
        self.assertEqual(read_npy(y)[0], [2, 5, 128])
        lines = read_text(csv).splitlines()
        self.assertEqual(lines[0], "layer,token,slot,expert,weight")
        self.assertEqual(len(lines), 1 + 2 * 5 * 4)

    def test_run_reproduces_recorded_rows(self):
        tensors, data = safetensors(os.path.join(TINY, "golden.safetensors"))

        def rows(name, count):
            begin = tensors[name][2]
            values = array.array("f")
            values.frombytes(data[begin:begin + count * 128 * 4])
            return values

        x, want = rows("layers.0.mlp.in", 6), rows("layers.0.mlp.out", 6)
        write_npy(self.path("x.npy"), x, [6, 128])
        self.expect(0, "run", TINY, "--layer", "0", "--x", self.path("x.npy"), "--out", self.path("y.npy"))
        shape, got = read_npy(self.path("y.npy"))
        self.assertEqual(shape, [6, 128])
        largest = max(map(abs, want))
        self.assertLess(max(abs(a - b) for a, b in zip(got, want)), 2e-2 * largest)

    def test_verify_every_published_layout(self):
        for folder, layer in [(TINY, "1"), (os.path.join(GOLDEN, "mixtral"), "0"), (os.path.join(GOLDEN, "dbrx"), "1"),
                              (os.path.join(GOLDEN, "llama4"), "0"), (os.path.join(GOLDEN, "gpt_oss"), "1"),
                              (os.path.join(QUANT, "ct_int8_w8a8"), "0"), (os.path.join(QUANT, "fp8_block128"), "0")]:
            found = records(self.expect(0, "verify", folder, "--layer", layer, "--json"))
            checked = [r for r in found if r["ok"] is not None]
            self.assertTrue(all(r["ok"] for r in checked))
            for record in checked:
                for key in ["module", "case", "impl", "max_abs", "max_rel", "tol", "worst", "ok"]:
                    self.assertIn(key, record)
            keys = [(r["module"], r["case"], r["impl"]) for r in found]
            self.assertEqual(len(keys), len(set(keys)), "one record per (module, case, impl)")
            cases = " ".join(r["case"] for r in checked)
            for kind in ["router", "experts", "repeat"]:
                self.assertIn(kind, cases, folder)

    def test_verify_shape_and_last_line(self):
        out = self.expect(0, "verify", SMALL).stdout
        self.assertRegex(out.splitlines()[-1], r"^\d+ passed, 0 failed, \d+ skipped$")
        self.assertIn("float64", out)

    def test_verify_bits_prints_hashes_that_do_not_depend_on_threads(self):
        shapes = self.path("shapes.txt")
        with open(shapes, "w") as file:
            file.write("# two\ne6k2h64i96\n\ne16k4h128i64:int8 M=9  # one number of tokens\n")
        found = records(self.expect(0, "verify", shapes, "--bits", "--json"))
        hashes = {}
        for record in found:
            self.assertIs(record["ok"], True)
            hashes.setdefault((record["module"], record["case"].split(" ")[0]), {})[record["case"]] = record["fnv1a64"]
        self.assertEqual(set(hashes), {("e6k2h64i96:bf16", "M1"), ("e6k2h64i96:bf16", "M33"), ("e6k2h64i96:bf16", "M512"),
                                       ("e16k4h128i64:int8", "M9")})
        for cases in hashes.values():
            of_threads = {case.split("threads ")[1]: fnv for case, fnv in cases.items() if "threads" in case}
            self.assertEqual(set(of_threads), {"1", "2", "3", "8"})
            self.assertEqual(len(set(of_threads.values())), 1)
        self.assertEqual(sum("rows alone: 0" in case for cases in hashes.values() for case in cases), 3)
        out = self.expect(0, "verify", TINY, "--bits", "--impl", "cpu.*", "--tokens", "33").stdout
        self.assertRegex(out, r"fnv1a64 [0-9a-f]{16}")
        self.assertRegex(out.splitlines()[-1], r"^\d+ passed, 0 failed, 0 skipped$")
        with open(shapes, "w") as file:
            file.write("e6k2h64i96\ne6k2h64\n")
        self.assertIn("shapes.txt:2", self.expect(3, "verify", shapes, "--bits").stderr)

    def corrupted(self, source, name, offset_of):
        folder = self.path("corrupted")
        shutil.copytree(source, folder)
        os.chmod(folder, 0o755)
        path = os.path.join(folder, name)
        os.chmod(path, 0o644)
        tensors, data = safetensors(path)
        data = bytearray(data)
        offset_of(tensors, data)
        with open(path, "wb") as file:
            file.write(data)
        return folder

    def test_verify_finds_a_corrupted_result(self):
        def change(tensors, data):
            begin = tensors["model.layers.0.mlp|M37|out"][2] + 4 * (11 * 64 + 5)
            value, = struct.unpack_from("<f", data, begin)
            struct.pack_into("<f", data, begin, value + 1.0)

        folder = self.corrupted(os.path.join(GOLDEN, "mixtral"), "golden.safetensors", change)
        result = self.expect(1, "verify", folder, "--layer", "0", "--impl", "reference")
        self.assertIn("[11, 5]", result.stdout)
        self.assertRegex(result.stdout.splitlines()[-1], r"[1-9]\d* failed")

    def test_verify_finds_a_corrupted_weight(self):
        def change(tensors, data):
            name = next(n for n in sorted(tensors) if "experts.2" in n and n.endswith("w2.weight") and "layers.0" in n)
            begin, end = tensors[name][2], tensors[name][3]
            for at in range(begin, end, 4):
                data[at + 3] ^= 0x80

        folder = self.corrupted(os.path.join(GOLDEN, "mixtral"), "model.safetensors", change)
        self.expect(1, "verify", folder, "--layer", "0", "--impl", "reference")

    def test_verify_finds_wrong_ids(self):
        def change(tensors, data):
            begin = tensors["model.layers.0.mlp|M37|router2"][2]
            first, second = struct.unpack_from("<qq", data, begin)
            struct.pack_into("<q", data, begin, next(e for e in range(8) if e not in (first, second)))

        folder = self.corrupted(os.path.join(GOLDEN, "mixtral"), "golden.safetensors", change)
        result = self.expect(1, "verify", folder, "--layer", "0", "--impl", "reference", "--json")
        failed = [r["case"] for r in records(result) if r["ok"] is False]
        self.assertIn("M37 router", failed)

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

    # ---- bench

    def test_bench_record_has_exactly_the_documented_fields(self):
        row, = records(self.expect(0, "bench", SMALL, "--tokens", "3", "--seconds", "0.05", "--json"))
        self.assertEqual(list(row), BENCH_FIELDS)
        self.assertEqual(row["schema"], "moekit.bench/1")
        self.assertEqual(row["shape"], SMALL)
        self.assertIs(row["verified"], True)
        self.assertGreaterEqual(row["samples"], 3)
        self.assertLessEqual(row["min_us"], row["median_us"])
        self.assertLessEqual(row["median_us"], row["p99_us"])
        self.assertGreater(row["floor_us"], 0)

    def test_bench_against_another_implementation(self):
        found = records(self.expect(0, "bench", SMALL, "--tokens", "2", "--impl", "reference", "--vs", "cpu.portable",
                                    "--seconds", "0.05", "--json"))
        pair, = [r for r in found if r["schema"] == "moekit.bench.pair/1"]
        self.assertEqual((pair["a"], pair["b"]), ("reference", "cpu.portable"))
        self.assertGreater(pair["b_over_a_median"], 0)
        self.assertEqual({r["impl"] for r in found if r["schema"] == "moekit.bench/1"}, {"reference", "cpu.portable"})

    def test_bench_with_gaps_shows_the_tail_beside_that_of_a_plain_read(self):
        args = ["bench", SMALL, "--tokens", "1", "--gap-ms", "0.5", "--seconds", "0.02"]
        gap, = [r for r in records(self.expect(0, *args, "--json")) if r["schema"] == "moekit.bench.gap/1"]
        self.assertEqual((gap["calls"], gap["gap_ms"]), (400, 0.5))
        self.assertLessEqual(gap["p50_us"], gap["p99_us"])
        self.assertLessEqual(gap["p99_us"], gap["max_us"])
        self.assertAlmostEqual(gap["p99_over_median"] * gap["p50_us"] / gap["p99_us"], 1, 3)
        self.assertAlmostEqual(gap["probe_p99_over_median"] * gap["probe_p50_us"] / gap["probe_p99_us"], 1, 3)
        self.assertAlmostEqual(gap["tail_over_probe"] * gap["probe_p99_over_median"] / gap["p99_over_median"], 1, 3)
        self.assertAlmostEqual((gap["wake_us"] + gap["back_to_back_us"]) / gap["p50_us"], 1, 3)
        out = self.expect(0, *args).stdout
        for word in ["400 calls", "p50", "p99", "max", "to wake up", "plain read", "ratio"]:
            self.assertIn(word, out)

    def test_bench_batched_against_standard_at_equal_rows(self):
        for weights in ["bf16", "f32"]:
            found = records(self.expect(0, "bench", "e6k2h96i64", "--weights", weights, "--batched", "--tokens", "3,17",
                                        "--seconds", "0.05", "--json"))
            self.assertEqual([(r["schema"], r["tokens"], r["rows_per_expert"]) for r in found],
                             [("moekit.bench.batched/1", 3, 1), ("moekit.bench.batched/1", 17, 6)])
            for record in found:
                self.assertEqual("cpu_batched" + record["standard"][3:], record["batched"])
                self.assertGreater(record["batched_over_standard"], 0)
                self.assertIs(record["verified"], True)
        self.assertIn("times as long", self.expect(0, "bench", SMALL, "--batched", "--tokens", "2", "--seconds", "0.05").stdout)
        self.expect(2, "bench", SMALL, "--batched", "--vs", "reference")
        self.expect(4, "bench", "e4k2h64i32:int8", "--batched")
        self.expect(4, "bench", SMALL, "--batched", "--impl", "reference")

    def test_measuring_script_covers_every_layer_and_names_missed_bars(self):
        fake, out = self.path("moekit"), self.path("out.json")
        with open(fake, "w") as file:  # every figure at 0.78, but nothing at all for one cell
            file.write(f"#!{sys.executable}\n" + """
import json, sys
if sys.argv[2] == "e8k2h4096i14336" and "f32" in sys.argv: sys.exit(5)
kind = "batched/1" if "--batched" in sys.argv else "gap/1" if "--gap-ms" in sys.argv else "1"
print(json.dumps({"schema": "moekit.bench" + ("/" if kind == "1" else ".") + kind, "impl": "i", "batched": "b", "frac_floor": 0.78,
                  "batched_over_standard": 1.2, "p99_over_median": 2.4, "probe_p99_over_median": 2.3, "median_us": 1,
                  "ceiling_gbps": 1, "ceiling_gflops": 1, "batched_us": 1, "p50_us": 1, "wake_us": 1, "max_us": 1}))
""")
        os.chmod(fake, 0o755)
        done = subprocess.run([sys.executable, os.path.join(SOURCE, "scripts", "bench"), "--moekit", fake, "--processes", "1",
                               "--out", out], capture_output=True, text=True)
        self.assertEqual(done.returncode, 1, done.stderr)
        lines = done.stdout.splitlines()
        schemes = [("bf16", 1), ("bf16", 512), ("f32", 512), ("int8", 512), ("fp8_block128", 1)]
        for shape in ["e128k8h2048i768", "e32k8h1024i512", "e8k2h4096i14336"]:
            for weights, tokens in schemes:
                line, = [line for line in lines if line.startswith(f"{shape}:{weights} {tokens} ")]
                want = ("no figure" if (shape, weights) == ("e8k2h4096i14336", "f32") else
                        "MISSED" if tokens == 1 else "ok")
                self.assertIn(want, line)
            self.assertIn("1.100  MISSED", next(line for line in lines if line.startswith("batched " + shape)))
        self.assertIn("2.530  ok", next(line for line in lines if line.startswith("gap ")))
        self.assertRegex(lines[-1], "^10 bars met, 9 missed: .*, 1 without a figure: e8k2h4096i14336:f32 512$")
        self.assertEqual(len(read_text(out).splitlines()), 19)

    def test_trace_round_trip(self):
        csv = self.path("r.csv")
        self.expect(0, "run", TINY, "--layer", "1", "--tokens", "7", "--routing-out", csv)
        lines = [line.split(",") for line in read_text(csv).splitlines()[1:]]
        row, = records(self.expect(0, "bench", TINY, "--layer", "1", "--tokens", "7", "--routing", "trace:" + csv,
                                   "--seconds", "0.05", "--json"))
        self.assertEqual(row["experts_hit"], len({line[3] for line in lines}))
        self.assertEqual(row["routing"], "trace:" + csv)

    def test_bench_writes_a_picture(self):
        svg = self.path("l.svg")
        text = self.expect(0, "bench", SMALL, "--tokens", "1,4", "--seconds", "0.05", "--svg", svg).stdout
        self.assertIn("ceilings in this run", text)
        self.assertTrue(read_text(svg).startswith("<svg"))

    def test_interrupt_keeps_finished_rows(self):
        tokens = ",".join(str(n) for n in range(1, 200))
        process = subprocess.Popen([BINARY, "bench", SMALL, "--tokens", tokens, "--seconds", "0.2", "--json"],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        first = process.stdout.readline()
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 7, errors)
        for line in [first] + rest.splitlines():
            self.assertIs(json.loads(line)["verified"], True)

    def test_no_progress_bar_and_no_escapes_in_pipes(self):
        result = self.expect(0, "run", TINY, "--tokens", "2")
        self.assertNotIn("\033", result.stdout + result.stderr)
        self.assertNotIn("\r", result.stdout + result.stderr)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]] + sys.argv[3:])
