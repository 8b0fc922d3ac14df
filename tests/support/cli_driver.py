"""What the tests of the moekit binary share: running it, reading and writing the files that it meets.

usage of the tests: test_cli_….py BINARY SOURCE_TREE [unittest arguments]
"""
import array
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
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


def main():
    unittest.main(argv=[sys.argv[0]] + sys.argv[3:])
