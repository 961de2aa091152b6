"""Mutants of episodes: the ids between two answers. `tests/environments/continuity_test.py` lists the
known mistakes of others with episodes, and the mutant of each."""

from tests.mutants import of

MUTANTS = [
    *of(
        "environments/host.py",
        ("the last observation is read", '"" if is_last else _observation(', '_observation(',
         "test_nobody_reads_the_last_observation"),
        ("an observation at task.max_turns is read", "is_last or bool(step.is_done)",
         "bool(step.is_done)", "test_nobody_reads_the_last_observation"),
        ("an environment is told of no cut", "if self._is_told else", "if False else",
         "test_an_environment_with_the_parameter_is_told_of_a_cut"),
    ),
    *of(
        "environments/pool.py",
        ("a repeated answer was not cut", "and self.cuts[number]", "and number == len(self.answers) - 1",
         "test_a_repeated_episode_has_the_same_cuts_and_the_same_last_answer"),
    ),
    *of(
        "environments/continuity.py",
        ("the newline after an answer is lost", "return ids[len(sampled) :] if",
         "return ids[len(sampled) + 1 :] if",
         "test_the_ids_of_every_turn_are_those_of_the_render"),
        ("an answer without its thinking continues the row",
         "if same > turn_start and suffix else", "if suffix else",
         "test_mistake_3_a_talk_without_earlier_thinking_is_a_row_of_its_own"),
        ("an answer that a render drops counts as realigned", "> len(asked) else", ">= len(asked) else",
         "test_what_a_render_would_do_to_the_row"),
        ("a render is of the last turn alone", "talk += [_answer(answer), *messages]", "pass",
         "test_a_render_is_of_all_turns"),
        ("the first match wins", "match = lambda pair: _common(rows[pair[0]][0], prompt_ids)",
         "match = lambda pair: 0", "test_mistake_4_matches_are_of_all_ids_and_the_longest"),
        ("an answer that was cut has a sampled end", "is_there = end is not None and ids",
         "is_there = ids", "test_mistake_5_no_end_is_made_up_as_sampled"),
        ("the mark of the next message stands twice", "begun = [end] if end in self._begins else []",
         "begun = []", "test_a_sampled_mark_begins_the_next_message"),
        ("the mark of another message stays", "[:1] != (end,)", "[:0] != ()",
         "test_a_sampled_mark_begins_the_next_message"),
        ("an end that no message begins with is replaced",
         "end not in self._begins or any(", "end is None or any(",
         "test_a_sampled_mark_begins_the_next_message"),
        ("an answer that was shortened keeps a token more", "return Realign(same, suffix)",
         "return Realign(same + 1, suffix)",
         "test_mistake_7_lists_have_one_length_after_an_answer_was_shortened"),
        ("a template that leaves out earlier answers is accepted",
         "if (one.count(FIRST), two.count(SECOND)) != (1, 1):", "if False:",
         "test_a_template_that_cannot_be_extended_is_refused"),
    ),
]
