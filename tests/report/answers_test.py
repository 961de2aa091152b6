import html.parser
import math

from jaxrl_tis.report import answers

LINE = {
    "step": 4, "phase": "train", "id": "a", "prompt": "1+1=<b>", "response": "2<", "answer": "2&",
    "reward": 0.5, "length": 3, "tokens": ["2", "<"], "logp_behav": [-0.6931472, 0.0],
    "logp_old": [-1.3862944, 0.0], "weight": [0.5, 1.0], "version": [3, 3],
}


class Spans(html.parser.HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.spans, self.tags = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag == "span":
            self.spans.append(dict(attributes))


def test_a_token_tells_what_it_was_and_is_coloured_by_the_difference():
    text = answers.answer(LINE)
    first, second = Spans(text).spans
    assert first["title"] == "'2', sampler's probability 0.5000, learner's probability 0.2500, weight 0.5000, version 3"
    assert first["style"] == "background:rgba(213,94,0,1.000)"  # |0.5 - 0.25| = 0.25 is full
    assert second["style"] == "background:rgba(213,94,0,0.000)"
    assert "and 1 more tokens" in text and "reward 0.5" in text
    assert "&lt;b&gt;" in text and "2&amp;" in text and "b" not in Spans(text).tags


def test_a_token_without_text_is_seen():
    text = answers.answer(LINE | {"tokens": ["2", ""]})
    assert text.count("</span>") == 2 and f">{answers.EMPTY}</span>" in text


def test_a_control_token_is_shown_by_its_name():
    text = answers.answer(LINE | {"tokens": ["2", ""], "names": [None, "</s>"]})
    assert ">&lt;/s&gt;</span>" in text and answers.EMPTY not in text
    assert Spans(text).spans[1]["title"].startswith("'</s>', sampler's")


def test_an_evaluation_has_no_colour():
    line = LINE | {"phase": "eval", "logp_behav": None, "weight": None, "version": None}
    first, _ = Spans(answers.answer(line)).spans
    assert first == {"title": "'2', learner's probability 0.2500"}


def test_the_last_step_of_each_kind_is_shown():
    lines = [LINE | {"step": step, "phase": phase, "prompt": f"{phase}{step}"}
             for step, phase in [(0, "eval"), (10, "train"), (20, "train"), (20, "eval")]]
    text = answers.section("run <1>", lines)
    assert "train20" in text and "eval20" in text and "train10" not in text and "eval0<" not in text
    assert "run &lt;1&gt;: evaluation at step 20" in text
    assert answers.section("run", []) == ""


def test_the_colour_is_linear_and_bounded():
    for gap, alpha in ((0.125, "0.500"), (0.5, "1.000")):
        line = LINE | {"tokens": ["x"], "length": 1, "logp_behav": [math.log(0.3)],
                       "logp_old": [math.log(0.3 + gap)]}
        assert f"0,{alpha})" in answers.answer(line)


def test_an_answer_is_expected_only_where_the_data_has_one():
    assert "reward 0.5, expected 2&amp;</small>" in answers.answer(LINE)
    assert "reward 0.5</small>" in answers.answer(LINE | {"answer": None})


def test_tokens_of_an_environment_are_grey_and_name_their_turn():
    """An episode of two turns: "3=" is sampled, "9 " is given, "9" is sampled."""
    line = LINE | {
        "tokens": ["3=", "9 ", "9"], "turn": [0, 1, 1], "outcome": "done", "turn_rewards": [None, 1.0],
        "logp_behav": [-0.5, None, -0.1], "logp_old": [-0.5, None, -0.1],
        "weight": [1.0, None, 1.0], "version": [0, None, 0],
    }
    for kept in (line, line | {"logp_behav": None, "weight": None, "version": None}):  # evaluation
        first, given, last = Spans(answers.answer(kept)).spans
        assert given == {"class": "given", "title": "'9 ', given before turn 2"}
        assert "class" not in first and "class" not in last
        assert "reward 0.5, expected 2&amp;, done, turns 2</small>" in answers.answer(kept)
