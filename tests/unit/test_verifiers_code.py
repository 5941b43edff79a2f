"""Programs in the sandbox: what passes, what does not, and what cannot be done there."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from kedge.ext.sandbox import programs
from kedge.ext.sandbox.programs import extract_code
from kedge.records.errors import ConfigError, RewardError
from kedge.verifiers import Sandbox, code_verifier
from tests.unit.sandbox_attacks import ISOLATION

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the sandbox needs fork")

ADD = "def add(a, b):\n    return a + b\n"
TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]
VERDICT = '{"test": 0, "passed": true}\n{"test": 1, "passed": true}\n'
QUICK = Sandbox(seconds=1.0, isolation=ISOLATION)
code = code_verifier(sandbox=ISOLATION)


def solves(program: str, tests: list[str] | None = None) -> bool:
    return all(QUICK.test(program, tests or TESTS).passed)


def test_right_and_wrong() -> None:
    assert solves(ADD)
    outcome = QUICK.test("def add(a, b):\n    return 3\n", TESTS)
    assert outcome.passed == (True, False)
    assert outcome.error == "AssertionError: "


@pytest.mark.parametrize(
    "program",
    [
        "",
        "def add(a, b)\n    return a + b\n",
        "import sys\nsys.exit(0)\n",
        "def add(a, b):\n    raise SystemExit(0)\n",
        "class Any(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Any(7)\n",
        "def add(a, b): return lambda: 3\n",
        "def add(a, b): return 1 + add(a, b)\n",
        "def add(a, b): return '3' if a == 1 else '0'\n",
        "def add(*a): return 9\nimport sys\nsys.modules['tests'] = None\n",
        "def isinstance(*a): return True\ndef all(*a): return True\ndef add(*a): return 9\n",
        f"print({VERDICT!r}, flush=True)\n",
        "import signal, os\ndef add(a, b):\n    signal.raise_signal(signal.SIGKILL)\n",
        "x = []\nfor _ in range(10**6): x = [x]\ndef add(a, b): return x\n",
        "def add(a, b): return 10 ** 100000\n",
        "import itertools\ndef add(a, b): return itertools.count()\n",
    ],
)  # fmt: skip
def test_hacks_do_not_pass(program: str) -> None:
    assert not any(QUICK.test(program, TESTS).passed)


STUBBORN = "import signal; signal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass"


@pytest.mark.parametrize(
    "body", [STUBBORN, pytest.param("import time; time.sleep(1000)", marks=pytest.mark.slow)]
)
def test_time_is_limited_whatever_the_code_does(body: str) -> None:
    began = time.perf_counter()
    outcome = QUICK.test(body, TESTS)
    assert not any(outcome.passed)
    assert outcome.stopped in ("timeouts", "crashes")
    assert time.perf_counter() - began < 30


def test_tests_that_passed_before_the_time_was_up_count() -> None:
    slow = "def add(a, b):\n    while a < 0: pass\n    return a + b\n"
    outcome = QUICK.test(slow, TESTS)
    assert (outcome.passed, outcome.stopped) == ((True, False), "timeouts")


def test_memory_is_limited() -> None:
    hungry = "x = bytearray(200 << 20)\n" + ADD
    assert "MemoryError" in Sandbox(isolation=ISOLATION, memory_mb=128).test(hungry, TESTS).error
    assert Sandbox(isolation=ISOLATION, memory_mb=512).test(hungry, TESTS).passed == (True, True)
    with pytest.raises(ConfigError, match="seconds=0"):
        Sandbox(seconds=0)


def test_the_environment_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_SECRET", "hush")
    outcome = QUICK.run("import os; print(sorted(os.environ), os.getcwd())")
    assert "SECRET" not in outcome.output
    assert os.getcwd() not in outcome.output


def test_installed_packages_on_request() -> None:
    program = "import numpy\ndef add(a, b): return int(numpy.add(a, b))\n"
    assert "ModuleNotFoundError" in QUICK.test(program, TESTS).error
    ample = Sandbox(isolation=ISOLATION, packages=True, memory_mb=4096, seconds=30)
    assert ample.test(program, TESTS).passed == (True, True)


VALUES = (
    "[None, True, 1, -2.5, 'é', b'b', 1j, [1], (1, 2), {1}, frozenset({1}), {'a': (1,)},"
    " {1: {2: [3]}}, float('inf'), 2**200]"
)


STACK = """
LIMIT = 3
class Full(Exception): pass
class Stack:
    def __init__(self, *first): self.items = list(first)
    def push(self, x):
        if len(self.items) == LIMIT: raise Full(x)
        self.items.append(x); return self
    def pop(self): return self.items.pop()
    def joined(self, other): return self.items + other.items
    def __len__(self): return len(self.items)
    def __contains__(self, x): return x in self.items
    def __iter__(self): return iter(self.items)
    def __getitem__(self, i): return self.items[i]
    def __setitem__(self, i, x): self.items[i] = x
    def __eq__(self, other): return True
"""


@pytest.mark.parametrize(
    "test",
    [
        "s = Stack(1)\nassert s.push(2).push(3).pop() == 3 and s.items == [1, 2]",
        "s = Stack(5)\ns.items = [7]\ns[0] = 8\nassert len(s) == 1 and 8 in s and [*s] == [s[0]]",
        "s, t = Stack(1), Stack(2)\nassert s.joined(t) == [1, 2] and s is not t and s != t",
        "s = Stack(1, 2, LIMIT)\ntry: s.push(4)\nexcept Full: pass\nelse: assert 0",
        "assert LIMIT == 3 and Stack().items == []",
    ],
)  # fmt: skip
def test_classes_errors_and_constants_of_the_solution(test: str) -> None:
    outcome = QUICK.test(STACK, [test])
    assert outcome.passed == (True,), outcome.error
    assert solves(STACK.replace("Stack", "Pile"), ["assert candidate(4).pop() == 4"]) is False
    assert QUICK.test(STACK, ["assert candidate(4).pop() == 4"], entry_point="Stack").passed[0]


@pytest.mark.parametrize(
    "test",
    [
        "assert Stack(1) == 7", "assert 7 == Stack(1)", "assert Stack(1) == [1]",
        "assert Stack(1) == Stack(1)", "assert Stack(1).joined == 7", "assert Stack(1) in [7]",
    ],
)  # fmt: skip
def test_an_object_equals_itself_alone(test: str) -> None:
    assert not any(QUICK.test(STACK, [test]).passed)


def test_a_function_cannot_answer_with_an_object() -> None:
    program = STACK + "def add(a, b): return Stack(a)\n"
    outcome = QUICK.test(program, TESTS)
    assert (outcome.passed, outcome.stopped) == ((False, False), "untestable")
    assert "a Stack cannot leave its process" in outcome.error
    yes = "class Yes:\n    def __getattr__(self, name): return lambda *a: True\n"
    assert not solves(yes + "def add(a, b): return Yes()\n", ["assert add(1, 2).issubset({3})"])


@pytest.mark.parametrize(
    "said", ["1", "{'refused': 1}", "[{}]", "abc", '{"test": 0, "passed": true}', "\\xff"]
)
def test_what_tests_print_is_no_report(said: str) -> None:
    prints = f"import sys\nprint({said!r}, flush=True)\nsys.stdout.write({said!r})\n"
    assert solves(ADD, [prints + TESTS[0], TESTS[1]])
    assert not any(QUICK.test("def add(a, b): return 9\n", [prints + TESTS[0]]).passed)


def test_time_is_that_of_the_solution_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(process: object) -> bytes:
        raise AssertionError("the sandbox waited longer, for the time that Python has to start")

    monkeypatch.setattr("kedge.ext.sandbox._kill", killed)
    hasty = Sandbox(isolation=ISOLATION, seconds=0.2)
    assert hasty.test("while True: pass", TESTS).stopped == "timeouts"
    assert hasty.run("while True: pass").stopped == "timeouts"


def test_a_test_that_is_no_python_is_a_mistake_in_the_dataset() -> None:
    with pytest.raises(RewardError, match="verifier code: test 1 is not valid Python"):
        code([ADD], ground_truth=[{"tests": ["assert add(1, 2) == 3", "assert add(1,"]}])
    assert code(["def add("], ground_truth=[{"tests": TESTS}]) == [0.0]


def test_values_cross_unchanged() -> None:
    tests = [f"for v in {VALUES}:\n    r = same(v)\n    assert r == v and type(r) is type(v), v"]
    assert solves("def same(v): return v\n", tests)
    assert solves("def gen(n):\n    yield from range(n)\n", ["assert list(gen(3)) == [0, 1, 2]"])
    assert not solves("def gen(n):\n    yield from range(n)\n", ["assert gen(3) == [0, 1, 2]"])


# Program and test; plain Python says whether it passes.
AS_IN_PLAIN_PYTHON = [
    ("def f(n): return range(n)", "assert f(3) == [0, 1, 2]"),
    ("from collections import Counter\ndef f(s): return Counter(s)",
     "assert type(f('ab')) is dict"),
    ("def f(x): return x", "x = [1]\ny = f(x)\nassert y == x and y is not x"),
    ("def f(x): return list(x)", "x = [[1]]\ny = f(x)\ny[0].append(2)\nassert x == [[1]]"),
    ("def f(): return bytearray(b'a')", "assert {f(): 1}"),
    ("def f(): x = []; return [x, x]", "a, b = f()\na.append(1)\nassert b == []"),
    ("def f(): return (i for i in [1, 2])", "g = f()\nassert list(g) == [1, 2] and list(g) == []"),
    ("def f(n): return 7 ** n", "assert f(9000) == 7 ** 9000"),
    ("def f(x, *, back): x.sort(reverse=back)",
     "x = [1, 3]; y = x\nf(x, back=True)\nassert y == [3, 1]"),
    ("def f(xs): xs.append(1)", "x = []\nf(xs=x)\nassert x == [1]"),
    ("def f(m): m[0].reverse()", "r = [1, 2]\nf([r])\nassert r == [2, 1]"),
    ("def f(n): return lambda x: x + n", "assert f(3)(4) == 7"),
    ("from fractions import Fraction\ndef f(): return Fraction(1, 2)", "assert f() == 0.5"),
    ("from decimal import Decimal as D\ndef f(): return D('.1') * 3", "assert str(f()) == '0.3'"),
    ("import datetime as d\ndef f(x): return x + d.timedelta(1)",
     "import datetime as d\nassert f(d.datetime(2024, 2, 28, 5)) == d.datetime(2024, 2, 29, 5)"),
    ("from collections import deque\ndef f(): return deque([1], 1)",
     "d = f()\nd.append(2)\nassert [*d] == [2]"),
    ("def f(d): d['k'] += 1",
     "from collections import defaultdict as D\nd = D(int)\nf(d)\nassert d == {'k': 1}"),
    ("import itertools\ndef f(): return itertools.count()", "assert next(f()) == 0"),
    ("def f(n): yield from range(n)", "assert sum(f(1000)) == 499500"),
    ("class E(ValueError):\n    def __init__(s, c): s.code = c\ndef f(): raise E(3)",
     "try: f(); assert False\nexcept ValueError as e: assert e.code == 3"),
    ("def f(d): return d['x']",
     "try: f({}); assert False\nexcept KeyError as e: assert e.args == ('x',)"),
    ("class V:\n    def __init__(s, x): s.x = x\n    def __add__(s, o): return V(s.x + o.x)",
     "assert (V(1) + V(2)).x == 3"),
    ("class V:\n    n = 3\n    @classmethod\n    def make(c): return c()",
     "assert V.n == 3 and isinstance(V(), V)"),
    ("class V:\n    def f(s): return 1", "class W(V): pass\nassert W().f() == 1"),
    ("N = None\ndef f(): return N", "assert f() is N"),
    ("class V:\n    def __enter__(s): return 3\n    def __exit__(s, *a): pass",
     "with V() as x: assert x == 3"),
    ("def f(): print('hi')", "import io, contextlib\nb = io.StringIO()\n"
     "with contextlib.redirect_stdout(b): f()\nassert b.getvalue() == 'hi\\n'"),
    ("def f(a, b): return a + b",
     "from solution import f as g\ndef test_sum():\n    assert g(1, 2) == 3"),
    ("def f(a, b): return a - b", "def test_sum():\n    assert f(1, 2) == 3\ntest_sum()"),
]  # fmt: skip


def test_programs_pass_where_they_pass_in_plain_python(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = []
    for program, test in AS_IN_PLAIN_PYTHON:
        module = types.ModuleType("solution")
        monkeypatch.setitem(sys.modules, "solution", module)
        exec(program, module.__dict__)
        try:
            exec(test, dict(module.__dict__))
        except Exception:
            verdicts.append(0.0)
        else:
            verdicts.append(1.0)
    texts = [program for program, _ in AS_IN_PLAIN_PYTHON]
    truths = [{"tests": [test]} for _, test in AS_IN_PLAIN_PYTHON]
    assert code(texts, ground_truth=truths) == verdicts
    assert verdicts.count(0.0) == 7


NEVER_CALLED = {
    "check without entry_point": {"test": "def check(candidate):\n    assert candidate(1, 2) == 3"},
    "another name": {"entry_point": "add", "test": "def helper(f):\n    assert f(1, 2) == 3"},
    "no code": {"entry_point": "add", "test": "METADATA = {}"},
    "a comment": {"tests": ["", "# add(1, 2) == 3"]},
    "not the main program": {"tests": ["if __name__ == '__main__':\n    assert add(1, 2) == 3"]},
    "no assert": {"tests": ["add(1, 2) == 3"]},
}
CALLED_FOR_THEM = {
    "pytest": {"tests": ["def test_add():\n    assert add(1, 2) == 3"]},
    "a class of pytest": {"tests": ["class TestAdd:\n    def test(self): assert add(1, 2) == 3"]},
    "unittest": {"tests": ["import unittest\nclass T(unittest.TestCase):\n"
                           "    def test(self): self.assertEqual(add(1, 2), 3)"]},
    "HumanEval": {"entry_point": "add",
                  "test": "def check (candidate):\n    assert candidate(1, 2) == 3"},
    "KodCode": {"tests": ["from solution import add\ndef test_add():\n    assert add(1, 2) == 3"]},
}  # fmt: skip


def test_tests_that_no_program_can_fail_are_a_mistake_in_the_dataset() -> None:
    for truth in NEVER_CALLED.values():
        with pytest.raises(RewardError, match=r"no test calls|compares without assert"):
            code([ADD], ground_truth=[truth])
    truths = [*CALLED_FOR_THEM.values()]
    assert code([ADD] * 5, ground_truth=truths) == [1.0] * 5
    assert code(["def add(a, b): return 0"] * 5, ground_truth=truths) == [0.0] * 5


def test_what_the_processes_cannot_carry_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    pairs = [
        ("def f(g, x): return g(x)", "assert f(lambda x: x + 1, 3) == 4"),
        ("async def f(): return 3", "import asyncio\nassert asyncio.run(f()) == 3"),
        ("def f(): return 3", "import a_package_that_is_absent\nassert f() == 3"),
    ]
    programs._warned.clear()
    seen: dict[str, float] = {}
    scores = code_verifier(sandbox=ISOLATION, name="carried")(
        [program for program, _ in pairs],
        ground_truth=[{"tests": [test]} for _, test in pairs],
        log_metric=seen.__setitem__,
    )
    assert (scores, seen) == ([0.0] * 3, {"untestable/carried": 3.0})
    assert "score 0 and are counted in untestable" in caplog.text


def test_errors_cross() -> None:
    program = "def f(x):\n    class Own(Exception): pass\n    raise Own('o')\n"
    test = "try:\n    f(0)\nexcept RuntimeError as e: assert 'Own' in str(e)\nelse: assert 0"
    assert solves(program, [test])


def test_an_unfinished_prompt_defines_its_helpers() -> None:
    truth = {
        "prompt": "import math\ndef close(a, b):\n    return abs(a - b) < 1e-6\n\ndef half(x):\n",
        "tests": ["assert close(half(1), 0.5) and math.isclose(half(3), 1.5)"],
    }
    programs = ["    return x / 2\n", "    return 0\ndef close(a, b): return True\n"]
    assert code(programs, ground_truth=[truth] * 2) == [1.0, 0.0]
    said = {"prompt": 'def add(a, b):\n    """Add."""\n', "entry_point": "add"}
    test = "def check(candidate):\n    assert candidate(1, 2)\n    assert str(candidate(3)) == '3'"
    exception = ["```python\nclass add(Exception): pass\n```"]
    assert code(exception, ground_truth=[said | {"test": test}]) == [0.0]


def test_tests_trust_their_own_names_alone() -> None:
    cheat = "def helper(x): return 0\ndef f(x): return 5\n"
    honest = "def helper(x):\n    return x * 2\ndef f(x):\n    return x\n"
    prefix = "import math\ndef helper(x):\n    return x + 1\n\ndef f(x):\n    '''...'''\n"
    tests = ["assert helper(candidate(1)) == 2 and math.sqrt(4) == 2"]
    assert not all(QUICK.test(cheat, tests, entry_point="f", prefix=prefix).passed)
    assert all(QUICK.test(honest, tests, entry_point="f", prefix=prefix).passed)


def test_programs_with_input_and_output() -> None:
    outcome = QUICK.run("print(int(input()) * 2)", "21")
    assert (outcome.output, outcome.stopped, outcome.error) == ("42\n", "", "")
    assert QUICK.run("1/0").error == "exit code 1"
    endless = QUICK.run("while True: print('x' * 1000)")
    assert len(endless.output) <= 1 << 20
    assert QUICK.run("import os\nos.remove('stdout')\nprint('x')").output in ("", "x\n")
    hashes = "print(list({'a', 'b', 'c', 'd'}))"
    assert QUICK.run(hashes).output == QUICK.run(hashes).output
    truth = {"inputs": ["1"], "outputs": ["1"]}
    programs = ["print(1)", "print(1)\nraise SystemExit(1)", "print(1)\n1/0"]
    assert code(programs, ground_truth=[truth] * 3) == [1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "body",
    [
        "import math, collections, itertools, functools, re, heapq, bisect, string, random",
        "import hashlib; hashlib.md5(b'x').hexdigest()",
        "import datetime, decimal, fractions, statistics, json, typing, dataclasses, enum",
        "open('x', 'w').write('1'); assert open('x').read() == '1'",
        "import tempfile, shutil, os; tempfile.TemporaryFile().write(b'x'); os.chmod('.', 0o700)",
        "import asyncio; asyncio.run(asyncio.sleep(0))",
        "import threading; t = threading.Thread(target=len, args=('',)); t.start(); t.join()",
        "import sqlite3; sqlite3.connect('x.db').execute('create table if not exists t (x)')",
        "from collections import namedtuple; namedtuple('P', 'x')(1)",
        "print('x' * 10_000_000)",
        "import numbers, code, zoneinfo, calendar, unicodedata, copy, operator, subprocess",
    ],
)
def test_ordinary_programs_are_not_hindered(body: str) -> None:
    assert solves(f"def add(a, b):\n    {body}\n    return a + b\n")


def test_code_of() -> None:
    assert extract_code("x = 1") == "x = 1"
    assert extract_code("So:\n```python\nx = 1\n```\nDone.") == "x = 1\n"
    assert extract_code("```\na\n```\n```py\nb\n```\n```bash\nc\n```") == "b\n"
    called = "```python\ndef f(): 1\n```\n```python\nprint(f())\n```"
    assert extract_code(called, "f") == "def f(): 1\n"
    assert extract_code("```python\nx = 1") == "x = 1"
    assert extract_code("~~~python\nx = 1\n~~~\n") == "x = 1\n"
    assert extract_code('```python title="a.py"\nx = 1\n```') == "x = 1\n"
    indented = "1. So:\n   ```python\n   if 1:\n       x = 1\n   ```"
    assert extract_code(indented) == "if 1:\n    x = 1\n"
    assert extract_code("```python\n    return a + b\n```") == "    return a + b\n"
    usage = "```python\nclass S: pass\n```\nUse it:\n```python\nprint(S())\n```"
    assert extract_code(usage) == "print(S())\n"
    assert extract_code(usage, tests=["assert S()"]) == "class S: pass\n"


def test_verifier() -> None:
    answer = f"Here:\n```python\n{ADD}```\n"
    wrong = answer.replace("+", "-")
    truth = {"tests": TESTS}
    assert code([answer, wrong], ground_truth=[truth, json.dumps(truth)]) == [1.0, 0.0]
    share = code_verifier(sandbox=ISOLATION, partial_credit=True, column="t")
    assert share([answer.replace("a + b", "3")], t=[truth]) == [0.5]
    io = {"inputs": ["1 2", "3 4"], "outputs": ["3", "7 \n"]}
    program = "print(sum(map(int, input().split())))"
    assert code([program, "print(3)"], ground_truth=[io, io]) == [1.0, 0.0]
    assert share(["print(3)"], t=[io]) == [0.5]


def test_verifier_counts_what_ran_out_of_time() -> None:
    seen: list[str] = []
    verify = code_verifier(sandbox=QUICK)
    texts = ["while True: pass", "import os; os._exit(0)", ADD]
    scores = verify(
        texts, ground_truth=[{"tests": TESTS}] * 3, log_metric=lambda name, value: seen.append(name)
    )
    assert scores == [0.0, 0.0, 1.0]
    assert sorted(seen) == ["crashes/code", "timeouts/code"]


def test_enormous_programs_score_zero() -> None:
    assert code(["x = 1\n" * 100_000], ground_truth=[{"tests": TESTS}]) == [0.0]
    assert code(["(" * 100_000], ground_truth=[{"tests": TESTS}]) == [0.0]
    assert code(["x = '\ud800\x00'"], ground_truth=[{"tests": TESTS}]) == [0.0]


@pytest.mark.parametrize(
    "truth",
    ["no json", [], {}, {"tests": []}, {"tests": [1]}, {"inputs": ["1"]},
     {"inputs": ["1"], "outputs": []}, {"tests": "pass", "entry_point": "a b"}],
)  # fmt: skip
def test_unusable_truths_are_errors(truth: object) -> None:
    with pytest.raises(RewardError, match="verifier code"):
        code([ADD], ground_truth=[truth])


def test_runs_in_threads_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found: list[list[float | None]] = []
    thread = threading.Thread(target=lambda: found.append(
        code([ADD] * 4, ground_truth=[{"tests": TESTS}] * 4)))  # fmt: skip
    thread.start()
    thread.join()
    assert found == [[1.0] * 4]
    assert list(tmp_path.iterdir()) == []
