"""Mutants of episodes: the ids between two answers. `tests/environments/continuity_test.py` lists the
known mistakes of others with episodes, and the mutant of each."""

from tests.mutants import of

MUTANTS = [
    *of(
        "environments/continuity.py",
        ("the newline after an answer is lost", "return ids[len(sampled) :] if",
         "return ids[len(sampled) + 1 :] if",
         "test_the_ids_of_every_turn_are_those_of_the_render"),
        ("special tokens of an observation stay in a template",
         'return escaped(self._tokenizer, [{"role": "user", "content": observation}])',
         'return [{"role": "user", "content": observation}]',
         "test_special_tokens_of_an_observation_are_plain_text_on_request"),
        ("a template that writes no end has none before a message",
         "for talk in (turn, [*turn, {**OBSERVATION, \"role\": role}]):", "for talk in (turn,):",
         "test_the_end_of_an_answer_is_the_one_that_the_template_writes"),
        ("an answer without its thinking continues the row",
         "if same > turn_start and suffix else", "if suffix else",
         "test_mistake_3_a_talk_without_earlier_thinking_is_a_row_of_its_own"),
        ("an answer that a render drops counts as realigned", "> len(asked) else", ">= len(asked) else",
         "test_what_a_render_would_do_to_the_row"),
        ("a render is of the last turn alone", "talk += [_answer(answer), *messages]", "pass",
         "test_a_render_is_of_all_turns"),
        ("the first match wins", "match = lambda pair: _common(rows[pair[0]][0], prompt_ids)",
         "match = lambda pair: 0", "test_mistake_4_matches_are_of_all_ids_and_the_longest"),
        ("an answer that was cut has a sampled end", "if is_stopped and ends else []",
         "if ends else []", "test_mistake_5_no_end_is_made_up_as_sampled"),
        ("an answer that was shortened keeps a token more", "return Realign(same, suffix)",
         "return Realign(same + 1, suffix)",
         "test_mistake_7_lists_have_one_length_after_an_answer_was_shortened"),
        ("a template that leaves out earlier answers is accepted",
         "if (one.count(FIRST), two.count(SECOND)) != (1, 1):", "if False:",
         "test_a_template_that_cannot_be_extended_is_refused"),
    ),
]
