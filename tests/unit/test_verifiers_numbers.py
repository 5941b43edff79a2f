"""The verifier of numeric answers."""

from __future__ import annotations

from fractions import Fraction

import pytest

from kedge.errors import ConfigError, RewardError
from kedge.verifiers import gsm8k, number_verifier
from kedge.verifiers.numbers import clean, find_numbers, one_number

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
