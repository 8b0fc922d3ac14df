"""Drives the moekit binary: every verb on the sample checkpoint, JSON, recorded results, Ctrl-C.

usage: test_cli_verbs.py BINARY SOURCE_TREE [unittest arguments]
"""
import array
import json
import os
import shutil
import signal
import struct
import subprocess
import sys

sys.dont_write_bytecode = True
sys.path.insert(0, sys.path[0] + "/support")
from cli_driver import (BENCH_FIELDS, BINARY, GOLDEN, QUANT, SMALL, SOURCE, TINY, VERBS,  # noqa: E402
                        CommandLine, main, read_npy, read_text, records, safetensors, write_npy)


class Verbs(CommandLine):
    def test_help_shows_examples_before_flags(self):
        for args in [["--help"]] + [[verb, "--help"] for verb in VERBS]:
            out = self.expect(0, *args).stdout
            self.assertLess(out.index("Examples:"), out.index("Options:"), args)
            self.assertIn("moekit " + (args[0] if args[0] != "--help" else "demo"), out)

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
        gap = next(line for line in lines if line.startswith("gap "))
        self.assertIn("2.400  2.000  MISSED", gap)
        self.assertIn("1.04 of a read's (at most 1.3)", gap)
        self.assertRegex(lines[-1], "^8 bars met, 11 missed: .*, 1 without a figure: e8k2h4096i14336:f32 512$")
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
    main()
