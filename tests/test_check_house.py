"""scripts/check_house finds what it says it finds: one broken tree per rule."""
import os
import subprocess
import sys
import tempfile
import unittest

CHECK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "scripts", "check_house")
LONG_FUNCTION = "int f() {\n  int a = 0;\n" + "  ++a;\n" * 90 + "  return a;\n}\n"
VERSION = "".join(f"#define MOEKIT_VERSION_{part} {value}\n" for part, value in zip(("MAJOR", "MINOR", "PATCH"), "012"))


class CheckHouse(unittest.TestCase):
    def check(self, files, wanted):
        """The tree `files` (path → text) draws a complaint that contains `wanted`, or none if that is None."""
        with tempfile.TemporaryDirectory() as root:
            for path, text in files.items():
                os.makedirs(os.path.dirname(f"{root}/{path}"), exist_ok=True)
                with open(f"{root}/{path}", "w", encoding="utf-8") as file:
                    file.write(text)
            done = subprocess.run([sys.executable, CHECK, root], capture_output=True, text=True)
            if wanted is None:
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            else:
                self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
                self.assertIn(wanted, done.stdout)

    def source(self, text, wanted):
        self.check({"src/a.cpp": text, "src/CMakeLists.txt": "a.cpp"}, wanted)

    def document(self, text, wanted, **files):
        self.check({"README.md": text, "examples/a.hpp": "{\n  int a;\n  int b;\n}\n", **files}, wanted)

    def test_good_tree(self):
        self.source("int a;\n", None)

    def test_file_limit(self):
        self.source("int a;\n" * 501, "501 lines")
        self.source("// house-limit: a table\n" + "int a;\n" * 501, None)

    def test_function_limit(self):
        self.source(LONG_FUNCTION, "f has 94 lines")
        self.source(LONG_FUNCTION.replace("{", "{  // house-limit: unrolled", 1), None)

    def test_parameter_limit(self):
        self.source("int f(int a, int b, int c, int d, int e, int g, int h) { return a; }\n", "more than 6 parameters")
        self.source("int f(map<int, int> a, int b, int c, int d, int e, int g) { return b; }\n", None)

    def test_column_limit(self):
        self.source("//" + "x" * 120 + "\n", "122 columns")

    def test_path_of_one_machine(self):
        self.source("// see /" + "home/me/notes\n", "path of one machine")

    def test_source_that_is_not_built(self):
        self.check({"src/a.cpp": "int a;\n", "src/CMakeLists.txt": "b.cpp"}, "no CMake list")

    def test_versions_disagree(self):
        files = {"include/moekit/version.hpp": VERSION, "CMakeLists.txt": "project(moekit VERSION 0.1.2 LANGUAGES CXX)"}
        self.check(files, None)
        self.check({**files, "CMakeLists.txt": "project(moekit VERSION 0.1.3)"}, "says 0.1.2")
        self.check({**files, "CHANGELOG.md": "## 0.1.1\n"}, "no section 0.1.2")

    def test_links(self):
        self.document("[a](examples/a.hpp) [b](https://a.example/b) [c](#some-title)\n\n## Some title\n", None)
        self.document("[a](examples/b.hpp)", "links to examples/b.hpp")
        self.document("[a](#other)\n\n## Some title\n", "no such heading")

    def test_paths_in_backticks(self):
        self.document("`examples/a.hpp` and `examples/*.hpp` and `build/x`", None)
        self.document("`examples/b.hpp`", "speaks of examples/b.hpp")

    def test_quoted_code(self):
        mark = "<!-- quoted from examples/a.hpp -->\n```cpp\n"
        self.document(mark + "int a;\nint b;\n```\n", None)
        self.document(mark + "int a;\nint c;\n```\n", "differs from examples/a.hpp")
        self.document(mark.replace("a.hpp", "b.hpp") + "int a;\n```\n", "quotes examples/b.hpp")
        self.document("<!-- quoted from examples/a.hpp -->\nint a;\n", "not followed by a code block")


if __name__ == "__main__":
    unittest.main()
