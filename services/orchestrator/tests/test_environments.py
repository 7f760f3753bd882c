"""Environments: reproducible streams, verifiable rewards, a calculator that answers."""

from fractions import Fraction
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keptset_orchestrator import Arithmetic, Calculator, MultiTurn, ReverseText, Sums, WordProblems
from keptset_orchestrator.environments import make_environment
from keptset_orchestrator.environments.arithmetic import carries
from keptset_orchestrator.environments.calculator import Expression
from keptset_orchestrator.environments.numbers import last_number
from keptset_settings import (
    ArithmeticSettings,
    CalculatorSettings,
    ReverseTextSettings,
    SumsSettings,
    WordProblemsSettings,
)

EVERY = [
    make_environment(one())
    for one in (
        ReverseTextSettings,
        ArithmeticSettings,
        SumsSettings,
        WordProblemsSettings,
        CalculatorSettings,
    )
]
each = pytest.mark.parametrize("environment", EVERY, ids=lambda one: type(one).__name__)


@each
def test_item_is_a_function_of_seed_and_number(environment):
    stream = list(islice(environment.examples(3, 0), 12))
    assert list(islice(environment.examples(3, 5), 7)) == stream[5:]
    assert list(islice(environment.examples(4, 0), 12)) != stream


@each
def test_solution_has_the_full_reward_and_nonsense_none(environment):
    for example in islice(environment.examples(0, 0), 40):
        assert environment.reward(example, environment.solution(example)) == 1.0
        assert environment.reward(example, "") == 0.0
        assert all(message["content"] for message in environment.messages(example))


def test_every_sum_carries():
    for a, b in islice(Arithmetic(1, 6).examples(0, 0), 300):
        assert carries(a, b)
        assert len(str(a)) == len(str(b)) <= 6 or min(a, b) < 10


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_carries_is_what_long_addition_does(a: int, b: int):
    digits = [sum(map(int, str(number))) for number in (a, b, a + b)]
    assert carries(a, b) == (digits[0] + digits[1] != digits[2])  # each carry turns ten into one


def test_problems_grow():
    def digits(index: int) -> int:
        return len(str(next(Arithmetic(2, 4, grow_every=10).examples(0, index))[0]))

    assert [digits(index) for index in (0, 9, 10, 19, 20, 1000)] == [2, 2, 3, 3, 4, 4]


@pytest.mark.parametrize(
    ("said", "reward"),
    [("12", 1), (" 12\n", 1), ("12.", 0), ("012", 0), ("+12", 0), ("5+7=12", 0), ("١٢", 0), ("13", 0)],
)
def test_sum_is_right_only_as_such(said: str, reward: float):
    assert Arithmetic(1, 1).reward((5, 7), said) == reward


@pytest.mark.parametrize(
    ("said", "reward"),
    [
        ("5+7=12\n8+8=16", 1),
        ("8+8=16\n\n 5 + 7 = 12 ", 1),
        ("5+7=12", 1 / 2),
        ("5+7=12\n8+8=17", 1 / 2),
        ("5+7=12\n8+8=15\n8+8=16", 2 / 3),
        ("5+7=12\n5+7=12", 1 / 2),
        ("12\n16", 0),
        ("5+7=12 8+8=16", 0),
        ("7+5=12\n8+8=16", 1 / 2),
        ("So 5+7=12\n8+8=16.", 0),
    ],
)
def test_each_sum_counts_once_and_guesses_cost(said: str, reward: float):
    assert Sums(2, 1, 1).reward(((5, 7), (8, 8)), said) == reward


def test_a_sum_that_is_asked_twice_wants_two_lines():
    assert Sums(2, 1, 1).reward(((5, 7), (5, 7)), "5+7=12") == 1 / 2


def test_lists_of_sums_share_no_pair_of_the_stream():
    lists = list(islice(Sums(3, 1, 2).examples(0, 2), 4))
    assert [pair for one in lists for pair in one] == list(islice(Arithmetic(1, 2).examples(0, 6), 12))


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("It is 12.", 12),
        ("12 or rather 13", 13),
        ("-3", -3),
        ("1,250 apples", 1250),
        ("2.50", Fraction(5, 2)),
        ("4.", 4),
        ("none", None),
        ("", None),
        ("v2", None),
        ("10 - 4 = 6", 6),
        ("It is \u22123", -3),
        ("9" * 1000, int("9" * 1000)),
        ("12 and " + "9" * 5000, None),
        ("1" + ",000" * 2000, None),
    ],
)
def test_last_number_of_a_text(text: str, number: Fraction | None):
    assert last_number(text) == number


@each
@pytest.mark.parametrize("unit", ["9", "a", "<calc>", "1,000", "\ufffd", "\0", "-"])
def test_rewards_are_numbers_whatever_is_said(environment, unit: str):
    """A policy may say anything, at any length: what raises stops the run."""
    example = next(environment.examples(0, 0))
    assert 0 <= environment.reward(example, unit * 5000) < 1
    if isinstance(environment, MultiTurn):
        environment.reply(example, [unit * 5000])


def test_word_problems_have_one_right_number():
    for problem in islice(WordProblems(20).examples(1, 0), 200):
        assert problem.answer >= 0
        environment = WordProblems(20)
        assert environment.reward(problem, f"So the answer is {problem.answer}.") == 1
        assert environment.reward(problem, f"{problem.answer} or {problem.answer + 1}") == 0


@settings(max_examples=30)
@given(st.integers(0, 1000), st.integers(2, 8))
def test_expressions_have_the_value_that_python_gives_them(seed: int, terms: int):
    for expression in islice(Calculator(terms, 99, 4).examples(seed, 0), 5):
        assert eval(expression.text) == expression.value


EXAMPLE = Expression("2+3*4", 14)


def test_only_the_calculator_has_several_turns():
    assert [isinstance(environment, MultiTurn) for environment in EVERY] == [False] * 4 + [True]
    assert not isinstance(ReverseText(1, 2), MultiTurn)


@pytest.mark.parametrize(
    ("said", "answer"),
    [
        ("I need <calc>3*4</calc>", "12"),
        ("<calc> 3 - 4 </calc>", "-1"),
        ("<calc>-3+-4</calc> <calc>1+1</calc>", "-7"),
        ("<calc>3/4</calc>", "error: write <calc>A op B</calc> with whole numbers"),
        ("<calc>__import__('os')</calc>", "error: write <calc>A op B</calc> with whole numbers"),
        ("<calc></calc>", "error: write <calc>A op B</calc> with whole numbers"),
        ("14", None),
        ("<calc>3*4", None),
    ],
)
def test_calculator_answers_a_call(said: str, answer: str | None):
    reply = Calculator(3, 9, 4).reply(EXAMPLE, [said])
    assert reply == (None if answer is None else [{"role": "user", "content": answer}])


def test_calculator_is_silent_after_the_last_turn():
    call = "<calc>3*4</calc>"
    assert Calculator(3, 9, 2).reply(EXAMPLE, [call]) is not None
    assert Calculator(3, 9, 2).reply(EXAMPLE, [call, call]) is None


def test_call_is_no_answer():
    environment = Calculator(3, 9, 4)
    assert environment.reward(EXAMPLE, "The value is 14") == 1
    assert environment.reward(EXAMPLE, "<calc>2+12</calc> 14") == 0
