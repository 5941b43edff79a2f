"""The verifiers of mathematical and of numeric answers."""

from __future__ import annotations

import importlib.util
import pickle
import time
from fractions import Fraction

import pytest

from kedge.records.errors import ConfigError, RewardError
from kedge.verifiers import gsm8k, math, math_verifier, number_verifier
from kedge.verifiers.base import Unanswered
from kedge.verifiers.mathematics import SymbolicChecker, equal, final_answer
from kedge.verifiers.numbers import clean, find_numbers, one_number
from kedge.verifiers.worker import WorkerPool

needs_math_verify = pytest.mark.skipif(
    importlib.util.find_spec("math_verify") is None, reason="needs kedge-rl[math]"
)

SAME = [
    (r"\frac{14}{3}", r"\dfrac{14}{3}"),
    (r"\frac{14}{3}", "14/3"),
    (r"\frac{14}{3}", r"4\frac{2}{3}"),
    (r"\frac43", r"\frac{4}{3}"),
    (r"\frac 59", r"\tfrac{5}{9}"),
    (r"\frac9{19}", r"\frac{9}{19}"),
    (r"\frac{270}7\text{ degrees}", r"\frac{270}{7}"),
    (r"-\frac{1}{2}", r"\frac{-1}{2}"),
    (r"-\frac{1}{2}", "-0.5"),
    (r"\text{Evelyn}", "evelyn"),
    (r"\text{(C)}", "C"),
    (r"\text{(C)}", r"\textbf{(C)}"),
    (r"90^\circ", "90"),
    (r"90^\circ", r"90^{\circ}"),
    ("90", "90\u00b0"),
    (r"90^\circ", r"90 \text{ degrees}"),
    (r"5.4 \text{ cents}", "5.4"),
    ("5.4", "5.4 cents"),
    (r"15\mbox{ cm}^2", "15"),
    (r"864 \mbox{ inches}^2", r"864\text{ in}^2"),
    (r"\$18.90", "18.9"),
    (r"\$32,\!348", "32348"),
    (r"11,\! 111,\! 111,\! 100", "11111111100"),
    ("58,500", "58500"),
    ("10080", r"10{,}080"),
    (".0000672", "0.0000672"),
    (".0000672", r"6.72 \times 10^{-5}"),
    ("50%", r"50\%"),
    ("x=5", "5"),
    ("5", "x = 5"),
    ("y = 2x + 3", "2x+3"),
    (r"x \in [-2,7]", r"\left[-2, 7\right]"),
    ("1,-2", "-2, 1"),
    ("1,-2", r"x = 1 \text{ or } x = -2"),
    ("3, 5, 7", r"\{7, 5, 3\}"),
    (r"1 \pm \sqrt{19}", r"1 - \sqrt{19}, 1 + \sqrt{19}"),
    (r"\{1\pm\sqrt{5},-2\}", r"-2, 1+\sqrt5, 1-\sqrt5"),
    (r"\left( 3, \frac{\pi}{2} \right)", r"(3, \pi/2)"),
    (r"(0,9) \cup (9,36)", r"(9,36)\cup(0,9)"),
    (
        r"\begin{pmatrix} -1/3 \\ 2/3 \end{pmatrix}",
        r"\begin{bmatrix}-\frac13\\\frac23\end{bmatrix}",
    ),
    (r"4210_{5}", "4210_5"),
    (r"11\sqrt2", r"11 \sqrt{2}"),
    ("9", r"\left(9\right)"),
    ("(3,4]", r"$(3,4]$"),
    ("-4", "\u22124"),
    (r"\sqrt{51}", "\u221a(51)"),
    ("10", "10."),
    (r"\frac{1}{3}", r"0.\overline{3}"),
    (r"-\frac{1}{6}", r"-0.1\overline{6}"),
    (r"0.\overline{12}", r"\frac{4}{33}"),
    (r"0.\overline{12}", r"0.\bar{12}"),
    (r"\emptyset", r"\varnothing"),
    ("6:30", "6{:}30"),
]

SAME_FORMULA = [
    (r"11\sqrt2", r"\sqrt{242}"),
    ("6 - 5i", "-5i + 6"),
    ("2k+2", "2(k+1)"),
    ("(a+5)(b+2)", "ab + 2a + 5b + 10"),
    (r"\cot x", r"\frac{1}{\tan x}"),
    (r"18+2\pi", r"2(\pi + 9)"),
    (r"3\sqrt{13}", "3*sqrt(13)"),
    (r"\frac{\sqrt{3}}{3}", r"\frac{1}{\sqrt{3}}"),
    ("5x - 7y + 11z + 4 = 0", "-5x + 7y - 11z - 4 = 0"),
    ("y = 2x + 3", "y - 2x = 3"),
    (r"\left( 3, \frac{\pi + 1}{2} \right)", r"(3, (\pi + 1)/2)"),
    (r"\left[ \frac{\pi^2}{8}, 2 \right]", r"[\pi^2 / 8, 2]"),
    (r"(2, \sqrt{12})", r"(2, 2\sqrt{3})"),
    (r"1, \sqrt{12}", r"2\sqrt{3}, 1"),
    ("10^6", "1,000,000"),
    ("1,024", "2^{10}"),
]

DIFFERENT = [
    ("3", r"\text{3 is wrong}"),
    ("4", "3 = 4"),
    ("3", r"3 \bmod 5"),
    ("3", "[3, 3]"),
    ("9", "-9"),
    ("9", "90"),
    (r"\frac{14}{3}", r"\frac{3}{14}"),
    (r"\frac13", "0.333"),
    (r"\text{even}", r"\text{neve}"),
    (r"\text{even}", r"\text{odd}"),
    (r"\text{(C)}", "D"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    ("(1,2]", "(1,2)"),
    ("1,2", "1,2,3"),
    ("1,2", "1"),
    ("1,1", "1,2"),
    ("1,2", "12"),
    (r"1 \pm \sqrt{19}", r"1 + \sqrt{19}"),
    (r"(0,9) \cup (9,36)", "(0,36)"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 2 \\ 1 \end{pmatrix}"),
    (r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}", r"\begin{pmatrix} 1 & 2 \end{pmatrix}"),
    ("4210_5", "4210_6"),
    ("52_8", "52"),
    ("2k", "2"),
    ("12\\pi", "12"),
    ("x=5", "y=5"),
    (r"\sqrt{5}", "5"),
    (r"\sqrt{5}", "2.236"),
    ("x^2", "x2"),
    ("5", ""),
    ("5", "5" * 2000),
    ("5", "{" * 900),
    ("5", "((((" * 200),
    ("5", r"\frac{" * 150),
    ("5", "\\" * 999),
    ("p - q", "q - p"),
    ("58,500", "58,5000"),
    ("1,2", "1,200"),
    (r"\frac{1}{3}", "0.3"),
    (r"0.\overline{3}", r"0.\overline{4}"),
    (r"0.\overline{3}", "0.3"),
    ("(1,234)", "1,234"),
]


@pytest.mark.parametrize(("truth", "answer"), SAME)
def test_same_by_form_alone(truth: str, answer: str) -> None:
    verify = math_verifier(symbolic=False)
    assert verify([rf"So \boxed{{{answer}}}"], ground_truth=[truth]) == [1.0]
    assert verify([f"<answer>{truth}</answer>"], ground_truth=[answer]) == [1.0]


@needs_math_verify
@pytest.mark.parametrize(("truth", "answer"), SAME_FORMULA)
def test_same_formula(truth: str, answer: str) -> None:
    assert not equal(answer, truth)  # it takes the judge
    assert math([rf"\boxed{{{answer}}}"], ground_truth=[truth]) == [1.0]


@needs_math_verify
@pytest.mark.parametrize(("truth", "answer"), DIFFERENT)
def test_different(truth: str, answer: str) -> None:
    assert math([f"<answer>{answer}</answer>"], ground_truth=[truth]) == [0.0]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"so $x=\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\boxed{1} and \boxed{2}", "2"),
        (r"\boxed{\boxed{3}}", "3"),
        ("<think>4</think> <answer> 5 </answer>", "5"),
        (r"<answer>\boxed{5}</answer>", "5"),
        ("The answer is $x^2$, as $y$ is 3.", "x^2"),
        ("The final answer is 3.5. Indeed.", "3.5"),
        ("We get $a$ and then $b$", "b"),
        (r"We get \(a\)", "a"),
        ("42", "42"),
        ("", None),
        ("word " * 100, None),
        (r"\boxed{}", None),
        ("#### Conclusion\nthe answer is $7$", "7"),
        ("#### -7", "-7"),
        (r"<think>\boxed{4}</think> The answer is 5.", "5"),
        (r"<think>\boxed{4}</think>", None),
        (r"<think>a</think> b <think>\boxed{4}", "4"),
    ],
)
def test_final_answer(text: str, answer: str | None) -> None:
    assert final_answer(text) == answer


def test_truth_may_be_a_whole_solution_or_a_number() -> None:
    verify = math_verifier(symbolic=False, column="solution")
    solutions = [r"We have 1 + 1 = \boxed{2}.", 2, 2.0]
    assert verify(["2", "2", "2"], solution=solutions) == [1.0, 1.0, 1.0]
    for bad in ("", " ", ["2"], True):
        with pytest.raises(RewardError, match="ground truth"):
            verify(["2"], solution=[bad])


@needs_math_verify
def test_formulas_without_end_score_zero_in_time() -> None:
    verify, seen = math_verifier(timeout=4.0, workers=2), []
    began = time.perf_counter()
    texts = [r"\boxed{9^{9^{9^{9^{9}}}}}", r"\boxed{(10^{10^{10}})!}", r"\boxed{2(k+1)}"]
    scores = verify(
        texts, ground_truth=["k+3", "k+3", "2k+2"], log_metric=lambda *a: seen.append(a[0])
    )
    assert scores == [0.0, 0.0, 1.0]
    assert {*seen} <= {"timeouts/math", "crashes/math"}
    assert time.perf_counter() - began < 120


def test_missing_math_verify_is_an_error_that_names_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"kedge-rl\[math\].*symbolic=False"):
        math([r"\boxed{k+1}"], ground_truth=["1+k"])


@needs_math_verify
def test_what_breaks_the_judge_is_counted() -> None:
    judge = pickle.loads(pickle.dumps(SymbolicChecker(timeout=20, workers=1)))
    assert judge.equal("k+1", "1+k")
    judge._ask = WorkerPool("math:isqrt", timeout=20).call  # type: ignore[assignment]
    with pytest.raises(Unanswered) as caught:
        judge.equal("k+1", "1+k")
    assert caught.value.kind == "crashes"


RIGHT = [
    ("18", "The answer is 18."),
    ("18", "So she makes 9 * 2 = $18 every day."),
    ("18", "#### 18"),
    ("18", r"Thus \boxed{18}."),
    ("18", r"\boxed{18} dollars for 3 days"),
    ("18", "<think>3 or 4</think> <answer>18</answer>"),
    ("18", "<answer>She earns 9 * 2 = 18 dollars every single day</answer> 7"),
    ("18", "**18**"),
    ("18", "The answer is **$18.00**."),
    ("18", r"$\boxed{\$18}$"),
    ("18", r"\boxed{\text{18 dollars}}"),
    ("18", r"\fbox{18}"),
    ("18", r"\boxed 18"),
    ("18", "final answer: 18"),
    ("18", r"#### \boxed{18}"),
    ("18", "She has \uff11\uff18 ducks"),
    ("-10", "#### -10"),
    ("-10", "#### \u221210"),
    ("-10", "It is \u201310 degrees"),
    ("-10", r"\boxed{-10}"),
    ("-10", r"\boxed{- 10}"),
    ("-10", "The answer is negative 10."),
    ("-10", "The answer is minus 10."),
    ("-10", "He lost money: -$10"),
    ("-10", "He lost money: $-10"),
    ("-10", "= - 10"),
    ("13", "16 - 3 = 13"),
    ("3", "the rest of 16-3"),
    ("12", "between 10-12"),
    ("1,080", "1080"),
    ("1080", "#### 1,080"),
    ("1080", r"\boxed{1{,}080}"),
    ("1080", r"\boxed{1,\!080}"),
    ("1080", r"\boxed{1\,080}"),
    ("1080", "It weighs 1\u202f080 kg"),
    ("109,200,000", "$109,200,000.00"),
    ("0.5", "1/2"),
    ("0.5", r"\boxed{\frac{1}{2}}"),
    ("0.5", r"\boxed{\dfrac12}"),
    ("0.5", "½"),
    ("2.5", "She needs 2½ cups"),
    ("2.5", r"\boxed{2\frac{1}{2}}"),
    ("2.5", "2 1/2 cups"),
    ("0.5", ".5"),
    ("0.5", "50%"),
    ("20", r"20\%"),
    ("20%", "0.2"),
    ("0.6666666667", "2/3"),
    (0.3333333333, r"\boxed{\frac{1}{3}}"),
    (43.0, "43"),
    (43, "43"),
    (0.1 + 0.2, "0.3"),
    (5e-05, "0.00005"),
    ("50000", "5e4"),
    ("35000", r"3.5 \times 10^4"),
    ("5", r"The area is \boxed{5 \text{ m}^2}"),
    ("5", "an area of 5 m2"),
    ("8", r"\boxed{5 + 3 = 8}"),
    ("8", "The answer is 5 + 3 = 8 apples out of 20."),
    ("8", "The answer is 8 apples out of 20."),
    ("8", "First 5. The answer is 9? No, the answer is 8."),
    ("72", "#### Step 1: add 3\n70 + 2 = 72"),
    ("Natalia sold 48/2 = 24.\n#### 72", "72"),
    ("18", r"\boxed{18^\circ}"),
    ("18", r"\boxed{18^{\circ}}"),
    ("18", "The answer is 18 or 18.0"),
    ("18", "The answer is 18 to be precise, and 20 is not"),
    ("18", "The answer is 9 + 9 = 18"),
]

WRONG = [
    ("18", "<think>It is 18.</think> I do not know."),
    ("18", r"<think>\boxed{18}</think> \boxed{19}"),
    ("18", ""),
    ("18", "no number at all"),
    ("18", "81"),
    ("18", "-18"),
    ("-10", "10"),
    ("10", "#### -10"),
    ("18", "180"),
    ("1080", "1,08,0"),
    ("1080", "1"),
    ("18", r"\boxed{12} 18"),
    ("18", r"\boxed{18} \boxed{12}"),
    ("18", r"\boxed{12 or 18}"),
    ("18", r"\boxed{12, 18}"),
    ("18", "#### 12 or 18"),
    ("18", "The answer is 18 or 12."),
    ("18", "The answer is 18 and $12."),
    ("18", "The answer is 18-20."),
    ("18", "The answer is 18 to 20."),
    ("18", "The answer is 18:20."),
    ("18", "<answer>18</answer><answer>12</answer>"),
    ("18", "The answer is 18. The answer is 12."),
    ("18", "12, 13, 14, 15, 16, 17, 18, 19"),
    ("20", "0.2"),
    ("0.6666666667", "0.667"),
    ("2", r"\boxed{1/0}"),
    ("18", "1" * 1_000_000),
    ("18", "१८०"),
    ("4", "10^4"),
]


@pytest.mark.parametrize(("truth", "text"), RIGHT)
def test_accepts(truth: object, text: str) -> None:
    assert gsm8k([text], ground_truth=[truth]) == [1.0]


@pytest.mark.parametrize(("truth", "text"), WRONG)
def test_refuses(truth: object, text: str) -> None:
    assert gsm8k([text], ground_truth=[truth]) == [0.0]


def test_an_open_mark_is_no_mark() -> None:
    assert gsm8k([r"\boxed{7} so \boxed{18"], ground_truth=["7"]) == [1.0]
    assert gsm8k([r"so \boxed{18"], ground_truth=["18"]) == [1.0]


def test_marked_answers_alone() -> None:
    strict = number_verifier(where="marked")
    assert strict(["18", "#### 18"], ground_truth=["18", "18"]) == [0.0, 1.0]


def test_tolerance_is_relative() -> None:
    loose = number_verifier(tolerance=0.01)
    assert loose(["101", "102"], ground_truth=["100", "100"]) == [1.0, 0.0]


def test_other_columns_and_rows_without_truth() -> None:
    answers = ["#### 3", None]
    assert gsm8k.on("answer")(["3", "3"], answer=answers, log_metric=print) == [1.0, None]


def test_reads_chat_messages() -> None:
    chat = [{"role": "assistant", "content": [{"type": "text", "text": "The answer is 4"}]}]
    tool = [{"role": "assistant", "content": None}, {"role": "tool", "content": "4"}]
    assert gsm8k([chat, tool], ground_truth=["4", "4"]) == [1.0, 0.0]


@pytest.mark.parametrize("truth", ["", "eighteen", "12 or 18", {"a": "b"}, float("nan")])
def test_a_truth_that_is_no_number_is_an_error(truth: object) -> None:
    with pytest.raises(RewardError, match="gsm8k: the ground truth"):
        gsm8k(["18"], ground_truth=[truth])


def test_a_missing_column_is_an_error() -> None:
    with pytest.raises(RewardError, match=r"'ground_truth'; available columns: answer"):
        gsm8k(["18"], answer=["18"])


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="where"):
        number_verifier(where="nowhere")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tolerance"):
        number_verifier(tolerance=2)


def test_values_are_exact() -> None:
    assert one_number("0.1").value == Fraction(1, 10)  # type: ignore[union-attr]
    assert one_number("-2 1/2").value == Fraction(-5, 2)  # type: ignore[union-attr]
    assert one_number("3 apples") is None
    assert [n.value for n in find_numbers(clean("H2O, x1 and 5 m^2"))] == [5]
