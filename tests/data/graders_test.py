"""The rewards of the package, called as plain functions."""

import http.server
import json
import sys
import threading
from unittest import mock

import pytest

from jaxrl_tis.data import graders
from jaxrl_tis.data.graders import REWARDS


def answer(text):
    return {"answer": text, "id": "x"}


def test_exact():
    assert REWARDS["exact"](" 85\n", answer("85 ")) == 1.0
    assert REWARDS["exact"]("085", answer("85")) == 0.0


@pytest.mark.parametrize(
    ("text", "number", "expected"),
    [
        ("the sum is 85.", "85", 1.0),
        ("it is 84, no, 85", "85", 1.0),
        ("85 or 84", "85", 0.0),
        ("$1,234.50 in total", "1234.5", 1.0),
        ("-$5", "-5", 1.0),
        ("$-5", "-5", 1.0),
        ("= -7", "7", 0.0),
        ("= \N{MINUS SIGN}7", "-7", 1.0),
        ("+7", "7", 1.0),
        ("7-4", "4", 1.0),
        ("7-4", "-4", 0.0),
        ("(1+2)-4", "4", 1.0),
        (".50", "0.5", 1.0),
        ("x=12", "12", 1.0),
        ("1, 2", "2", 1.0),
        ("1,2345", "2345", 1.0),
        ("1,234,567", "1234567", 1.0),
        ("0.1", "0.10000000000000001", 0.0),
        ("**5**", "#### 5", 1.0),
        ("no number", "5", 0.0),
        ("", "5", 0.0),
    ],
)
def test_last_number(text, number, expected):
    assert REWARDS["last_number"](text, answer(number)) == expected


@pytest.mark.parametrize(("text", "expected"), [
    ("7 13 4", 1.0), (" 7  13 4 ", 1.0), ("7 12 4", 2 / 3), ("7", 1 / 3), ("13 4", 0.0), ("", 0.0),
    ("7 13 4 9", 1.0), ("7134", 0.0),
])
def test_parts(text, expected):
    assert REWARDS["parts"](text, answer("7 13 4")) == expected


def test_last_number_of_an_answer_without_one():
    with pytest.raises(ValueError, match="the answer 'five' of x has no number"):
        REWARDS["last_number"]("5", answer("five"))


RIGHT = [
    (r"\frac12", r"\boxed{\frac{1}{2}}"),
    (r"\frac{1}{2}", r"\boxed{\frac12}"),
    (r"\frac{1}{2}", r"\boxed{\dfrac{1}{2}}, so we are done."),
    ("0.5", r"\boxed{\frac12}"),
    (r"1\frac{1}{2}", r"\boxed{\frac32}"),
    ("1000", r"\boxed{1{,}000}"),
    ("1000", r"\boxed{1\,000}"),
    ("1,000", r"\boxed{1000}"),
    ("1{,}000", "Answer: 1,000."),
    ("7", "The final answer is $7$."),
    ("7", "The final answer is 7."),
    ("7", r"Therefore, the final answer is: $\boxed{7}$. I hope it is correct."),
    ("7", "**Answer:** 7"),
    ("7", "Answer: 8\nAnswer: $7$"),
    ("7", "**Final Answer:**\n\n$7$"),
    ("7", "**Answer:**\n7"),
    ("7", "Answer: \n7"),
    ("7", "Answer: The final answer is $7$."),
    ("7", "Answer: $$7$$"),
    ("7", "Answer: 7,"),
    ("7", "Answer: 7;"),
    ("5", "Answer: $5"),
    ("0.5", "Answer: .5"),
    ("7", "The result is 7. Answer:"),
    ("7", r"\boxed{8} no, \boxed{7}"),
    ("7", r"\boxed{7} and Answer: 8"),
    ("72", "Natalia sold 48+24 = 72 clips. #### 72"),
    ("3", r"\boxed{3}"),
    (r"we get \boxed{3}", r"\boxed{3}"),
    (r"$2\sqrt{2}$", r"\boxed{\sqrt{8}}"),
    ("3x^2", r"\boxed{3x^{2}}"),
    (r"\frac{3}{4}\pi", r"\boxed{\frac{3\pi}{4}}"),
    ("(1,2)", r"Answer: $\left( 1, 2 \right)$"),
    ("6,8,10", r"\boxed{10, 8, 6}"),
    (r"\{1,2\}", r"\boxed{\{2,1\}}"),
    ("[1,2)", r"\boxed{[1,2)}"),
    ("x<3", r"\boxed{(-\infty,3)}"),
    (r"\text{even}", r"\boxed{even}"),
    ("B", r"\boxed{\text{(B)}}"),
    ("50", r"\boxed{50\%}"),
    (r"10\text{ cm}", r"\boxed{10}"),
    ("15", r"\boxed{\$15}"),
    (r"90^\circ", r"\boxed{90}"),
    ("5", r"\boxed{x=5}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix} 1 \\ 2 \end{pmatrix}}"),
    ("3+4i", r"\boxed{4i+3}"),
    (r"\frac13", r"\boxed{0.333333333}"),
    ("7", r"\[ x = 7 \]"),
]
WRONG = [
    ("7", r"\boxed{8}"),
    ("7", "Answer: 8"),
    ("7", "7\nAnswer:\n8"),
    ("7", r"\boxed{7} no, \boxed{8}"),
    ("7", r"\boxed{7, 8, 9}"),
    ("7", r"\boxed{7"),
    ("7", r"\boxed{}"),
    ("7", "I do not know"),
    ("7", ""),
    ("7", "I tried 7, but the answer: no idea"),
    ("-5", r"\boxed{5}"),
    ("x", r"\boxed{y}"),
    ("(1,2)", r"\boxed{(2,1)}"),
    ("[1,2)", r"\boxed{[1,2]}"),
    (r"(-\infty,3)", r"\boxed{x<3}"),  # the inequality of the question itself
    (r"2\sqrt2", r"\boxed{2.8284}"),
    (r"\frac{1}{3}", r"\boxed{0.333}"),
    (r"\text{even}", r"\boxed{\text{odd}}"),
    ("B", r"\boxed{A}"),
    ("12:30", r"\boxed{12:45}"),
    (r"\begin{pmatrix}1\\2\end{pmatrix}", r"\boxed{\begin{pmatrix} 2 \\ 1 \end{pmatrix}}"),
]
# Where math-verify 0.9 is mistaken: (reference, text, what it says).
MISTAKEN = [
    ("0.5", r"\boxed{50\%}", 1.0),
    ("Monday", "The final answer is Monday.", 0.0),  # a word without a box
    ("1e-3", r"\boxed{0.001}", 0.0),  # reads e as Euler's number
    ("8, 10", r"\boxed{8} and \boxed{10}", 0.0),  # the last box counts
]


@pytest.mark.all
@pytest.mark.parametrize(("reference", "text"), RIGHT)
def test_mathematics_that_is_right(reference, text):
    assert REWARDS["math"](text, answer(reference)) == 1.0


@pytest.mark.parametrize(("reference", "text"), WRONG)
def test_mathematics_that_is_wrong(reference, text):
    assert REWARDS["math"](text, answer(reference)) == 0.0


@pytest.mark.parametrize(("reference", "text", "verdict"), MISTAKEN)
def test_mathematics_that_the_library_takes_for_something_else(reference, text, verdict):
    assert REWARDS["math"](text, answer(reference)) == verdict


def test_mathematics_that_cannot_be_judged_is_no_score():
    with pytest.raises(ValueError, match="math-verify cannot read the answer '' of x"):
        REWARDS["math"]("7", answer(""))
    with mock.patch.object(graders, "COMPARE_SECONDS", 1):
        with pytest.raises(TimeoutError, match="math-verify took too long"):
            REWARDS["math"](r"\boxed{9^{9^{9^{8}}}}", answer("9^{9^{9^{9}}}"))


@pytest.mark.parametrize(("name", "package", "extra"), [
    ("math", "math_verify", "math"), ("reasoning_gym", "reasoning_gym", "tasks"),
])
def test_a_package_that_is_missing_is_named(name, package, extra):
    with mock.patch.dict(sys.modules, {package: None}):
        with pytest.raises(ImportError, match=rf"{package}.*pip install 'jaxrl_tis\[{extra}\]'"):
            graders.resolve(name)


def test_reasoning_gym_uses_the_score_of_the_package():
    meta = '{"source_dataset": "chain_sum", "expression": "500 + 500"}'
    example = {"prompt": "500 + 500 =", "answer": "1000", "id": "x", "meta": meta}
    assert REWARDS["reasoning_gym"](" 1,000.0\n", example) == 1.0  # the package allows both
    assert REWARDS["reasoning_gym"]("999", example) == 0.0
    # A text that only holds the answer gets len("1000") / len("it is 1000") = 4 / 10.
    assert REWARDS["reasoning_gym"]("it is 1000", example) == pytest.approx(0.4)


class Judge(http.server.BaseHTTPRequestHandler):
    """Says what the answer says, and keeps what it was asked."""

    asked: list = []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, self.headers["Authorization"], body))
        content = body["messages"][0]["content"].partition("Answer:\n")[2].partition("\n\n")[0]
        reason = "length" if content.startswith("cut") else "stop"
        choice = {"message": {"content": content}, "finish_reason": reason}
        reply = json.dumps({"choices": [choice]}).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_):
        pass


def test_a_judge_is_asked_and_its_last_word_counts(monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", "t")
    with http.server.HTTPServer(("127.0.0.1", 0), Judge) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        judge = graders.resolve("judge", f"http://127.0.0.1:{server.server_port}/ m")
        example = {"id": "x", "prompt": "2+3=", "answer": "five"}
        ask = lambda text, **more: judge(text, example | more)
        assert [ask(x) for x in ("Not wrong. Correct.", "incorrect: **WRONG**", "correct? unsure")] == [1, 0, "unsure"]
        for said in ("incorrect", "It is not correct.", "It isn't correct", "The correct answer is 7, and this", "cut: wrong"):
            with pytest.raises(ValueError, match="the judge's reply ends with none of correct, wrong, unsure"):
                ask(said)
        ask("wrong", prompt=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3?"}])
        server.shutdown()
    path, token, body = Judge.asked[-1]
    assert (path, token, body["model"], body["temperature"]) == ("/v1/chat/completions", "Bearer t", "m", 0)
    content = body["messages"][0]["content"]
    assert "Problem:\nBe brief.\n2+3?\n" in content and "Reference:\nfive\n" in content


@pytest.mark.parametrize("name", ["exact", "last_number", "math", "parts"])
def test_an_example_without_an_answer(name):
    with pytest.raises(ValueError, match="example x has no answer to compare with"):
        REWARDS[name]("5", {"id": "x", "prompt": "2+3="})
